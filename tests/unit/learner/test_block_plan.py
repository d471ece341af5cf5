"""Which rows a plan lets each packed row see, against the definition."""

from __future__ import annotations

import torch
from cases import each_case

from megasharp.common.records import Segments
from megasharp.learner.block_plan import AttentionPlan, full_plan, longest_context, windowed_plan

# Prompts of 5 and 1 rows with two and one responses, and runs that share nothing.
RUNS = [(5, -1), (7, 0), (1, 0), (1, -1), (12, 3), (9, -1), (1, -1), (3, -1)]


def segments_of(runs: list[tuple[int, int]]) -> Segments:
    lengths = torch.tensor([length for length, _ in runs])
    return Segments(lengths.cumsum(0) - lengths, lengths, torch.tensor([prefix for _, prefix in runs]))


def defined(segments: Segments, window: int | None) -> dict[int, list[int]]:
    """Packed row -> the rows it sees, in the order of their positions."""
    rows = [
        list(range(start, start + length))
        for start, length in zip(segments.start.tolist(), segments.length.tolist(), strict=True)
    ]
    seen: dict[int, list[int]] = {}
    for own, prefix in zip(rows, segments.prefix.tolist(), strict=True):
        context = list(rows[prefix]) if prefix >= 0 else []
        for row in own:
            context.append(row)
            seen[row] = context[-window:] if window else context.copy()
    return seen


def planned(plan: AttentionPlan) -> dict[int, list[int]]:
    """The same of a plan; a row whose output would come from another's query, or a row seen twice, shows."""
    queries: list[int] = []
    visible: list[list[int]] = []
    for block in plan.blocks:
        mask = block.mask_BQK
        if mask is None:
            mask = torch.ones(block.query_BQ.shape[1], block.key_BK.shape[1], dtype=torch.bool).tril()
        mask = mask.expand(block.query_BQ.shape[0], -1, -1)
        assert bool(mask.any(-1).all()), "a query that sees nothing gives not-a-number"
        queries += block.query_BQ.flatten().tolist()
        visible += [keys[row].tolist() for keys, rows in zip(block.key_BK, mask, strict=True) for row in rows]
    places = plan.restore_P.tolist()
    assert [queries[place] for place in places] == list(range(len(places)))
    return {row: visible[place] for row, place in enumerate(places)}


@each_case("window", [1, 2, 3, 4, 5, 8, 13, 17, 100])
def test_a_window_shows_the_last_positions_across_a_shared_prompt(window: int) -> None:
    segments = segments_of(RUNS)
    assert planned(windowed_plan(segments, int(segments.length.sum()), window)) == defined(segments, window)


def test_without_a_window_every_earlier_position_is_seen() -> None:
    segments = segments_of(RUNS)
    assert planned(full_plan(segments, int(segments.length.sum()))) == defined(segments, None)


def test_a_window_costs_length_times_window() -> None:
    segments = segments_of([(1000, -1), (3000, 0)])
    plan = windowed_plan(segments, 4000, 100)
    products = sum(block.query_BQ.numel() * block.key_BK.shape[1] for block in plan.blocks)
    assert products <= 4000 * 2 * 100
    assert longest_context(segments) == 4000
