"""The keys that a memory network with a window sees, against the mask written out over the whole sequence."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import torch

from megasharp.rollout.sglang.engine.memory_window import attend, seen_in_step


def test_attention_by_steps_is_attention_under_the_whole_mask() -> None:
    """Prompts in chunks, responses that are prefilled or decoded: every cut of a sequence gives the same rows."""
    draw = random.Random(5)
    for _ in range(60):
        length, window = draw.randint(2, 24), draw.randint(1, 12)
        prompt = draw.randint(1, length)
        cuts = sorted({0, length, *draw.choices(range(length), k=draw.randint(0, 6))})
        q, k, v = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        sees = (columns <= rows) & ((columns < prompt) | (columns > rows - window))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / math.sqrt(8)
        whole = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(~sees, -math.inf).softmax(-1), v.repeat_interleave(2, 1)
        )
        for begin, end in pairwise(cuts):
            [seen] = seen_in_step([prompt], [begin], [end], window)
            part = attend(q[begin:end], k[seen.keys_K], v[seen.keys_K], seen, 1 / math.sqrt(8))
            assert torch.allclose(part, whole[begin:end], atol=1e-5), (prompt, window, begin, end)


def test_a_decoded_token_has_the_prompt_and_the_window_for_keys() -> None:
    first, second = seen_in_step([3, 5], [9, 6], [10, 7], 4)
    assert first.keys_K.tolist() == [0, 1, 2, 6, 7, 8, 9] and second.keys_K.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (first.queries, second.queries) == (slice(0, 1), slice(1, 2)) and first.mask_QK is None
