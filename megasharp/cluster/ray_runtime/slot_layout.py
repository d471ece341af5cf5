"""Where ranks and engines sit: slots of one GPU each (or one CPU), in groups that share a node. Pure.

Co-located, an engine's ranks share the slots of policy ranks; disaggregated, they have slots of their own behind them.
A tensor-parallel group, the policy's or an engine's, never crosses nodes: its ranks exchange activations in every
layer.

Whether a layout fits the cluster as it is now, asked before anything starts. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasharp.common.errors import UserError
from megasharp.config.rollout import EnginePlacement


@dataclass(frozen=True, slots=True)
class Needs:
    """What is to be placed: `world` policy ranks in neighbouring groups of `tp`, `engines` of `engine_tp` ranks each.

    `gpus_per_node` is 0 on a CPU; then a node holds an equal share of the slots.
    """

    world: int
    tp: int
    engines: int
    engine_tp: int
    placement: EnginePlacement = "colocated"
    nodes: int = 1
    gpus_per_node: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """One bundle: its node (0-based, any machine of the cluster), and who sits in it.

    `engine` is (engine, rank within it).
    """

    node: int
    rank: int | None = None
    engine: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots, node by node. `gpu` says whether a slot is a GPU; `cpus` are a slot's CPUs."""

    slots: tuple[Slot, ...]
    gpu: bool
    cpus: float = 1.0

    @property
    def bundle(self) -> dict[str, float]:
        """What one slot asks of Ray."""
        return {"GPU": 1.0, "CPU": self.cpus} if self.gpu else {"CPU": self.cpus}

    @property
    def nodes(self) -> list[list[int]]:
        """Slot numbers by node."""
        numbers = sorted({slot.node for slot in self.slots})
        return [[i for i, slot in enumerate(self.slots) if slot.node == node] for node in numbers]

    def of_rank(self, rank: int) -> int:
        """The slot of a policy rank."""
        return next(i for i, slot in enumerate(self.slots) if slot.rank == rank)

    def of_engine(self, engine: int) -> list[int]:
        """The slots of an engine's ranks, in their order."""
        found = {slot.engine[1]: i for i, slot in enumerate(self.slots) if slot.engine and slot.engine[0] == engine}
        return [found[rank] for rank in range(len(found))]

    def beside(self, same_slot: bool) -> tuple[tuple[int, ...], ...] | None:
        """For every engine, the policy rank that lies beside each of its ranks: in the same slot.

        Without `same_slot` any rank on its node will do where the slot has none. None where an engine's rank has none.
        """
        found = [[self._rank_beside(slot, same_slot) for slot in self.of_engine(i)] for i in range(self.engines)]
        rows = [tuple(rank for rank in row if rank is not None) for row in found]
        return tuple(rows) if list(map(len, rows)) == list(map(len, found)) else None

    def _rank_beside(self, number: int, same_slot: bool) -> int | None:
        slot = self.slots[number]
        if slot.rank is not None or same_slot:
            return slot.rank
        near = [other.rank for other in self.slots if other.node == slot.node and other.rank is not None]
        return near[number % len(near)] if near else None

    @property
    def world(self) -> int:
        """How many policy ranks there are."""
        return sum(slot.rank is not None for slot in self.slots)

    @property
    def engines(self) -> int:
        """How many engines there are."""
        return len({slot.engine[0] for slot in self.slots if slot.engine})


def make_layout(needs: Needs, cpus: float = 1.0) -> Layout:
    """Place everything, filling node after node; `cpus` is the share of a slot.

    Raises UserError naming the keys when it does not fit into `nodes` x `gpus_per_node`, or a group would cross nodes.
    """
    policy = [needs.tp] * (needs.world // needs.tp)
    engines = [needs.engine_tp] * needs.engines
    colocated = needs.placement == "colocated"
    room = _room_per_node(needs)
    _check_group(needs.tp, room, "policy.tp", needs)
    if engines:
        _check_group(needs.engine_tp, room, "rollout.tp", needs)
    ranks = _fill(policy, [0] * needs.nodes, room, needs)
    # Co-located engines start again on the first node; others continue where the policy ended.
    used = [0] * needs.nodes if colocated else _used(ranks, needs.nodes)
    rows = _merged(ranks, _fill(engines, used, room, needs), needs.tp, needs.engine_tp)
    return Layout(tuple(rows), needs.gpus_per_node > 0, cpus)


@dataclass(frozen=True, slots=True)
class _Block:
    """A group's place: its node and its slots there, `[start, start + size)`."""

    node: int
    start: int
    size: int


def _room_per_node(needs: Needs) -> int:
    if needs.gpus_per_node:
        return needs.gpus_per_node
    # Without a number in the configuration every node takes its share, in whole groups.
    group = max(needs.tp, needs.engine_tp if needs.engines else 1)
    both = (needs.world, needs.engines * needs.engine_tp)
    total = max(both) if needs.placement == "colocated" else sum(both)
    share = -(-total // needs.nodes)
    return -(-share // group) * group


def _check_group(size: int, room: int, key: str, needs: Needs) -> None:
    if needs.gpus_per_node and size > room:
        raise UserError(
            f"{key} = {size} does not fit on one node: cluster.gpus_per_node = {room}; a tensor-parallel group may "
            f"not cross nodes, so lower {key} or raise cluster.gpus_per_node"
        )


def _fill(sizes: Sequence[int], used: Sequence[int], room: int, needs: Needs) -> list[_Block]:
    """Groups in order onto the first node with room for each; nodes before it are closed, so that order is kept."""
    node, taken, blocks = 0, list(used), []
    for size in sizes:
        while node < len(taken) and taken[node] + size > room:
            node += 1
        if node == len(taken):
            raise UserError(_too_little(needs))
        blocks.append(_Block(node, taken[node], size))
        taken[node] += size
    return blocks


def _too_little(needs: Needs) -> str:
    policy = f"the policy's {needs.world} ranks (policy.dp x tp x pp x cp, policy.tp = {needs.tp})"
    engines = f"{needs.engines} engines of {needs.engine_tp} (rollout.engines, rollout.tp)"
    return (
        f"cluster.nodes = {needs.nodes} x cluster.gpus_per_node = {needs.gpus_per_node} cannot hold {policy} and "
        f"{engines} with cluster.placement: {needs.placement} and no group across nodes; raise cluster.nodes or "
        f"cluster.gpus_per_node, or ask for fewer"
    )


def _used(blocks: Sequence[_Block], nodes: int) -> list[int]:
    """Slots taken on each node."""
    return [sum(block.size for block in blocks if block.node == node) for node in range(nodes)]


def _merged(ranks: Sequence[_Block], engines: Sequence[_Block], tp: int, engine_tp: int) -> list[Slot]:
    """One slot per place that anybody has, in order of node and place."""
    slots: dict[tuple[int, int], Slot] = {}
    for number, block in enumerate(ranks):
        for i in range(block.size):
            slots[block.node, block.start + i] = Slot(block.node, rank=number * tp + i)
    for number, block in enumerate(engines):
        for i in range(block.size):
            place = block.node, block.start + i
            slots[place] = replace(slots.get(place, Slot(block.node)), engine=(number, i))
    return [slots[place] for place in sorted(slots)]


# Ray counts in ten-thousandths; sums of its fractions are not exact.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node's CPUs and GPUs: how many it has, and how many nobody has taken."""

    address: str
    cpus: float
    free_cpus: float
    gpus: float = 0.0
    free_gpus: float = 0.0


def check_capacity(layout: Layout, nodes: Sequence[NodeCapacity]) -> None:
    """Raise UserError, saying what is needed and what each node has, unless every group of slots has a node.

    Groups may share a node when it is large enough for them together, but there must be as many nodes as was asked for.
    """
    if 0 < len(nodes) < len(layout.nodes):
        raise UserError(
            f"cluster.nodes asks for {len(layout.nodes)} nodes, but Ray has {len(nodes)} "
            f"({', '.join(node.address for node in nodes)}); lower cluster.nodes, or join a larger cluster"
        )
    left = [[node.free_cpus, node.free_gpus] for node in nodes]
    # The largest group first: it has the fewest nodes to choose from.
    for size in sorted((len(slots) for slots in layout.nodes), reverse=True):
        need = (size * layout.cpus, float(size if layout.gpu else 0))
        found = next((free for free in left if all(f + _SLACK >= n for f, n in zip(free, need, strict=True))), None)
        if found is None:
            raise UserError(_short(layout, nodes))
        found[:] = [f - n for f, n in zip(found, need, strict=True)]


def _short(layout: Layout, nodes: Sequence[NodeCapacity]) -> str:
    groups = " and ".join(_group(layout, len(slots)) for slots in layout.nodes)
    there = "; ".join(_node(node) for node in nodes) or "no node that is alive"
    return (
        f"Ray cannot place this run: it needs {groups} (policy.dp/tp/pp/cp, rollout.engines, rollout.tp, "
        f"cluster.nodes, cluster.gpus_per_node); the cluster has {there}"
    )


def _group(layout: Layout, slots: int) -> str:
    cpus = f"{slots * layout.cpus:g} CPUs"
    return f"{slots} GPUs and {cpus} free on one node" if layout.gpu else f"{cpus} free on one node"


def _node(node: NodeCapacity) -> str:
    gpus = f" and {node.free_gpus:g} of {node.gpus:g} GPUs" if node.gpus else " and no GPU"
    return f"{node.address}: {node.free_cpus:g} of {node.cpus:g} CPUs{gpus} free"
