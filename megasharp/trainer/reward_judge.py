"""Where a run's rewards come from: its tasks' verifiers, in this process or in a pool of worker processes.

Here is decided where responses are judged; the verifiers themselves are `tasks/`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.config.core import find
from megasharp.config.data import DataSource, MixedSource, RewardConfig, RewardFunction
from megasharp.config.run_config import RunConfig
from megasharp.evals.suites import Suite
from megasharp.tasks.environment import plays
from megasharp.tasks.final_answer import FinalJudge, rule_of
from megasharp.tasks.judge import DirectJudge, Item, Judge, TaskItem
from megasharp.tasks.levels import LevelsJudge
from megasharp.tasks.own_reward import OWN_TASK, OwnFunction, OwnReward, is_own, own_task
from megasharp.tasks.problems import task_of
from megasharp.tasks.reward_signature import Style, signature_of
from megasharp.tasks.sandbox.bubblewrap import RISK, open_sandbox
from megasharp.tasks.sandbox.pool import PoolCounts, VerifierPool, how_ended
from megasharp.tasks.table import make_verifiers, rows_of
from megasharp.tasks.user_import import look_beside

MOST_WORKERS = 4
# Rows on which a user's function is called before a run starts.
TRIED_ROWS = 2
# A program is ended before its worker is, which is for what hangs otherwise.
_PROGRAMS_SHARE = 0.9
# Most lines of a traceback on the console, characters of one on a single line, and kinds of failures counted apart.
_SHOWN_LINES = 12
_ONE_LINE = 600
_MOST_KINDS = 50
# Characters of a made-up response that are printed.
_SHOWN_TEXT = 60


class RewardJudge:
    """Gives the rewards of a run's `tasks`; `close` ends its workers, whose output goes to `log`.

    `own` are a user's rewards by task (`own_rewards`); without it those of `reward` judge OWN_TASK. `say` gets what the
    user risks, and what fails first. Raises UserError where programs are to run in a sandbox that this machine does
    not have.
    """

    def __init__(
        self,
        reward: RewardConfig,
        tasks: Collection[str],
        log: Path | None,
        say: Callable[[str], None],
        own: Mapping[str, OwnReward] | None = None,
    ) -> None:
        sandbox = open_sandbox(reward.sandbox) if _runs_programs(tasks) else None
        if sandbox is not None and reward.sandbox == "none":
            say(RISK)
        seconds = _PROGRAMS_SHARE * reward.timeout_s
        self._own = own_rewards(reward) if own is None else own
        make = partial(make_verifiers, tuple(tasks), self._own, sandbox, seconds)
        verifiers = make()
        self._taken = PoolCounts()
        self._pool: VerifierPool | None = None
        workers = workers_for(reward, {*tasks, *self._own})
        if workers > 0:
            make_there, limit = partial(make, preload=True), reward.timeout_s
            self._pool = VerifierPool(make_there, verifiers.keys(), workers, limit, own=self._own, log=log)
        self._log = log
        self._say = say
        judge: Judge = FinalJudge(self._pool or DirectJudge(verifiers), rule_of(reward))
        if reward.levels is not None:
            judge = LevelsJudge(judge, reward.levels)
        self.judge = LoggingJudge(judge, say, log)

    def take(self) -> dict[str, float]:
        """Return what happened to workers since the last call, by metric name; nothing without a pool."""
        self.judge.write_counts()
        if self._pool is None:
            return {}
        counts = self._pool.counts
        now, before = asdict(counts), asdict(self._taken)
        self._taken = counts
        return {f"reward/{name}": float(now[name] - before[name]) for name in now}

    def blame(self) -> str:
        """Return how many rewards failed and how the first did, in a clause; called once some have."""
        where = f" (more in {self._log})" if self._log else ""
        return f"{self.judge.failures} failed since the start, the first with {self.judge.first}{where}"

    def try_function(self, rows: Sequence[TaskItem]) -> None:
        """Call the user's functions on those of these rows that they judge, with made-up responses.

        Raises UserError where it gives no reward for one of them, RunFailed where something killed its process.
        """
        asked = [(row, text) for row in rows if row.task in self._own for text in made_up_responses(row.answer)]
        items = [
            Item(row.task, text, row.answer, row.question or row.text, row.messages, row.row) for row, text in asked
        ]
        # What takes several in a call has several here. Others one after the other: all that hang would take as long
        # as the first one each.
        batched = [each for each in items if self._own[each.task].batch > 1]
        tried = iter(self.judge.verdicts(batched))
        for item, (row, text) in zip(items, asked, strict=True):
            verdict = next(tried) if self._own[row.task].batch > 1 else self.judge.verdicts([item])[0]
            if verdict.failure:
                self._refuse(row, text, verdict)
            # The last one is the answer, where that is a text or a number.
            if text == [*made_up_responses(row.answer)][-1]:
                shown = text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}..."
                # A number of several functions is each one's own.
                parts = ", ".join(f"{name} {value:g}" for name, value in verdict.parts.items())
                made_of = f" ({parts})" if parts else ""
                self._say(f"reward     row {row.id}, response {shown!r} -> {verdict.reward:g}{made_of}")

    def _refuse(self, row: TaskItem, text: str, verdict: Verdict) -> None:
        where = f"more in {self._log}" if self._log else "more above"
        paths = [each.path for each in self._own[row.task].functions]
        lists = row.messages and any(signature_of(path).style is Style.TRL for path in paths)
        hint = "; completions are lists of messages here, as the prompt is one" if lists else ""
        line = (
            f"reward.function: {', '.join(paths)} gives no reward for row {row.id} of {row.source} and the "
            f"made-up response {text!r}: {self.judge.first}{hint}; {where}"
        )
        killed = verdict.outcome is Outcome.INFRA and how_ended(-signal.SIGKILL) in verdict.detail
        raise RunFailed(line) if killed else UserError(line)

    def close(self) -> None:
        """End the workers."""
        self.judge.write_counts()
        if self._pool is not None:
            self._pool.close()


class LoggingJudge:
    """A judge that reports failures of verifiers: the first of each kind in full, later ones by their number.

    A kind is an exception's type and its line of code. Its first one goes to `say` with the end of its traceback, and
    whole to the file `log`. Of the `failure` of a verdict, its kind is left, or nothing where it does not count as one.
    `failures` counts those that do, and `first` is the first one's traceback on one line.
    """

    def __init__(self, judge: Judge, say: Callable[[str], None], log: Path | None) -> None:
        self._judge = judge
        self._say = say
        self._log = log
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._unwritten: Counter[str] = Counter()
        self.failures = 0
        self.first = ""

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self._judge.tasks

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one for each item, in order."""
        return [self._noted(item, verdict) for item, verdict in zip(items, self._judge.verdicts(items), strict=True)]

    def write_counts(self) -> None:
        """Write to the log how many more failures there were of each kind since the last call."""
        with self._lock:
            lines = [f"{count} more: {kind}\n" for kind, count in self._unwritten.items()]
            self._unwritten.clear()
        self._write("".join(lines))

    def _noted(self, item: Item, verdict: Verdict) -> Verdict:
        """Report the verdict's failure; return it with what counts as one, shortened."""
        own = is_own(item.task)
        if not verdict.failure and verdict.outcome is not Outcome.INFRA:
            return verdict
        # A response may be too much for a task's own verifier, which then works as it should.
        counts = bool(verdict.failure) and (own or verdict.outcome is Outcome.ERROR)
        kind, _, trace = (verdict.failure or verdict.detail).partition("\n")
        if counts or verdict.outcome is Outcome.INFRA:
            self._report(kind, trace, verdict, own, counts)
        return replace(verdict, failure=kind if counts else "")

    def _report(self, kind: str, trace: str, verdict: Verdict, own: bool, counts: bool) -> None:
        with self._lock:
            self.failures += counts
            if len(self._seen) >= _MOST_KINDS and kind not in self._seen:
                kind = "of other kinds"
            self._seen[kind] += 1
            if self._seen[kind] > 1:
                self._unwritten[kind] += 1
                return
            whole = trace or verdict.detail
            if counts and not self.first:
                self.first = _in_one_line(whole)
        who = "reward.function" if own else "a verifier"
        what = "a response could not be judged and is left out" if verdict.outcome is Outcome.INFRA else f"{who} fails"
        metric = "reward/errors" if counts else f"reward/outcome_{verdict.outcome}"
        shown = "".join(f"\n    {line}" for line in trace.splitlines()[-_SHOWN_LINES:])
        self._say(f"{what} ({verdict.detail}); more of the kind are only counted, in {metric}{shown}")
        self._write(f"{what} ({kind})\n{whole}\n")

    def _write(self, text: str) -> None:
        # A full disk is reported by who must write.
        with suppress(OSError):
            if self._log is not None and text:
                with self._log.open("a", encoding="utf-8", errors="replace") as log:
                    log.write(text)


def _in_one_line(trace: str) -> str:
    """Return a traceback's first frame, which is the verifier's own, and the exception.

    Example: `File "mine.py", line 2, in brief: return 1 / 0: ZeroDivisionError: division by zero`.
    """
    lines = trace.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return ": ".join(lines)[:_ONE_LINE]
    first = [line for line in lines[frames[0] : frames[0] + 2] if line.startswith("  ")]
    error = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
    return ": ".join(line.strip() for line in (*first, *error))[:_ONE_LINE]


def made_up_responses(answer: TaskAnswer) -> Iterator[str]:
    """Yield responses that a policy might give: nothing, plain words, and the answer where that is a text or number."""
    yield ""
    yield "These are words without an answer."
    values = [getattr(answer, field.name) for field in fields(answer)]
    yield from [str(value) for value in values if isinstance(value, str | int | float) and value != ""][:1]


def own_reward_of(functions: Sequence[OwnFunction], reward: RewardConfig) -> OwnReward:
    """Return the reward of a user's functions, as it is judged in one of the run's processes."""
    workers = max(1, workers_for(reward, {OWN_TASK}))
    return OwnReward(tuple(functions), max(1, reward.concurrency // workers), reward.timeout_s)


def own_rewards(reward: RewardConfig, mix: Sequence[MixedSource] = ()) -> dict[str, OwnReward]:
    """Return the user's rewards by the task that they judge: that of all prompts, and those of a mixture's sources."""
    given: dict[str, str | Sequence[RewardFunction] | None] = {OWN_TASK: reward.function or reward.functions}
    given |= {own_task(source.own_name): source.reward for source in mix}
    return {task: own_reward_of(_functions(of), reward) for task, of in given.items() if of}


def _functions(given: str | Sequence[RewardFunction]) -> list[OwnFunction]:
    if isinstance(given, str):
        return [OwnFunction(given)]
    return [OwnFunction(each.function, each.weight, each.name or "") for each in given]


def described(own: OwnReward, items: Sequence[TaskItem]) -> list[str]:
    """Return a line for each function of a reward: its style, and the columns of these rows that it reads."""
    row = items[0].row if items else None
    weights = len(own.functions) > 1 or own.functions[0].weight != 1.0
    return [
        f"{each.path}{f' x {each.weight:g}' if weights else ''}: {signature_of(each.path).in_words(row, own.at_once)}"
        for each in own.functions
    ]


def judged_tasks(config: RunConfig, suites: Sequence[Suite]) -> set[str]:
    """Return the tasks whose verifiers a run needs: its suites', and training's where no own function judges it."""
    return {judging_task(source, config.reward) for source in config.data.sources} | {suite.task for suite in suites}


def judging_task(source: DataSource, reward: RewardConfig) -> str:
    """Return the task that judges a source: that of its own function, of the run's function, or the source's."""
    if isinstance(source, MixedSource) and source.reward is not None:
        return own_task(source.own_name)
    return OWN_TASK if own_rewards(reward) else task_of(source)


def training_items(
    items: Sequence[TaskItem], reward: RewardConfig, where: str = "", source: MixedSource | None = None
) -> list[TaskItem]:
    """The problems of training, or of one source of it, to be judged by the user's functions where there are some.

    Functions are looked for beside the run file `where` too. Raises UserError where one has no known signature, or
    needs a column that no row has, and where environments judge.
    """
    rewards = _found_rewards(reward, [] if source is None else [source], where)
    task = OWN_TASK if source is None else judging_task(source, reward)
    if task not in rewards:
        return list(items)
    if plays(items):
        raise UserError(
            f"{where or items[0].source}: the reward function {rewards[task].functions[0].path} would judge responses "
            f"of task {items[0].task}, whose environment judges them itself; leave the function out"
        )
    for each in rewards[task].functions:
        signature_of(each.path).check_rows(items)
    return [replace(item, task=task) for item in items]


def check_functions(config: RunConfig, where: str) -> None:
    """Import the functions that judge training, without its rows. Raises UserError where one has no known signature."""
    mix = [source for source in config.data.sources if isinstance(source, MixedSource)]
    for own in _found_rewards(config.reward, mix, where).values():
        for each in own.functions:
            signature_of(each.path)


def _found_rewards(reward: RewardConfig, mix: Sequence[MixedSource], where: str) -> dict[str, OwnReward]:
    if where:
        look_beside(find(where))
    return own_rewards(reward, mix)


def workers_for(reward: RewardConfig, tasks: Collection[str]) -> int:
    """Return how many processes judge: `reward.workers`, else 0, or half of the cores for what must not run here.

    A user's own function is among that, because nobody knows how long it takes.

    Example: `workers_for(RewardConfig(), {"countdown"})` is 0.
    """
    if reward.workers is not None:
        return reward.workers
    own = reward.function is not None or reward.functions or any(map(is_own, tasks))
    if not own and not _worker_tasks(tasks):
        return 0
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))


def check_judging(reward: RewardConfig, tasks: Collection[str], where: str, *, elsewhere: bool = False) -> None:
    """Refuse own rows that nothing judges, a limit that nobody would keep, and programs without a sandbox.

    And another library's verifier in this process. A run that is `elsewhere` has another machine's sandbox.
    """
    if OWN_TASK in tasks and not own_rewards(reward):
        raise UserError(
            f"{where}: nothing judges the responses to rows of your own: set reward.function=MODULE:FUNCTION "
            "(eval: --reward MODULE:FUNCTION), or the task of the rows, such as data.task=math, for its verifier"
        )
    workers = workers_for(reward, tasks)
    for task in _worker_tasks(tasks) if workers == 0 else []:
        raise UserError(
            f"{where}: task {task} is judged in worker processes alone, of which reward.workers=0 starts none; "
            "leave the key out, or set it to 2 say (eval: --workers 2)"
        )
    programs = _runs_programs(tasks)
    if workers == 0 and not programs and reward.timeout_s != RewardConfig.model_fields["timeout_s"].default:
        raise UserError(
            f"{where}: reward.timeout_s is kept by worker processes, of which this task starts none by itself; "
            "set reward.workers or leave this key at its default"
        )
    if programs and not elsewhere:
        open_sandbox(reward.sandbox)


def _runs_programs(tasks: Collection[str]) -> bool:
    """Return whether a verifier of these tasks runs programs that the model wrote."""
    return any(row.sandbox for row in rows_of(tasks).values())


def _worker_tasks(tasks: Collection[str]) -> list[str]:
    """Return those whose verifier may never end: only a process that can be killed bounds it."""
    return [name for name, row in rows_of(tasks).items() if row.worker]
