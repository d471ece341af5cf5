"""A step's batch on its way to the ranks: bytes by node, and the room for it in Ray's store."""

from __future__ import annotations

import pytest

from megasharp.cluster.ray_runtime.slot_layout import NodeCapacity, small_stores
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Routing
from megasharp.planner.formulas import Lengths
from megasharp.planner.records import Batch
from megasharp.planner.transport import _places, store_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("layout", "nodes", "places"),
    [
        (ParallelLayout(dp=4, tp=8), 4, [1, 1, 1, 1]),
        (ParallelLayout(dp=32), 4, [8, 8, 8, 8]),
        # Both nodes have half of a pipeline, and all shares.
        (ParallelLayout(dp=4, tp=2, pp=2), 2, [4, 4]),
        (ParallelLayout(dp=3, tp=4), 2, [2, 1]),
    ],
)
def test_nodes_get_the_shares_of_their_own_ranks(layout: ParallelLayout, nodes: int, places: list[int]) -> None:
    assert list(_places(layout, nodes, 8)) == places


def test_a_store_has_room_for_a_step_of_full_length() -> None:
    """Of 512 x 8,192 tokens: 30 bytes a token there, 12 back, a quarter more; streamed weights need less."""
    batch = Batch(64, 8, 1, 0.0, Lengths(512, 1024, 4096, 8192))
    tokens, prompts = 512 * 8192, 512 * 1024
    assert store_bytes(batch, ParallelLayout(dp=4)) == pytest.approx(1.25 * (42 * tokens + 4 * prompts), rel=0.001)
    # With routing replay, of 48 layers with 8 experts a token.
    routed = store_bytes(batch, ParallelLayout(dp=4), Routing(48, 8, 128).bytes_per_token)
    assert routed == pytest.approx(1.25 * ((384 + 42) * tokens + (384 + 4) * prompts), rel=0.001)
    assert Routing(48, 8, 257).bytes_per_token == 2 * 384
    small = Batch(1, 1, 1, 0.0, Lengths(8, 16, 8, 16))
    assert store_bytes(small, ParallelLayout(pp=4)) == 1.25 * 4 * 3 * (32 << 20)


def test_stores_that_are_too_small_are_named() -> None:
    nodes = [NodeCapacity("a", 8, 8, store=4.0 * GB), NodeCapacity("b", 8, 8, store=1.0 * GB)]
    assert small_stores(GB, nodes) is None
    found = small_stores(2 * GB, nodes) or ""
    assert "has 1.0 GB on b, and" in found and "needs 2.0 GB: the rest would go to disk" in found
    assert "on 1 more node(s)" not in found and "on 1 more node(s)" in (small_stores(5 * GB, nodes) or "")
