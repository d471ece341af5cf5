"""Taking weights in every rank of an engine, whichever way they come; nothing older, unfit or incomplete is served.

SGLang calls `load_bucket` for POST /update_weights_from_tensor with `load_format` set to its full name. What it then
unpickles, with its own list of allowed names, is one of four things:

    [("file", path as bytes)]                               a file of `megasharp.rollout.sglang.bucket` on this machine
    [("header", JSON as bytes), ("memory", JSON as bytes)]  a bucket, and the exported memory that it begins
    [("loan", JSON as bytes)]                               a network's weights where their owner has them
    [("announced", JSON as bytes)]                          the header of what a broadcast brings next

Bytes are uint8 tensors; exported memory is that of `megasharp.rollout.sglang.shared_weights`. What one rank
refuses, all refuse (`on_all_ranks`), because SGLang answers with what its first rank found. A version's tensors come in
any number of buckets; an announcement or a file without any closes it. Headers, loans and files are checked whole
(versions, every name and shape, checksums) before the first weight changes; a broadcast that was not announced is
refused. Weights from a folder are checked by the header in it.

SGLang fuses projections and experts, cuts matrices over ranks and pads the vocabulary. A `Slot` undoes that for one
tensor, and `slots_of` gives an engine's weights under their Hugging Face names, as the trainer would have sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasharp.common.records import MEMORY_PREFIX
from megasharp.rollout.sglang.bucket import (
    FOLDER_HEADER,
    TIED_HEAD,
    Entry,
    Header,
    Stamp,
    checksum,
    parse_header,
    read_bucket,
    read_header,
    unflattened,
)
from megasharp.rollout.sglang.engine.sglang_internals import (
    FusedMoE,
    LlamaForCausalLM,
    MergedColumnParallelLinear,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    QKVParallelLinear,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_parallel,
    get_serving,
    tensor_model_parallel_all_gather,
)
from megasharp.rollout.sglang.shared_weights import Borrower, Goal, parse_loan, parse_memory


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a checkpoint and its place on this rank: rows `[start, start + size)` of `parameter`.

    `cut` is the dimension in which ranks hold parts, None where each holds all; `copies` neighbouring ranks hold the
    same part. `rows`: how many rows the whole tensor has; ranks together may hold more, as padding. The parts are on
    the ranks from `first` on, `holders` in number (None: all). An expert is on some ranks only; on the others the slot
    names the expert that they have in its place.
    """

    name: str
    parameter: Tensor
    start: int
    size: int
    rows: int
    cut: int | None = None
    copies: int = 1
    first: int = 0
    holders: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, as a checkpoint has it."""
        rest = list(self.parameter.shape[1:])
        if self.cut == 1:
            rest[0] *= self._holders
        return (self.rows, *rest)

    @property
    def _holders(self) -> int:
        return get_parallel().tp_size if self.holders is None else self.holders

    def whole(self) -> Tensor:
        """The whole tensor; every rank must call it in the same order."""
        part = self.parameter.detach()[self.start : self.start + self.size].contiguous()
        if self.cut is not None and get_parallel().tp_size > 1:
            parts = tensor_model_parallel_all_gather(part, dim=self.cut).split(part.shape[self.cut], dim=self.cut)
            # Neighbouring ranks hold the same part: each counts once.
            part = torch.cat(parts[self.first : self.first + self._holders : self.copies], dim=self.cut)
        return part[: self.rows]

    def goal(self) -> Goal:
        """The place of its part of the whole tensor on this rank."""
        part = self.parameter.detach()[self.start : self.start + self.size]
        if self.cut is None:
            return Goal(part, 0, 0, self.shape)
        place = get_parallel().tp_rank - self.first
        if not 0 <= place < self._holders:
            return Goal(part[:0], 0, 0, self.shape)
        number = place // self.copies
        if self.cut == 1:
            return Goal(part, 1, number * part.shape[1], self.shape)
        # Rows past the whole tensor's are padding, which only the last ranks have.
        first = number * self.size
        real = max(0, min(self.size, self.rows - first))
        return Goal(part[:real], 0, first, self.shape, part[real:] if real < self.size else None)


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Every tensor that an update of `model` may name, by that name, the memory's under their prefix.

    Raises ValueError for a model, or a quantisation, whose layout is not known here.
    """
    memory = getattr(model, "memory", None)
    slots = {slot.name: slot for slot in _slots(model, "")}
    if memory is not None:
        slots |= {slot.name: slot for slot in _slots(memory, MEMORY_PREFIX)}
    return slots


def goals_of(model: nn.Module) -> dict[str, Goal]:
    """Destinations of an update of `model` on this rank, by the checkpoint's names. Raises ValueError as `slots_of`."""
    return {name: slot.goal() for name, slot in slots_of(model).items()}


def checksums(model: nn.Module) -> dict[str, str]:
    """Checksums of every whole tensor by its name, as `megasharp.rollout.sglang.bucket` gives them for what was sent.

    Equal only where the sender sent the engine's own dtype. Every rank must call it.
    """
    return {name: checksum(slot.whole()) for name, slot in slots_of(model).items()}


def known(model: nn.Module) -> bool:
    """Return True where `slots_of` knows the model's family."""
    return isinstance(model, _FAMILIES)


_FAMILIES = (
    LlamaForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)


def _slots(network: nn.Module, prefix: str) -> Iterator[Slot]:
    if not known(network):
        raise ValueError(f"the layout of {type(network).__name__} is not known to megasharp")
    for name, parameter in network.named_parameters():
        owner, _, kind = name.rpartition(".")
        # The memory network is a part of the policy's module, and has slots of its own.
        if not prefix and name.startswith(MEMORY_PREFIX):
            continue
        layer = network.get_submodule(owner)
        if isinstance(layer, FusedMoE):
            yield from _experts(layer, prefix + owner, kind, parameter)
            continue
        if kind not in ("weight", "bias"):
            raise ValueError(f"{name}: quantised weights have no checkpoint's layout")
        yield from _slots_of_layer(layer, prefix + owner, kind, parameter)


def _slots_of_layer(layer: Any, owner: str, kind: str, parameter: Tensor) -> Iterator[Slot]:
    """Yield the checkpoint's tensors that are in one parameter."""
    if isinstance(layer, QKVParallelLinear):
        yield from _query_key_value(layer, owner, kind, parameter)
    elif isinstance(layer, MergedColumnParallelLinear):
        half, whole = parameter.shape[0] // 2, layer.output_sizes[0]
        stem = owner.removesuffix("gate_up_proj")
        yield Slot(f"{stem}gate_proj.{kind}", parameter, 0, half, whole, cut=0)
        yield Slot(f"{stem}up_proj.{kind}", parameter, half, half, whole, cut=0)
    elif isinstance(layer, VocabParallelEmbedding):
        rows = parameter.shape[0]
        yield Slot(f"{owner}.{kind}", parameter, 0, rows, layer.org_vocab_size, cut=0)
    else:
        rows = parameter.shape[0]
        by_columns = isinstance(layer, RowParallelLinear) and kind == "weight"
        yield Slot(f"{owner}.{kind}", parameter, 0, rows, rows, cut=1 if by_columns else None)


def _query_key_value(layer: Any, owner: str, kind: str, parameter: Tensor) -> Iterator[Slot]:
    stem = owner.removesuffix("qkv_proj")
    queries, keys = layer.q_proj_shard_size, layer.kv_proj_shard_size
    query_rows, key_rows = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size
    copies = layer.num_kv_head_replicas
    yield Slot(f"{stem}q_proj.{kind}", parameter, 0, queries, query_rows, cut=0)
    yield Slot(f"{stem}k_proj.{kind}", parameter, queries, keys, key_rows, cut=0, copies=copies)
    yield Slot(f"{stem}v_proj.{kind}", parameter, queries + keys, keys, key_rows, cut=0, copies=copies)


# A checkpoint's names of an expert's gate, up and down projections, by the name of the layer's MLP.
_EXPERT_MAPS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}


def _experts(layer: Any, owner: str, kind: str, parameter: Tensor) -> Iterator[Slot]:
    """Yield the tensors of all experts in the order of their numbers, those that other ranks hold among them."""
    width, here, method = layer.intermediate_size_per_partition, layer.num_local_experts, layer.quant_method
    shapes = {"w13_weight": (here, 2 * width, layer.hidden_size), "w2_weight": (here, layer.hidden_size, width)}
    if parameter.shape != shapes.get(kind) or getattr(method, "w13_swiglu_interleaved", False):
        raise ValueError(f"{owner}.{kind}: the MoE runner keeps experts in a layout that is no checkpoint's")
    gate, up, down = _EXPERT_MAPS[owner.split(".")[-2]]
    maps = (up, gate) if getattr(method, "load_up_proj_weight_first", False) else (gate, up)
    for expert in range(layer.num_experts):
        # Experts of one part stand on neighbouring ranks, over which each of them is cut.
        part, number = divmod(expert, here)
        ranks = {"first": part * layer.moe_tp_size, "holders": layer.moe_tp_size}
        stem, matrix = f"{owner}.{expert}", parameter[number]
        if kind == "w2_weight":
            yield Slot(f"{stem}.{down}.weight", matrix, 0, layer.hidden_size, layer.hidden_size, cut=1, **ranks)
            continue
        for place, name in enumerate(maps):
            rows = width * layer.moe_tp_size
            yield Slot(f"{stem}.{name}.weight", matrix, place * width, width, rows, cut=0, **ranks)


def on_all_ranks(act: Callable[[], None]) -> None:
    """Have every rank act; where one of them refuses (ValueError, OSError), all raise its ValueError."""
    ranks = get_parallel()
    if ranks.tp_size == 1:
        act()
        return
    said: str | None = None
    try:
        act()
    except (ValueError, OSError) as error:
        said = str(error)
    found: list[str | None] = [None] * ranks.tp_size
    dist.all_gather_object(found, said, group=ranks.tp_group.cpu_group)
    for refusal in found:
        if refusal is not None:
            raise ValueError(refusal)


@dataclass(slots=True)
class _Receipt:
    """Record of the push under way, or of the last one; `memory_version` is the newest that ever came."""

    stamp: Stamp
    memory_version: int | None
    names: set[str] = field(default_factory=set)
    announced: tuple[Entry, ...] = ()


_receipts: WeakKeyDictionary[nn.Module, _Receipt] = WeakKeyDictionary()
_borrowers: WeakKeyDictionary[nn.Module, Borrower] = WeakKeyDictionary()


def load_bucket(model: Any, payload: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket, or one network's exported weights; nobody reads the sender's memory any more when it returns.

    Raises ValueError, and changes nothing, for one that is damaged, unfit, or of an older version.
    """
    kind, *texts = payload[0][0], *(bytes(spelled.tolist()).decode() for _, spelled in payload)
    on_all_ranks(lambda: _LOADS[kind](model, *texts))


def _announce(model: Any, text: str) -> None:
    _close_or_expect(model, parse_header(text))


def _close_or_expect(model: Any, header: Header) -> None:
    receipt = _accepted(model, header.stamp)
    if known(model):
        _check_names(model, header)
        if not header.tensors:
            _check_complete(model, receipt)
    if not header.tensors:
        _borrower(model).end_push()
    receipt.announced = header.tensors
    _receipts[model] = receipt


def _load_file(model: Any, path: str) -> None:
    header = read_header(Path(path))
    if header.tensors:
        _load(model, header, list(read_bucket(Path(path))))
    else:
        _close_or_expect(model, header)


def _load_flat(model: Any, text: str, memory: str) -> None:
    header = parse_header(text)
    (flat,) = _borrower(model).storages(parse_memory(memory), header.stamp.push)
    _load(model, header, list(unflattened(header.tensors, flat)))
    _wait()


def _load(model: Any, header: Header, tensors: list[tuple[str, Tensor]]) -> None:
    receipt = _accepted(model, header.stamp)
    if known(model):
        _check_names(model, header)
    model.load_weights(iter(tensors))
    receipt.names |= {name for name, _ in tensors}
    _receipts[model] = receipt


def _borrow(model: Any, text: str) -> None:
    loan = parse_loan(text)
    receipt = _accepted(model, loan.stamp)
    # They differ after parameters have moved, and copies must be planned again then.
    places = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    borrower = _borrower(model)
    names = borrower.prepare(loan, lambda: goals_of(model), places)
    if loan.stamp.memory_version is None and any(name.startswith(MEMORY_PREFIX) for name in names):
        raise ValueError("weights of a memory network came in a push that names no memory version")
    borrower.copy(loan)
    _wait()
    receipt.names |= names
    _receipts[model] = receipt


_LOADS: dict[str, Callable[..., None]] = {
    "file": _load_file,
    "header": _load_flat,
    "loan": _borrow,
    "announced": _announce,
}


def _borrower(model: nn.Module) -> Borrower:
    return _borrowers.setdefault(model, Borrower())


def _wait() -> None:
    """The sender may change its memory as soon as it is answered."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def check_broadcast(model: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless exactly these tensors were announced; they count as come."""
    receipt = _receipts.get(model)
    announced = () if receipt is None else receipt.announced
    found = [(name, str(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
    if receipt is None or not announced or found != [(each.name, each.dtype, each.shape) for each in announced]:
        raise ValueError(f"a broadcast of {len(names)} tensors was not announced")
    receipt.announced = ()
    receipt.names |= set(names)


def check_folder(model: Any, folder: Path, label: object) -> None:
    """Raises ValueError for a folder of an older version, or of weights that do not fit or are not complete."""
    refuse_older(label, get_serving().weight_version)
    path = folder / FOLDER_HEADER
    if not path.is_file():
        return  # A plain checkpoint: SGLang judges it.
    header = parse_header(path.read_bytes())
    receipt = _accepted(model, header.stamp)
    receipt.names |= {entry.name for entry in header.tensors}
    if known(model):
        _check_names(model, header)
        _check_complete(model, receipt)
    _receipts[model] = receipt


def refuse_older(version: object, served: object, whose: str = "weights") -> None:
    """Raises ValueError where `version` is an older number than `served`, or its label; other labels have no order."""
    new, present = _number(version), _number(served)
    if new is not None and present is not None and new < present:
        raise ValueError(f"{whose} version {new} is older than {present}, which this engine has")


def _number(label: object) -> int | None:
    return int(str(label)) if str(label).isdecimal() else None


def _accepted(model: Any, stamp: Stamp) -> _Receipt:
    """The receipt of a push, once it is found to be no older than what is here."""
    receipt = _receipts.get(model)
    refuse_older(stamp.version, get_serving().weight_version)
    newest = None
    if receipt is not None:
        newest = receipt.memory_version
        refuse_older(stamp.version, receipt.stamp.version)
        refuse_older(stamp.memory_version, newest, "memory")
    # Another attempt starts from nothing: buckets of two attempts never add up to one version.
    if receipt is None or stamp != receipt.stamp:
        receipt = _Receipt(stamp, newest if stamp.memory_version is None else stamp.memory_version)
    return receipt


def _check_names(model: nn.Module, header: Header) -> None:
    slots = slots_of(model)
    for entry in header.tensors:
        if entry.name.startswith(MEMORY_PREFIX) and header.stamp.memory_version is None:
            raise ValueError(f"{entry.name} came in a push that names no memory version")
        if entry.name.endswith(TIED_HEAD) and entry.name not in slots:
            continue  # A tied model's spare copy of its embedding; SGLang leaves it out too.
        if entry.name not in slots:
            raise ValueError(f"the engine's model has no weight {entry.name}")
        if entry.shape != slots[entry.name].shape:
            raise ValueError(f"{entry.name} came with shape {entry.shape}; the engine's is {slots[entry.name].shape}")


def _check_complete(model: nn.Module, receipt: _Receipt) -> None:
    wanted = set(slots_of(model))
    if receipt.stamp.memory_version is None:
        wanted = {name for name in wanted if not name.startswith(MEMORY_PREFIX)}
    missing = wanted - receipt.names
    if missing:
        raise ValueError(
            f"weights version {receipt.stamp.version} is not complete: {len(missing)} tensors did not come, "
            f"{min(missing)} among them"
        )
