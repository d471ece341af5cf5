"""Synchronous collection: a step's groups round by round, from an engine that samples one batch at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megasharp.common.records import Group, Prompt
from megasharp.common.signals import SaveAsked, check_save, interruptible
from megasharp.rollout.in_flight import Unfinished
from megasharp.rollout.step_request import Collected, Engine, GroupMaker, PromptSource, StepRequest, fill
from megasharp.rollout.tally import Tally


class Rollouts:
    """Collects groups through any engine, strictly on-policy."""

    def __init__(self, engine: Engine, maker: GroupMaker) -> None:
        self._engine = engine
        self._maker = maker
        # Of a step that was cut short.
        self._untrained: list[Prompt] = []

    def collect(self, source: PromptSource, order: StepRequest) -> Collected:
        """Collect a step's groups, with ids like `step7-0` in the order of the prompts.

        Raises UserError for a prompt whose task has no verifier. `SaveAsked` goes through: the step's prompts are
        `unfinished` then.
        """
        seconds = {"rollout": 0.0, "reward": 0.0}
        taken: list[Prompt] = []
        tally = Tally()

        def sample(count: int, first: int) -> list[Group]:
            prompts = source.take(count)
            taken.extend(prompts)
            started = time.perf_counter()
            version = self._engine.version
            requests = [self._maker.request(prompt, order.responses) for prompt in prompts]
            tally.asked(seed for request in requests for seed in request.seeds)
            with interruptible():
                sampled = self._engine.generate(requests, self._maker.sampling_for(order))
            tally.answered(completion for completions in sampled for completion in completions)
            generated = time.perf_counter()
            names = [f"step{order.step}-{first + number}" for number in range(len(prompts))]
            groups = self._maker.groups(names, prompts, sampled, version)
            seconds["rollout"] += generated - started
            seconds["reward"] += time.perf_counter() - generated
            return order.select(groups)

        try:
            groups = fill(sample, order.wanted, order.refill_rounds)
            check_save()
        except SaveAsked:
            self._untrained += taken
            raise
        return Collected(groups, seconds, {}, tally)

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Prompts that were taken but are in no step's groups; what was sampled of them is not kept."""
        return tuple(Unfinished.untouched(prompt, self._maker.responses_per_prompt) for prompt in self._untrained)

    def take_up(self, source: PromptSource, prompts: Sequence[Unfinished]) -> int:
        """Return 0: this collector keeps no responses, so the next prompts are sampled from their start."""
        return 0
