"""Asynchronous collection: groups as they become complete, from an engine that samples many prompts at once.

A step runs `wanted` prompts, more with oversampling. As soon as a prompt's responses are all there they are verified
and selected; a group that selection drops is replaced at once. When enough groups are kept, the step ends, and what is
still being sampled are stragglers: their prompts are the first of the next step, so none is lost and none trains twice.

`rollout.stragglers` says what happens to them: `abort` pauses them, so nothing is in flight between two steps; `keep`
lets them go on while the policy learns, and starts the next step's prompts besides. With `rollout.max_staleness` 0 a
straggler's tokens are thrown away, because the next step's policy is another one. Otherwise its responses are partial
rollouts, which the next weights continue.

Nothing is thrown away as stale. A prompt that has begun is due by a last step: the version of its oldest token, and
`max_staleness` more. Of what has begun, no more is ever due by a step than the steps until then can take. Three rules
keep this so. No more prompts begin than fit. A step does not end before what is due in it is there. And a complete
prompt waits where it would take the place of one that is due before it.

Which groups a step gets is determined by the order of the prompts as long as nothing is oversampled: it ends with the
first prompt that makes `wanted` kept ones, whatever finished first.

Between two steps, and where a request to save cuts one short, `unfinished` is what no step has trained on yet.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megasharp.common.errors import EnginesLost, NotSampled, UserError
from megasharp.common.records import Completion, Group, SamplingParams
from megasharp.common.signals import SaveAsked, check_save, interruptible
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.in_flight import PromptWork, Unfinished, staleness
from megasharp.rollout.step_request import (
    AsyncEngine,
    Collected,
    GroupMaker,
    PromptSource,
    StepRequest,
    most_refills,
)
from megasharp.rollout.tally import Tally

_LOOK_S = 1.0

# Returns when one of the futures is done, or after about a second.
Wait = Callable[[Sequence[Future[list[Completion]]]], None]


def _wait(running: Sequence[Future[list[Completion]]]) -> None:
    with interruptible():
        wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)


@dataclass(slots=True)
class Counts:
    """Counts of what happened to prompts in one step, and the tally of responses (docs/reference/metrics.md)."""

    aborted: int = 0
    continued: int = 0
    stale_dropped: int = 0
    overdue: int = 0
    retried: int = 0
    unsampled: int = 0
    tally: Tally = field(default_factory=Tally)

    def metrics(self) -> dict[str, float]:
        """Return the counts under the names of their metrics."""
        return {
            "rollout/aborted": float(self.aborted),
            "rollout/continued": float(self.continued),
            "rollout/stale_dropped": float(self.stale_dropped),
            "rollout/overdue": float(self.overdue),
            "rollout/retried": float(self.retried),
            "rollout/unsampled": float(self.unsampled),
        }


def _nothing() -> None:
    pass


class AsyncRollouts:
    """Collects groups step by step; what one step leaves unfinished is where the next one starts.

    Of `config`, `oversample`, `max_staleness` and `stragglers` say how far collection may run ahead of the weights.
    `meanwhile` is called about every second while engines are waited for, which `waiting` does.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        maker: GroupMaker,
        config: RolloutConfig,
        meanwhile: Callable[[], None] = _nothing,
        waiting: Wait = _wait,
    ) -> None:
        assert config.stragglers == "abort" or config.max_staleness > 0, "what is kept is sampled by earlier weights"
        self._engine = engine
        self._meanwhile = meanwhile
        self._waiting = waiting
        self._maker = maker
        self._config = config
        # Prompts taken from the source that are in no step's groups yet, in the order in which they were taken.
        self._backlog: list[PromptWork] = []

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Prompts that were taken but are in no step's groups, and what was sampled of them: the next step's first."""
        return tuple(work.record() for work in self._backlog)

    def take_up(self, source: PromptSource, prompts: Sequence[Unfinished]) -> int:
        """Go on with what an earlier process left: the next prompts of `source`.

        Returns the number of prompts sampled again from the start, because prompt or seeds differ from what was stored,
        or because no experts were recorded, which routing replay needs.
        """
        useless = 0
        for prompt, so_far in zip(source.take(len(prompts)), prompts, strict=True):
            # Those of a stage before have another number of responses than the next prompts will have.
            request = self._maker.again(prompt, len(so_far.responses))
            fits = so_far.answers(prompt, request) and (so_far.has_experts or not self._maker.needs_experts)
            self._backlog.append(PromptWork(prompt, request, so_far if fits else None))
            useless += not fits and so_far.sampled_with is not None
        return useless

    def collect(self, source: PromptSource, order: StepRequest) -> Collected:
        """Collect a step's groups, with ids like `step7-3` for its prompt number 3; a straggler's number is left out.

        Raises UserError for a prompt whose task has no verifier, when no engine is left, and when none takes any
        prompt. `SaveAsked` goes through: the step's prompts, with what was sampled of them, are `unfinished` then.
        """
        started = time.perf_counter()
        counts = self._counts_from_now()
        sampling = self._maker.sampling_for(order)
        self._backlog = [work.renewed(self._maker.request(work.prompt, order.responses)) for work in self._backlog]
        self._put_right(sampling, counts)
        step = _Step(self, order, sampling, lambda: self._new(source, order), counts)
        try:
            groups = step.run()
        except SaveAsked:
            self._backlog = step.begun() + self._backlog
            # Engines that share the learners' devices must be idle before these can save.
            _abort(self._engine, self._backlog, counts.tally)
            raise
        self._backlog = step.unfinished() + self._backlog
        if self._config.stragglers == "abort" or order.last:
            self._backlog = self._halt(self._backlog, counts)
        else:
            self._run_ahead(source, order, sampling, counts.tally)
        counts.retried += self._engine.retried
        counts.tally.retried(self._engine.take_retried())
        kept = [group for group in groups if group.dropped_reason is None]
        total = time.perf_counter() - started
        seconds = {"rollout": total - step.reward_seconds, "reward": step.reward_seconds}
        return Collected(groups, seconds, {**counts.metrics(), **staleness(kept)}, counts.tally)

    def _counts_from_now(self) -> Counts:
        """Begin a step's counts. Evaluations sent responses again too, which no step counts."""
        in_flight = {seed for work in self._backlog for seed in work.in_flight}
        between = [seed for seed in self._engine.take_retried() if seed in in_flight]
        # The engine's count at the step's end is added.
        counts = Counts(retried=len(between) - self._engine.retried)
        counts.tally.retried(between)
        return counts

    def _new(self, source: PromptSource, order: StepRequest) -> PromptWork:
        (prompt,) = source.take(1)
        return PromptWork(prompt, self._maker.request(prompt, order.responses))

    def _put_right(self, sampling: SamplingParams, counts: Counts) -> None:
        """Put what has begun under this step's parameters; throw away what an on-policy step may not train on."""
        changed = [work for work in self._backlog if not work.fits(sampling)]
        stale = [
            work for work in self._backlog if self._config.max_staleness == 0 and _older(work, self._engine.version)
        ]
        _abort(self._engine, [*changed, *(work for work in stale if work.fits(sampling))], counts.tally)
        for work in stale:
            # A request in flight may have begun to be sampled later than it was sent.
            if work.begun and _older(work, self._engine.version):
                work.discard(counts.tally)
                counts.stale_dropped += 1
        for work in changed:
            work.go_on_with(sampling)

    def _halt(self, works: list[PromptWork], counts: Counts) -> list[PromptWork]:
        counts.aborted += sum(work.begun for work in works)
        _abort(self._engine, works, counts.tally)
        if self._config.max_staleness == 0:
            for work in works:
                work.discard(counts.tally)
        return works

    def _run_ahead(self, source: PromptSource, order: StepRequest, sampling: SamplingParams, tally: Tally) -> None:
        """Keep the engines busy while the policy learns: a step's prompts in flight, and no more than will train."""
        most = min(prompts_at_once(order.wanted, self._config.oversample), order.wanted * self._config.max_staleness)
        while len(self._backlog) < most:
            self._backlog.append(self._new(source, order))
        begun = sum(work.begun for work in self._backlog)
        for work in self._backlog:
            if work.future is None and not work.complete and (work.begun or begun < most):
                begun += not work.begun
                work.begin(self._engine, sampling, tally)


class _Step:
    """One step's collection, from the backlog of `rollouts` and then from `new`. Works are numbered as they start."""

    def __init__(
        self,
        rollouts: AsyncRollouts,
        order: StepRequest,
        sampling: SamplingParams,
        new: Callable[[], PromptWork],
        counts: Counts,
    ) -> None:
        self.reward_seconds = 0.0
        self._rollouts = rollouts
        self._engine, self._maker, self._backlog = rollouts._engine, rollouts._maker, rollouts._backlog
        self._staleness = rollouts._config.max_staleness
        self._order = order
        self._sampling = sampling
        self._new = new
        self._counts = counts
        self._version = self._engine.version
        at_once = prompts_at_once(order.wanted, rollouts._config.oversample)
        # Without staleness what does not fit into this step is thrown away at its end.
        self._at_once = min(at_once, order.wanted * (1 + self._staleness)) if self._staleness else at_once
        self._most = self._at_once + most_refills(order.wanted, order.refill_rounds)
        self._open: dict[int, PromptWork] = {}
        self._done: dict[int, PromptWork] = {}
        self._groups: dict[int, Group] = {}
        self._refused: list[str] = []
        self._kept = 0
        self._started = 0
        # `_last_due_now` until something changes what it counts.
        self._last_due: int | None = None

    def run(self) -> list[Group]:
        """Return the groups in the order of their prompts. `SaveAsked` is raised only here, between two of them."""
        self._go_on()
        self._start()
        while self._open and self._kept < self._order.wanted:
            # Those that arrived together with the last kept group stay open, and come first in the next step.
            advanced = [self._advance(number) for number in self._ready()]
            if not any(advanced):
                running = [work.future for work in self._open.values() if work.future is not None]
                assert running, "the complete prompt that is due first has a place"
                # A piece of work takes seconds, as waiting does; answers that come during it are next.
                if self._order.meanwhile is not None and self._order.meanwhile.work():
                    check_save()
                else:
                    self._rollouts._waiting(running)
                self._rollouts._meanwhile()
            self._start()
        check_save()
        if self._groups and len(self._refused) == len(self._groups):
            raise UserError(f"the engines sampled none of {len(self._refused)} prompts; the first: {self._refused[0]}")
        return [self._groups[number] for number in sorted(self._groups)]

    def unfinished(self) -> list[PromptWork]:
        """Prompts that were started but are in no group, in order."""
        return [self._open[number] for number in sorted(self._open)]

    def begun(self) -> list[PromptWork]:
        """Everything that was started, in order, groups included."""
        works = self._open | self._done
        return [works[number] for number in sorted(works)]

    def _go_on(self) -> None:
        """Take the next of the backlog, and all that has begun, even where it is more than runs at once by now."""
        must = [work for work in self._backlog if work.begun] if self._staleness else []
        room = self._at_once - len(must)
        for work in self._backlog[:]:
            if work in must:
                self._take(work)
            elif room > 0:
                room -= 1
                self._take(work)

    def _start(self) -> None:
        """Start as many prompts as may still be needed, and no more than that."""
        if self._kept >= self._order.wanted:
            return
        while self._kept + len(self._open) < self._at_once and self._started < self._most:
            self._take(self._backlog[0] if self._backlog else self._new())

    def _take(self, work: PromptWork) -> None:
        if work in self._backlog:
            self._backlog.remove(work)
        self._counts.continued += work.begun
        self._open[self._started] = work
        self._started += 1
        self._last_due = None
        if work.future is None and not work.complete:
            work.begin(self._engine, self._sampling, self._counts.tally)

    def _ready(self) -> list[int]:
        """Numbers of the works that are answered, those that are due first at the front."""
        ready = [number for number, work in self._open.items() if work.future is None or work.future.done()]
        return sorted(ready, key=lambda number: (self._due(self._open[number]), number))

    def _advance(self, number: int) -> bool:
        """Take a work's answer, asking again where it cannot be used, and make a group of it; False: neither."""
        work = self._open[number]
        if self._kept >= self._order.wanted:
            return False
        answered = work.future is not None
        if answered:
            self._last_due = None
            if not self._settled(work):
                work.begin(self._engine, self._sampling, self._counts.tally)
                return True
        if self._due(work) > self._last_due_now():
            return answered
        assert self._staleness or not _older(work, self._version), "an on-policy step got tokens of an earlier version"
        self._done[number] = self._open.pop(number)
        self._last_due = None
        group = self._group(number, work)
        self._groups[number] = group
        if group.dropped_reason is None:
            self._kept += 1
            if self._order.meanwhile is not None:
                self._order.meanwhile.finished(group)
            self._counts.overdue += _older(work, self._version - self._staleness)
        return True

    def _due(self, work: PromptWork) -> int:
        """The last version that may train on it, this step's where that has passed or where nothing may wait."""
        oldest = self._version if work.oldest is None else work.oldest
        return max(oldest, self._version - self._staleness) + self._staleness

    def _last_due_now(self) -> int:
        """The last version by which a complete work may be due that takes one of the step's places.

        What is due before it must still fit then. Of hundreds that wait for a place all ask, at each answer.
        """
        if self._last_due is None:
            dues = Counter(self._due(work) for work in self._open.values())
            self._last_due, room = self._version, self._order.wanted - self._kept - 1 - dues[self._version]
            while room >= 0 and self._last_due < self._version + self._staleness:
                self._last_due += 1
                room += self._order.wanted - dues[self._last_due]
        return self._last_due

    def _settled(self, work: PromptWork) -> bool:
        try:
            work.settle(self._counts.tally)
        except EnginesLost:
            self._counts.retried += 1
            return False
        except NotSampled as error:
            self._refused.append(str(error))
        return True

    def _group(self, number: int, work: PromptWork) -> Group:
        began = time.perf_counter()
        self._counts.unsampled += not any(completion.tokens.numel() for completion in work.completions)
        name = f"step{self._order.step}-{number}"
        (group,) = self._maker.groups([name], [work.prompt], [work.completions], self._version)
        limit = work.begun_limit
        (group,) = self._order.select(
            [replace(group, begun_limit=None if limit == work.limit(self._sampling) else limit)]
        )
        self.reward_seconds += time.perf_counter() - began
        return group


def prompts_at_once(wanted: int, oversample: float) -> int:
    """Return the number of prompts that run at once for a step of `wanted` groups."""
    # 0.1 is a little more than a tenth, and a tenth of ten must not be two.
    return wanted + math.ceil(wanted * oversample - 1e-9)


def _older(work: PromptWork, version: int) -> bool:
    return work.oldest is not None and work.oldest < version


def _abort(engine: AsyncEngine, works: Sequence[PromptWork], tally: Tally) -> None:
    """End what is in flight; each work keeps what it has."""
    running = [work for work in works if work.future is not None]
    engine.abort([work.future for work in running if work.future is not None])
    for work in running:
        # Prompts that no engine sampled stay open; the next step requests them again.
        with suppress(NotSampled):
            work.settle(tally, aborted=True)
