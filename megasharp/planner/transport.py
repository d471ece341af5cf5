"""Bytes of a step's batch on their way from the driver to the ranks, and back, and what Ray's object store needs.

Each data-parallel rank gets its share once a step. Where log-probs are computed before the update, the share stays on
its ranks, and the update is sent what may have changed since: advantages and masks. With `rollout.overlap_annotation` a
response is sent twice: in a piece, for its log-probs, and in its share, together with these. Where routing is replayed,
every packed token has its route with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megasharp.common.layout import ParallelLayout
from megasharp.planner.formulas import Lengths
from megasharp.planner.memory import Rows
from megasharp.planner.mixtures import replay_bytes_per_token
from megasharp.planner.records import Batch, Request, Transport

# Of a token in a share (batching/share.py): its id; of a response's token also two log-probs (float32), and, where they
# are not the same in all of a response, advantage (float64) and mask (1 byte). Predictions take it that they are not.
PROMPT_TOKEN, ADVANTAGE, RESPONSE_TOKEN = 4, 9, 4 + 4 + 4 + 9
# Of a response: length, group, place, seed (int64); reward, correct and the group's counts (float32); and a mask and an
# advantage where these are one a response.
_RESPONSE = 4 * 8 + 4 * 4 + 12
# Of a response's token of which a pass computed a log-prob (float32).
_LOG_PROB = 4
# Of a response's token on the way back: up to three columns of log-probs and entropies.
_RESULT = 12
# Ray sends objects over TCP, one node after the other; a node's own ranks get theirs by a copy. Assumed, not measured.
NETWORK, COPY = 1e9, 2e9
# Seconds of the largest batch of the published runs that `Rates.driver_s` is fitted to, by this formula.
FITTED_S = 0.703
# A stream of weights that has room to send three parts (cluster/ray_runtime/rank_actor.py) from each stage.
_STREAM = 3 * (32 << 20)
# Ray's store cuts its memory into blocks of the objects' sizes.
_MARGIN = 1.25


def transport(request: Request, rows: Rows) -> Transport | None:
    """Predict a step's transport; None where one rank is all, in the driver's process."""
    layout, batch, machines = request.layout, request.batch, request.machines
    if layout.world == 1:
        return None
    responses, route = batch.sequences * batch.lengths.response, route_bytes(request)
    share = share_bytes(responses, rows.step - responses, batch.sequences, route)
    before = len(request.passes.before)
    again = 0.0
    if before and request.engines is not None and request.engines.overlap_annotation:
        # Pieces have no advantages or masks yet.
        again = share + (before * _LOG_PROB - ADVANTAGE) * responses
    elif before:
        again = ADVANTAGE * responses
    step = share + round(again)
    nodes = list(_places(layout, machines.nodes, machines.gpus_per_node))
    seconds = None
    if machines.gpu is not None:
        seconds = step / layout.dp * (nodes[0] / COPY + sum(nodes[1:]) / NETWORK)
    return Transport(
        step=step,
        node=math.ceil(step * max(nodes) / layout.dp),
        seconds=seconds,
        store=store_bytes(batch, layout, route),
        route=route,
        # Every response has its prompt's too, before they are packed.
        routes=math.ceil(
            route * ((responses + batch.sequences * batch.lengths.prompt) * (1 + batch.oversample) + rows.step)
        ),
    )


def route_bytes(request: Request) -> int:
    """Bytes of a token's route that are sent with it; 0 where routing is not replayed."""
    return replay_bytes_per_token(request.policy.architecture) if request.split.experts.replay else 0


def more_seconds(request: Request, rows: Rows) -> float:
    """Seconds of a step's transport beyond those that the driver's fitted constant has in it; 0.0 on CPUs."""
    found = transport(request, rows)
    return 0.0 if found is None or found.seconds is None else max(0.0, found.seconds - FITTED_S)


def share_bytes(responses: float, prompts: float, sequences: float, route: int = 0) -> int:
    """Bytes of shares of so many tokens of responses and of prompts, each with `route` bytes, and so many responses."""
    return round((RESPONSE_TOKEN + route) * responses + (PROMPT_TOKEN + route) * prompts + _RESPONSE * sequences)


def store_bytes(batch: Batch, layout: ParallelLayout, route: int = 0) -> int:
    """Bytes that Ray's store needs on the driver's node, where every response is of the greatest length.

    It holds a step's shares and what changes in them, or results on their way back, or parts of streamed weights. What
    is annotated while engines sample needs no more: pieces leave the store before the shares come, and with these go
    the results alone.
    """
    lengths: Lengths = batch.lengths
    responses = batch.sequences * lengths.response_longest
    shares = share_bytes(responses, batch.sequences * lengths.prompt_longest, batch.sequences, route)
    return math.ceil(_MARGIN * max(shares + (ADVANTAGE + _RESULT) * responses, _STREAM * layout.pp))


def _places(layout: ParallelLayout, nodes: int, room: int) -> Iterator[int]:
    """Yield how many data-parallel shares each node gets that has ranks, which fill one after the other."""
    room = room or -(-layout.world // nodes)
    for first in range(0, layout.world, room):
        yield len({layout.data_rank(rank) for rank in range(first, min(first + room, layout.world))})
