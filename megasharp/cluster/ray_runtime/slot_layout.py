"""Places of ranks and engines: slots of one GPU each (or one CPU), in groups that share a node. Pure.

Co-located, an engine's ranks share the slots of policy ranks; disaggregated, they have slots of their own behind them.
A tensor-parallel group, the policy's or an engine's, never crosses nodes: its ranks exchange activations in every
layer. Before anything starts, `check_capacity` compares a layout with the cluster as it is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasharp.common.errors import UserError
from megasharp.config.rollout import ClusterConfig


@dataclass(frozen=True, slots=True)
class Needs:
    """The ranks to place: `world` of the policy in neighbouring groups of `tp`, `engines` of `engine_tp` each."""

    world: int
    tp: int
    engines: int
    engine_tp: int


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
    """All slots, node by node. `gpu`: a slot is a GPU; `cpus` are a slot's CPUs."""

    slots: tuple[Slot, ...]
    gpu: bool
    cpus: float = 1.0

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that one slot asks of Ray."""
        return {"GPU": 1.0, "CPU": self.cpus} if self.gpu else {"CPU": self.cpus}

    @property
    def nodes(self) -> list[list[int]]:
        """Slot numbers by node."""
        numbers = sorted({slot.node for slot in self.slots})
        return [[i for i, slot in enumerate(self.slots) if slot.node == node] for node in numbers]

    def of_rank(self, rank: int) -> int:
        """Return the slot of a policy rank."""
        return next(i for i, slot in enumerate(self.slots) if slot.rank == rank)

    def of_engine(self, engine: int) -> list[int]:
        """Return the slots of an engine's ranks, in their order."""
        found = {slot.engine[1]: i for i, slot in enumerate(self.slots) if slot.engine and slot.engine[0] == engine}
        return [found[rank] for rank in range(len(found))]

    def beside(self, same_slot: bool) -> tuple[tuple[int, ...], ...] | None:
        """Return, for every engine, the policy rank beside each of its ranks: in the same slot.

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
        """The number of policy ranks."""
        return sum(slot.rank is not None for slot in self.slots)

    @property
    def engines(self) -> int:
        """The number of engines."""
        return len({slot.engine[0] for slot in self.slots if slot.engine})


def make_layout(needs: Needs, cluster: ClusterConfig) -> Layout:
    """Place everything, filling node after node. With `gpus_per_node` 0 a node holds an equal share of the slots.

    Raises UserError naming the keys when it does not fit into `nodes` x `gpus_per_node`, or a group would cross nodes.
    """
    policy = [needs.tp] * (needs.world // needs.tp)
    engines = [needs.engine_tp] * needs.engines
    room = _room_per_node(needs, cluster)
    _check_group(needs.tp, room, "policy.tp", cluster)
    if engines:
        _check_group(needs.engine_tp, room, "rollout.tp", cluster)
    used = [0] * cluster.nodes
    ranks = _fill(policy, used, room, needs, cluster)
    # Co-located engines start again on the first node; others continue where the policy ended.
    if cluster.placement == "disaggregated":
        used = [sum(block.size for block in ranks if block.node == node) for node in range(cluster.nodes)]
    # One slot per place that anybody has, in order of node and place.
    slots: dict[tuple[int, int], Slot] = {}
    for number, block in enumerate(ranks):
        for i in range(block.size):
            slots[block.node, block.start + i] = Slot(block.node, rank=number * needs.tp + i)
    for number, block in enumerate(_fill(engines, used, room, needs, cluster)):
        for i in range(block.size):
            place = block.node, block.start + i
            slots[place] = replace(slots.get(place, Slot(block.node)), engine=(number, i))
    in_order = tuple(slots[place] for place in sorted(slots))
    return Layout(in_order, cluster.gpus_per_node > 0, cluster.cpus_per_slot)


@dataclass(frozen=True, slots=True)
class _Block:
    """A group's place: its node and its slots there, `[start, start + size)`."""

    node: int
    start: int
    size: int


def _room_per_node(needs: Needs, cluster: ClusterConfig) -> int:
    if cluster.gpus_per_node:
        return cluster.gpus_per_node
    # Without a number in the configuration every node takes its share, in whole groups.
    group = max(needs.tp, needs.engine_tp if needs.engines else 1)
    both = (needs.world, needs.engines * needs.engine_tp)
    total = max(both) if cluster.placement == "colocated" else sum(both)
    share = -(-total // cluster.nodes)
    return -(-share // group) * group


def _check_group(size: int, room: int, key: str, cluster: ClusterConfig) -> None:
    if cluster.gpus_per_node and size > room:
        raise UserError(
            f"{key} = {size} does not fit on one node: cluster.gpus_per_node = {room}; a tensor-parallel group may "
            f"not cross nodes, so lower {key} or raise cluster.gpus_per_node"
        )


def _fill(sizes: Sequence[int], used: Sequence[int], room: int, needs: Needs, cluster: ClusterConfig) -> list[_Block]:
    """Groups in order onto the first node with room for each; nodes before it are closed, so that order is kept."""
    node, taken, blocks = 0, list(used), []
    for size in sizes:
        while node < len(taken) and taken[node] + size > room:
            node += 1
        if node == len(taken):
            raise UserError(
                f"cluster.nodes = {cluster.nodes} x cluster.gpus_per_node = {cluster.gpus_per_node} cannot hold the "
                f"policy's {needs.world} ranks (policy.dp x tp x pp x cp, policy.tp = {needs.tp}) and {needs.engines} "
                f"engines of {needs.engine_tp} (rollout.engines, rollout.tp) with cluster.placement: "
                f"{cluster.placement} and no group across nodes; raise cluster.nodes or cluster.gpus_per_node, or ask "
                "for fewer"
            )
        blocks.append(_Block(node, taken[node], size))
        taken[node] += size
    return blocks


# Ray counts in ten-thousandths; sums of its fractions are not exact.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node's CPUs and GPUs, and those of them that nobody has taken; bytes of Ray's object store there."""

    address: str
    cpus: float
    free_cpus: float
    gpus: float = 0.0
    free_gpus: float = 0.0
    store: float = 0.0


def small_stores(needed: int, nodes: Sequence[NodeCapacity]) -> str | None:
    """Return a line about the nodes whose object store is smaller than `needed` bytes; None where all are large enough.

    Ray writes what finds no room there to disk, and reads it back.
    """
    small = [node for node in nodes if node.store < needed]
    if not small:
        return None
    least = min(small, key=lambda node: node.store)
    return (
        f"Ray's object store has {least.store / 1e9:.1f} GB on {least.address}"
        + (f" and too little on {len(small) - 1} more node(s)" if len(small) > 1 else "")
        + f", and a step with responses of full length needs {needed / 1e9:.1f} GB: the rest would go to disk; make "
        "/dev/shm larger, or give `ray start` a larger --object-store-memory"
    )


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
    groups = []
    for slots in layout.nodes:
        gpus = f"{len(slots)} GPUs and " if layout.gpu else ""
        groups.append(f"{gpus}{len(slots) * layout.cpus:g} CPUs free on one node")
    found = []
    for node in nodes:
        gpus = f" and {node.free_gpus:g} of {node.gpus:g} GPUs" if node.gpus else " and no GPU"
        found.append(f"{node.address}: {node.free_cpus:g} of {node.cpus:g} CPUs{gpus} free")
    return (
        f"Ray cannot place this run: it needs {' and '.join(groups)} (policy.dp/tp/pp/cp, rollout.engines, rollout.tp, "
        f"cluster.nodes, cluster.gpus_per_node); the cluster has {'; '.join(found) or 'no node that is alive'}"
    )
