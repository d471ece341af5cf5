"""Whether a layout fits the cluster as it is now, asked before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasharp.cluster.layout import Layout
from megasharp.errors import UserError

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
