"""Save and load weights, moments and schedule by Megatron's distributed checkpointing, under any layout.

Stored tensors are named by global layers and have whole parameters' shapes, so TP, PP and DP may change between save
and load. Every function here is collective: all ranks must call it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megasharp.convert.lora import is_adapter
from megasharp.learner.optimizer import parts

if TYPE_CHECKING:
    from megasharp.learner.async_checkpoint import ShardWriting

# Every optimizer tensor has its parameter's shape, whatever the layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
# Grouped experts number theirs.
_EXTRA_STATE = re.compile(r"_extra_state\d*$")
# The keys that say what a group of parameters is, and settings by which Megatron 0.19 finds a stored group, too.
_KINDS_OF_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_SETTINGS_OF_GROUP = ("max_lr", "min_lr", "start_wd", "end_wd")


def _sharded_model(chunks: Sequence[GPTModel], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return every chunk's part, equal for both layer specs: an empty object for each linear map's extra state.

    That is what Megatron's own maps write. Transformer Engine's modules, norms too, would write the history of delayed
    scaling to FP8, which none of the recipes of `policy.fp8` has.
    """
    state: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        kept: dict[str, Any] = {}
        for name, entry in chunk.sharded_state_dict(metadata=metadata).items():
            if isinstance(entry, ShardedObject) and _EXTRA_STATE.search(name):
                if ".linear_" not in name and "output_layer." not in name:
                    continue
                entry.data = None
            kept[name] = entry
        state[str(number)] = kept
    return state


def _fill(chunks: Sequence[GPTModel], loaded: dict[str, Any], *, but_adapters: bool = False) -> None:
    for number, chunk in enumerate(chunks):
        found = chunk.load_state_dict(loaded[str(number)], strict=False)
        missing = [name for name in found.missing_keys if not _EXTRA_STATE.search(name)]
        if but_adapters:
            missing = [name for name in missing if not is_adapter(name)]
        assert not found.unexpected_keys and not missing, found


def _sharded(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    # Megatron keeps this learner's groups in the dictionary it is given.
    metadata = dict(METADATA)
    model = _sharded_model([chunk.module for chunk in chunks], metadata)
    moments = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": moments}


def save_state(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    copy: bool,
) -> ShardWriting:
    """Begin to write into the existing empty folder. With `copy` training may go on at once, else after `finish`."""
    for part in parts(optimizer):
        # Megatron cannot save moments that do not exist yet, before the first step or after a reset.
        part.init_state_fn(part.optimizer, part.config)
    state = _sharded(chunks, optimizer, is_loading=False)
    state["scheduler"] = scheduler.state_dict()
    from megasharp.learner.async_checkpoint import ShardWriting

    return ShardWriting(state, folder, METADATA, copy=copy)


def save_model(folder: Path, chunks: Sequence[GPTModel], *, copy: bool) -> ShardWriting:
    """Begin to write weights alone into the existing empty folder; `copy` as in `save_state`."""
    from megasharp.learner.async_checkpoint import ShardWriting

    return ShardWriting({"model": _sharded_model(chunks, dict(METADATA))}, folder, METADATA, copy=copy)


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Imported here: torch's checkpoint code takes a second that a first step need not wait for.
    from megasharp.learner.data_only import load_shards

    return load_shards(state, folder)


def load_model(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Read weights alone, resharding to the present layout.

    Raises UserError for a folder that asks for more than to be read, many other kinds of errors for damaged shards.
    """
    state = {"model": _sharded_model(chunks, dict(METADATA))}
    _fill(chunks, _load(state, folder)["model"])


def load_base(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Read the weights of a folder without adapters; adapters of `chunks` keep their values.

    Raises many kinds of errors for damaged shards, as `load_model`.
    """
    sharded = _sharded_model(chunks, dict(METADATA))
    stored = {
        number: {name: entry for name, entry in part.items() if not is_adapter(name)}
        for number, part in sharded.items()
    }
    _fill(chunks, _load({"model": stored}, folder)["model"], but_adapters=True)


def load_state(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Read what `save_state` wrote, resharding to the present layout.

    Moments and counts of steps come from the file; learning rate, betas, epsilon and weight decay stay the optimizer's
    own. Raises many kinds of errors for damaged shards, as `load_model`.
    """
    state = _load(_sharded(chunks, optimizer, is_loading=True), folder)
    _fill([chunk.module for chunk in chunks], state["model"])
    own = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    # From version 0.19 on Megatron also tells groups apart by settings, which a run may have changed: the stored groups
    # take the present ones.
    by_kind = {tuple(group.get(key) for key in _KINDS_OF_GROUP): group for group in optimizer.param_groups}
    # A mixture of experts has an optimizer for the experts beside the other, by their numbers.
    stored = [state["optimizer"]] if len(parts(optimizer)) == 1 else state["optimizer"].values()
    for group in chain.from_iterable(part["optimizer"]["param_groups"] for part in stored):
        now = by_kind.get(tuple(group.get(key) for key in _KINDS_OF_GROUP), {})
        group.update({key: now[key] for key in _SETTINGS_OF_GROUP if key in now and key in group})
    optimizer.load_state_dict(state["optimizer"])
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    scheduler.load_state_dict(state["scheduler"])
