"""A run's output for a person: a progress bar, or plain lines where there is no terminal, and closing tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megasharp.common import output
from megasharp.common.terminal import guard_streams, visible

STAGES = (
    *("start", "phases", "rollout", "reward", "prepare", "annotate", "update", "memory", "sync"),
    *("log", "checkpoint", "eval", "other"),
)
BEFORE, AFTER = "before", "after"


class SafeConsole(Console):
    """A console whose text is made visible: no control sequence comes out of it but rich's own."""

    def __init__(self, **options: Any) -> None:
        # Looked up now: while a bar is shown, rich has a stream of its own in this place.
        super().__init__(**{"file": getattr(sys.stdout, "rich_proxied_file", sys.stdout), **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with each piece of text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step's metrics for a person; `tokens_per_second`: response tokens over the step's seconds."""

    step: int
    reward: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class SuiteFigures:
    """One evaluation: pass@k by k, and the mean number of distinct correct answers among a problem's samples."""

    pass_at_k: Mapping[int, float]
    distinct_correct: float


@dataclass(frozen=True, slots=True)
class SuiteChange:
    """One suite's evaluations by name: "before" and "after" where measured, then others in the order to show them.

    Sampling with a memory network is such another one.
    """

    suite: str
    evaluations: Mapping[str, SuiteFigures]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Totals of an attempt, which trained `steps` steps, and the evaluations of the whole run.

    `stage_seconds` adds up to the attempt's wall-clock seconds. `padding`, `imbalance`, `engine_gap`: means over its
    steps of `batch/padding`, `batch/imbalance` and `policy/engine_gap` (nats), None where no step was packed.
    `largest_gap` is the largest of the steps' `policy/engine_gap`, `reward_errors` the mean of `reward/errors`.
    """

    steps: int
    suites: Sequence[SuiteChange]
    stage_seconds: Mapping[str, float]
    tokens: float
    peak_rss_bytes: int
    padding: float | None = None
    imbalance: float | None = None
    engine_gap: float | None = None
    largest_gap: float | None = None
    reward_errors: float | None = None

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the attempt."""
        return sum(self.stage_seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of training, without start, evaluation, checkpoints and logging."""
        apart = ("start", "log", "checkpoint", "eval", "other")
        training = sum(seconds for stage, seconds in self.stage_seconds.items() if stage not in apart)
        return self.tokens / training if training else 0.0


class Progress:
    """Shows steps up to `total_steps`; `first_step` is this attempt's first, later than 1 after a resume.

    On a terminal it is a bar. Elsewhere (a file, a pipe, Slurm's log) it is one plain line for the first and
    the last step, every `plain_every` steps and whenever `plain_seconds` have passed. The time of a step is counted
    from `__enter__`; `note` may be called before.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        *,
        console: Console | None = None,
        plain_every: int = 10,
        plain_seconds: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._first = total_steps, first_step
        self._plain_every, self._plain_seconds = plain_every, plain_seconds
        self._now = now
        self._start = self._last_line = now()
        # FORCE_COLOR, which notebooks set, asks for colours in a pipe too: no reason to draw a bar there.
        self._console = console or SafeConsole(force_terminal=sys.stdout.isatty())
        self._bar: Bar | None = None
        if self._console.is_terminal:
            shown = TextColumn("{task.fields[figures]}", markup=False)
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), shown)
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step - 1, figures="")

    def __enter__(self) -> Self:
        # Engines that start and a first evaluation must not count in the estimate of the time left.
        self._start = self._last_line = self._now()
        if self._bar:
            self._bar.start()
            # It put streams of rich's in the place of the process's, which would read colours out of the text.
            guard_streams()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, line: StepLine) -> None:
        """Show that step `line.step` is done."""
        if self._bar and output.is_lost():
            # A bar that is drawn ten times a second would fill the log.
            self._bar.stop()
            self._bar = None
        step, done = line.step, line.step - self._first + 1
        left = (self._total - step) * (self._now() - self._start) / max(1, done)
        figures = f"reward {line.reward:.3f}  {line.tokens_per_second:,.0f} tok/s  ETA {duration(left)}"
        if self._bar:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        waited = self._now() - self._last_line >= self._plain_seconds
        if waited or step in (self._first, self._total) or step % self._plain_every == 0:
            self._last_line = self._now()
            self.note(f"step {step}/{self._total}  {figures}")

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        self._console.print(Text(visible(text)), soft_wrap=True)


def duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print each suite's evaluations, seconds of the stages that took any, tokens per second and peak memory."""
    console = console or SafeConsole()
    for change in summary.suites:
        console.print(_passk_table(change))
    table = Table(
        title=f"{summary.steps} step{'s' * (summary.steps != 1)} in {duration(summary.seconds)}", title_justify="left"
    )
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for stage in (*STAGES, *sorted(summary.stage_seconds.keys() - set(STAGES))):
        seconds = summary.stage_seconds.get(stage, 0.0)
        if round(seconds, 1) > 0.0:
            table.add_row(stage, f"{seconds:.1f}", f"{seconds / summary.seconds:.0%}" if summary.seconds else "-")
    table.add_section()
    table.add_row("tokens/s in training", f"{summary.tokens_per_second:,.0f}", "")
    table.add_row("peak memory, MiB", f"{summary.peak_rss_bytes / 2**20:,.0f}", "")
    for name, share in (("packed rows that are padding", summary.padding), ("DP imbalance", summary.imbalance)):
        if share is not None:
            table.add_row(name, f"{share:.1%}", "")
    if summary.reward_errors:
        table.add_row("responses whose reward failed", f"{summary.reward_errors:.2%}", "")
    for name, gap in (("engine gap, nats", summary.engine_gap), ("engine gap, largest step", summary.largest_gap)):
        if gap is not None:
            table.add_row(name, f"{gap:.2g}", "")
    console.print(table)


def _passk_table(change: SuiteChange) -> Table:
    further = [name for name in change.evaluations if name not in (BEFORE, AFTER)]
    # A suite is named by its file, and rich would read brackets in a plain string as markup.
    table = Table(title=Text(visible(f"{change.suite}: pass@k"), style="table.title"), title_justify="left")
    for heading in ("k", BEFORE, AFTER, "change", *further):
        table.add_column(heading, justify="right")
    shown = [change.evaluations.get(name) for name in (BEFORE, AFTER, *further)]
    for k in sorted({k for figures in shown if figures for k in figures.pass_at_k}):
        table.add_row(str(k), *_cells([figures.pass_at_k.get(k) if figures else None for figures in shown]))
    table.add_section()
    table.add_row("distinct correct", *_cells([figures.distinct_correct if figures else None for figures in shown]))
    return table


def _cells(values: Sequence[float | None]) -> Iterator[str | Text]:
    """Format before, after, the change between them, and the other values."""
    before, after, *further = values
    yield from (_number(before), _number(after))
    if before is None or after is None:
        yield "-"
    else:
        yield Text(f"{after - before:+.3f}", style="green" if after >= before else "red")
    yield from map(_number, further)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
