"""Slots: who sits where, no tensor-parallel group across nodes, and what cannot be is refused by its keys."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from waiting import HANG_S

from megasharp.cluster.ray_runtime.slot_layout import (
    Layout,
    Needs,
    NodeCapacity,
    Slot,
    check_capacity,
    make_layout,
)
from megasharp.common.errors import UserError
from megasharp.config.rollout import ClusterConfig


def nodes_of(layout: Layout, slots: list[int]) -> set[int]:
    return {layout.slots[slot].node for slot in slots}


def test_colocated_engines_share_the_ranks_slots() -> None:
    layout = make_layout(Needs(world=4, tp=2, engines=2, engine_tp=1), ClusterConfig(gpus_per_node=8))
    assert layout.slots == (
        Slot(0, rank=0, engine=(0, 0)),
        Slot(0, rank=1, engine=(1, 0)),
        Slot(0, rank=2),
        Slot(0, rank=3),
    )
    assert layout.bundle == {"GPU": 1.0, "CPU": 1.0}


def test_disaggregated_engines_come_behind_the_ranks() -> None:
    layout = make_layout(
        Needs(world=2, tp=2, engines=2, engine_tp=1), ClusterConfig(placement="disaggregated", cpus_per_slot=0.5)
    )
    assert layout.slots == (Slot(0, rank=0), Slot(0, rank=1), Slot(0, engine=(0, 0)), Slot(0, engine=(1, 0)))
    assert layout.bundle == {"CPU": 0.5}


def test_a_group_that_would_cross_nodes_starts_on_the_next() -> None:
    """Three GPUs a node: the engine of two leaves one free rather than stand on both."""
    layout = make_layout(Needs(2, 1, 2, 2), ClusterConfig(placement="disaggregated", nodes=3, gpus_per_node=3))
    assert [slot.node for slot in layout.slots] == [0, 0, 1, 1, 2, 2]
    assert layout.nodes == [[0, 1], [2, 3], [4, 5]]
    assert layout.of_engine(1) == [4, 5]


def placements(needs: Needs, cluster: ClusterConfig) -> Layout | None:
    try:
        return make_layout(needs, cluster)
    except UserError:
        return None


def test_the_ranks_beside_engines() -> None:
    """A group of three leaves a GPU of each node alone, and engines of one count past it."""
    cluster = ClusterConfig(nodes=2, gpus_per_node=4)
    layout = make_layout(Needs(world=6, tp=3, engines=6, engine_tp=1), cluster)
    assert layout.beside(same_slot=True) is None
    assert layout.beside(same_slot=False) == ((0,), (1,), (2,), (0,), (3,), (4,))
    layout = make_layout(Needs(world=6, tp=3, engines=2, engine_tp=3), cluster)
    assert layout.beside(same_slot=True) == ((0, 1, 2), (3, 4, 5))
    apart = make_layout(Needs(2, 1, 2, 2), ClusterConfig(placement="disaggregated", nodes=3, gpus_per_node=3))
    assert apart.beside(same_slot=False) is None


def test_every_layout_keeps_the_rules() -> None:
    """All small shapes: everybody has one seat, groups stay on a node, no node has more slots than GPUs."""
    made = 0
    for tp, groups, engines, engine_tp, nodes, gpus, kind in product(
        (1, 2, 4), (1, 2, 3), (0, 1, 3), (1, 2, 4), (1, 2, 3), (0, 2, 4, 8), ("colocated", "disaggregated")
    ):
        cluster = ClusterConfig(placement=kind, nodes=nodes, gpus_per_node=gpus)
        layout = placements(Needs(tp * groups, tp, engines, engine_tp), cluster)
        if layout is None:
            continue
        made += 1
        assert sorted(slot.rank for slot in layout.slots if slot.rank is not None) == list(range(tp * groups))
        assert layout.world == tp * groups and layout.engines == engines
        for group in range(groups):
            assert len(nodes_of(layout, [layout.of_rank(group * tp + i) for i in range(tp)])) == 1
        for engine in range(engines):
            seats = layout.of_engine(engine)
            assert len(set(seats)) == engine_tp and len(nodes_of(layout, seats)) == 1
        shared = [slot for slot in layout.slots if slot.rank is not None and slot.engine is not None]
        assert kind == "colocated" or not shared
        assert len(layout.nodes) <= nodes and all(len(slots) <= (gpus or 99) for slots in layout.nodes)
    assert made > 500


@pytest.mark.parametrize(
    ("needs", "cluster", "words"),
    [
        (Needs(4, 4, 1, 1), ClusterConfig(nodes=4, gpus_per_node=2), ("policy.tp = 4", "cluster.gpus_per_node = 2")),
        (Needs(2, 1, 1, 8), ClusterConfig(nodes=4, gpus_per_node=4), ("rollout.tp = 8", "cluster.gpus_per_node = 4")),
        (
            Needs(8, 1, 4, 2),
            ClusterConfig(placement="disaggregated", nodes=1, gpus_per_node=8),
            ("cluster.nodes = 1", "cluster.gpus_per_node = 8", "policy.dp", "rollout.engines", "disaggregated"),
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_keys(needs: Needs, cluster: ClusterConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        make_layout(needs, cluster)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def node(name: str, cpus: float, gpus: float, free_gpus: float | None = None) -> NodeCapacity:
    return NodeCapacity(name, cpus, cpus, gpus, gpus if free_gpus is None else free_gpus)


def test_capacity_counts_what_is_free_on_each_node() -> None:
    layout = make_layout(Needs(16, 8, 0, 1), ClusterConfig(nodes=2, gpus_per_node=8))
    check_capacity(layout, [node("a", 64, 8), node("b", 64, 8)])
    check_capacity(layout, [node("one large", 64, 16), node("small", 1, 0)])
    # As many GPUs in all, but not eight together.
    with pytest.raises(UserError, match=r"needs 8 GPUs and 8 CPUs free on one node and 8 GPUs.* b: .* 4 of 8 GPUs"):
        check_capacity(layout, [node("a", 64, 8), node("b", 64, 8, 4), node("c", 64, 4)])
    with pytest.raises(UserError, match="the cluster has no node that is alive"):
        check_capacity(layout, [])


def test_as_many_nodes_as_were_asked_for() -> None:
    layout = make_layout(Needs(2, 1, 0, 1), ClusterConfig(nodes=2))
    check_capacity(layout, [node("a", 1, 0), node("b", 1, 0)])
    with pytest.raises(UserError, match=r"cluster\.nodes asks for 2 nodes, but Ray has 1 \(one large\)"):
        check_capacity(layout, [node("one large", 64, 0)])


def test_capacity_on_a_cpu_needs_no_gpu() -> None:
    layout = make_layout(Needs(2, 2, 2, 1), ClusterConfig(placement="disaggregated", cpus_per_slot=0.5))
    check_capacity(layout, [node("a", 2, 0)])
    with pytest.raises(UserError, match=r"needs 2 CPUs free on one node .*a: 1 of 1 CPUs and no GPU free"):
        check_capacity(layout, [node("a", 1, 0)])


def test_large_groups_are_placed_first() -> None:
    """The group of one fits anywhere; where it would take the place of the group of two, it gives way."""
    layout = make_layout(Needs(1, 1, 1, 2), ClusterConfig(placement="disaggregated", nodes=2, gpus_per_node=2))
    assert [len(slots) for slots in layout.nodes] == [1, 2]
    check_capacity(layout, [node("a", 9, 2), node("b", 9, 1)])


def test_this_room_can_be_read_without_ray(tmp_path: Path) -> None:
    """What judges a configuration must not cost the import of Ray."""
    import subprocess
    import sys

    script = "import sys, megasharp.cluster.ray_runtime.slot_layout, megasharp.cluster.ray_runtime.session as s\n"
    script += "s.SessionSettings(); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.strip() == "False"
