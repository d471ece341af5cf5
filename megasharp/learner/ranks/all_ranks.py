"""All ranks as one learner: every call goes to every rank, and their results are joined here.

`Ranks` is the interface: one typed call, which takes a method of `RankLearner`. `OneRank` satisfies it in this process,
without copies, so that a debugger can step through. Over it stand the two learners of a run: the policy, and the memory
network of DLC, which learns by cross-entropy what the policy has just sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megasharp.algos.base import Needs
from megasharp.algos.dlc import MemoryParams, cross_entropy_recipe
from megasharp.algos.recipe import Recipe
from megasharp.batching.delivery import HandMade, annotated, shares_of, updates_of
from megasharp.batching.packing import PackLayout, pack
from megasharp.batching.views import Kept
from megasharp.common.files import FileHash
from megasharp.common.records import Group, Mean, Metrics, Sampled, StepBatch, StepStats
from megasharp.common.records import Sequence as TrainSequence
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner, add_metrics, kernels_of
from megasharp.learner.parallel import meet
from megasharp.ops.attention_kernels import Kernels

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Ranks(Protocol):
    """A set of ranks that carry out the same call together.

    Functions are methods of `RankLearner` or functions of a module, because they are pickled by reference: ranks may
    be other processes. Their arguments and results must pickle too.
    """

    def call(
        self, learner: str, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call `function(<the named learner's part>, ...)` on every rank; results in rank order.

        Raises RankDied where a rank ends or fails, UserError where it raises one. All ranks are ended then.
        """
        ...

    def call_shared(
        self,
        learner: str,
        function: Callable[Concatenate[RankLearner, S, P], T],
        shares: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call `function(<the named learner's part>, shares[d], ...)` on every rank, d its data-parallel place.

        A share is sent once to all its ranks of a machine. They may read it in the same memory, so none writes there.
        Results in rank order; raises as `call` does.
        """
        ...

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate a generator function on every rank; items as they come, on the CPU where ranks are processes.

        Raises as `call` does.
        """
        ...

    def close(self) -> None:
        """End all ranks."""
        ...


class OneRank:
    """Satisfies `Ranks`. Owns this process's default process group."""

    def __init__(self, settings: Mapping[str, LearnerSettings], device: torch.device) -> None:
        assert settings[POLICY].layout.world == 1
        meet(HashStore(), 0, 1, device)
        try:
            self._rank = Rank(settings, device)
        except BaseException:
            dist.destroy_process_group()
            raise

    def call(
        self, learner: str, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return the one rank's result."""
        return [function(self._rank.learners[learner], *args, **kwargs)]

    def call_shared(
        self,
        learner: str,
        function: Callable[Concatenate[RankLearner, S, P], T],
        shares: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Return the one rank's result for the one share."""
        (share,) = shares
        return [function(self._rank.learners[learner], share, *args, **kwargs)]

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the one rank's items."""
        yield from function(self._rank.learners[learner])

    def close(self) -> None:
        """Give the process group back."""
        self._rank.close()
        dist.destroy_process_group()


class RanksLearner:
    """Satisfies `Learner` of `trainer/loop.py`. Several may share the ranks, each by its name there."""

    def __init__(self, ranks: Ranks, name: str = POLICY) -> None:
        self._ranks = ranks
        self._name = name
        # The number under which ranks keep a share.
        self._held: int | None = None

    def attention(self) -> Kernels:
        """Return the kernels of attention, which are the same on all ranks."""
        return self.call(kernels_of)[0]

    def annotate(self, batch: StepBatch, needs: Needs, returned: Needs | None = None) -> StepBatch:
        """Return the batch with the log-probs and entropies that `needs` asks for, float32 [T] each; else the batch.

        All of it stays on the ranks for the step. Here the batch has those that `returned` asks for; None asks for all.
        """
        fields = needs.annotation_fields
        if not fields:
            return batch
        shares = shares_of(batch)
        by_hand = any(isinstance(share, HandMade) for share in shares)
        back = fields if returned is None or by_hand else fields & returned.annotation_fields
        ticket = next(_TICKETS)
        # Reporting ranks come in data-parallel order, because data-parallel ranks count upwards with the world's.
        found = self._ranks.call_shared(self._name, RankLearner.annotate, shares, ticket, needs, back)
        self._held = ticket
        reported = [annotation for annotation in found if annotation is not None]
        return annotated(batch, Kept(ticket, fields), reported)

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        """Take one optimizer step per mini-batch, without those whose gradient norm is above `norm_limit`.

        The loss is the sum of the data-parallel shares, seconds are the slowest rank's.
        """
        updates, self._held = updates_of(batch, self._held), None
        reports = self._ranks.call_shared(self._name, RankLearner.step, updates, recipe, norm_limit)
        stats = [report for report in reports if report is not None]
        return dataclasses.replace(
            stats[0],
            loss=math.fsum(s.loss for s in stats),
            metrics=add_metrics([s.metrics for s in stats]),
            seconds={name: max(s.seconds[name] for s in stats) for name in stats[0].seconds},
        )

    def forget(self) -> None:
        """Let ranks let go of an annotated share that no step will read; nothing to do where they keep none."""
        if self._held is not None:
            self._held = None
            self.call(RankLearner.forget)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once: its Hugging Face name and the whole tensor."""
        return self._ranks.stream(self._name, RankLearner.export_weights)

    def call(self, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method of `RankLearner` or a module's function with each rank's part; results in rank order."""
        return self._ranks.call(self._name, function, *args, **kwargs)

    def call_shared(
        self,
        function: Callable[Concatenate[RankLearner, S, P], T],
        shares: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a function with each rank's part and the share of its data-parallel place; results in rank order."""
        return self._ranks.call_shared(self._name, function, shares, *args, **kwargs)

    def begin_save(self, folder: Path, copy: bool) -> None:
        """Begin to write all ranks' shards into `folder`; with `copy` training may go on meanwhile."""
        self.call(RankLearner.begin_save, folder, copy)

    def begin_save_reference(self, folder: Path) -> None:
        """Begin to write the reference's weights into `folder`; training may go on meanwhile."""
        self.call(RankLearner.begin_save_reference, folder)

    def saves_are_written(self) -> bool:
        """Return True once no rank is writing any more."""
        return all(self.call(RankLearner.saves_are_written))

    def finish_saves(self) -> dict[Path, FileHash]:
        """Wait for what was begun and complete it; returns the ranks' files by path. All others there are small."""
        return {Path(path): written for rank in self.call(RankLearner.finish_saves) for path, written in rank.items()}

    def load(self, folder: Path) -> None:
        """Load weights, optimizer and schedule from shards, written under any layout."""
        self.call(RankLearner.load, folder)

    def set_reference(self) -> None:
        """Make the present weights the reference, where a method reads one."""
        self.call(RankLearner.set_reference)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments and step count."""
        self.call(RankLearner.reset_optimizer)

    def offload(self) -> None:
        """Free what `policy.offload` names on every rank."""
        self.call(RankLearner.offload)

    def onload(self) -> None:
        """Undo `offload`."""
        self.call(RankLearner.onload)

    def load_reference(self, folder: Path) -> None:
        """Make weights that `begin_save_reference` wrote the reference."""
        self.call(RankLearner.load_reference, folder)

    def close(self) -> None:
        """End the ranks, whichever learners they hold."""
        self._ranks.close()


# Numbers of annotations, unique among all learners of this process.
_TICKETS = count(1)


class MemoryNetwork:
    """A learner of the policy's kind that learns by cross-entropy what was sampled, in a few optimizer steps a step.

    It learns from every sampled response, right or wrong, aborted ones and groups that selection dropped too: it
    follows what is sampled, not what is trained on (2601.15609 section 4.2; all responses, and response tokens only,
    are derived). With `replay` the last steps' responses are learned again, mixed evenly with the new ones.
    """

    def __init__(self, learner: RanksLearner, layout: PackLayout, params: MemoryParams) -> None:
        self._learner = learner
        self._layout = dataclasses.replace(layout, mini_batches=params.steps)
        self._params = params
        self._recipe = cross_entropy_recipe()
        self._recent: deque[Sequence[Sampled]] = deque(maxlen=params.replay)

    @property
    def learner(self) -> RanksLearner:
        """The network's own learner, which is saved and loaded."""
        return self._learner

    @property
    def recent(self) -> Sequence[Sequence[Sampled]]:
        """Samples to be learned again, by training step, the oldest first; a checkpoint holds it."""
        return tuple(self._recent)

    def take_up(self, recent: Sequence[Sequence[Sampled]]) -> None:
        """Go on with `recent` of a checkpoint."""
        self._recent.extend(recent)

    def observe(self, groups: Sequence[Group], step: int, seed: int) -> Metrics:
        """Learn all responses of `groups`, sampled in training step `step`; returns metrics under `memory/`."""
        new = [sampled for sampled in map(Sampled.of, groups) if sampled.tokens]
        again, frozen = self.recent, step <= self._params.freeze_until
        self._recent.append(new)
        mixed = [sampled for row in zip_longest(new, *again) for sampled in row if sampled is not None]
        if frozen or not mixed:
            return _counts(0, [], [])
        stats = self._learner.step(pack(list(_sequences(mixed)), self._layout, seed), self._recipe)
        return {
            # Those of its own experts, where it has any, have the policy's names.
            **{f"memory/{name}" if name.startswith("experts/") else name: m for name, m in stats.metrics.items()},
            **_counts(len(stats.norms) - stats.skipped, mixed, list(chain.from_iterable(again))),
            "memory/grad_norm": Mean(stats.grad_norm, 1.0),
            "memory/learning_rate": Mean(stats.learning_rate, 1.0),
            "memory/skipped": Mean(float(stats.skipped), 1.0),
        }

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once: its Hugging Face name and the whole tensor."""
        return self._learner.export_weights()

    def call(self, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a module's function with each rank's part of the memory network; in rank order."""
        return self._learner.call(function, *args, **kwargs)

    def offload(self) -> None:
        """Free what `policy.offload` names on every rank."""
        self._learner.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self._learner.onload()


def _counts(steps: int, learned: Sequence[Sampled], again: Sequence[Sampled]) -> Metrics:
    """Return how much was learned: optimizer steps, and tokens of responses."""
    values = {
        "optimizer_steps": steps,
        "tokens": sum(sampled.tokens for sampled in learned),
        "replayed_tokens": sum(sampled.tokens for sampled in again),
    }
    return {f"memory/{name}": Mean(float(value), 1.0) for name, value in values.items()}


def _sequences(groups: Sequence[Sampled]) -> Iterator[TrainSequence]:
    """Yield the responses as training sequences; cross-entropy reads tokens alone."""
    for group in groups:
        for index, response in enumerate(group.responses):
            # Expanded, each of these is one number a response, here and on its way to the ranks.
            count = response.numel()
            nothing, mask_T = torch.zeros(1).expand(count), torch.ones(1).expand(count)
            places = group.observed[index] if group.observed else ()
            if places:
                mask_T = mask_T.clone()
                for start, end in places:
                    mask_T[start:end] = 0.0
            yield TrainSequence(
                group_id=group.group_id,
                index=index,
                group_size=0,
                group_correct=0,
                seed=0,
                tokens=torch.cat([group.prompt, response]).long(),
                prompt_length=group.prompt.numel(),
                reward=0.0,
                correct=False,
                advantage_T=torch.zeros(1, dtype=torch.float64).expand(count),
                mask_T=mask_T,
                sampler_logp_T=nothing,
                policy_logp_T=nothing,
            )
