"""`deterministic: true` on a GPU: the same bits, again and again, of each part alone and of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from packed_inputs import RUNS, in_place, inputs, kernels_here, on_gpu, segments_of, with_gradients
from programs import run, small_model
from torch import Tensor

from megasharp.common.records import SamplingParams
from megasharp.learner.attention import attend
from megasharp.learner.layer_spec import transformer_engine_is_there
from megasharp.ops.attention_kernels import KernelName
from megasharp.ops.head import VocabShard, token_head
from megasharp.rollout.inprocess.generation import _choose

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
REPEATS = 20


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_bits(compute: Callable[[], list[Tensor]]) -> None:
    first = [tensor.clone() for tensor in compute()]
    for _ in range(REPEATS):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(compute(), first, strict=True))


@pytest.mark.parametrize(
    ("kernels", "window", "heads", "groups", "size"),
    [
        (kernels, window, heads, groups, size)
        for window in (None, 100)
        for heads, groups, size in [(16, 4, 128), (4, 4, 64), (8, 2, 256)]
        for kernels in kernels_here(size, window, deterministic=True)
    ],
)
def test_attention(kernels: KernelName, window: int | None, heads: int, groups: int, size: int) -> None:
    """Queries' gradients are summed over tiles of keys: long runs have many, and their order must be fixed.

    torch asks the kernels for it under deterministic algorithms (`_flash_attention_backward`), FA3's and FA4's too;
    what is summed over responses of a prompt is ours.
    """
    segments = segments_of([(4096, -1), *RUNS, *[(700, 0)] * 6])
    rows = int(segments.length.sum())
    *given, cotangent = inputs(rows, heads, groups, size, torch.bfloat16)
    given = [x.requires_grad_() for x in given]
    packed = on_gpu(segments, rows)
    with in_place(kernels) as engine:
        assert_same_bits(lambda: with_gradients(attend(*given, packed, window, None, engine), given, cotangent))


@pytest.mark.parametrize("vocab", [5003, 151_936])
def test_head(vocab: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits_TV = torch.randn(300, vocab, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    target_T = torch.randint(0, vocab, (300,), device="cuda", generator=generator)

    def compute() -> list[Tensor]:
        whole = VocabShard(0, vocab, None)
        head = token_head(logits_TV, target_T, whole, entropy=True, entropy_gradient=True, topn=3)
        assert head.entropy_T is not None and head.topn_logp_TN is not None
        total = head.logp_T.sum() + head.entropy_T.sum() + head.topn_logp_TN.sum()
        (gradient,) = torch.autograd.grad(total, logits_TV)
        return [head.logp_T.detach(), head.entropy_T.detach(), head.topn_logp_TN.detach(), gradient]

    assert_same_bits(compute)


@pytest.mark.parametrize(("rows", "top_p"), [(1, 1.0), (64, 1.0), (64, 0.9)])
def test_sampling(rows: int, top_p: float) -> None:
    """Cumulative sums over a vocabulary; torch before 2.6 has none that are deterministic, and refuses."""
    generator = torch.Generator("cuda").manual_seed(0)
    logp_SV = torch.randn(rows, 151_936, device="cuda", generator=generator).log_softmax(-1)
    uniform_S = torch.rand(rows, device="cuda", generator=generator)
    sampling = SamplingParams(max_tokens=1, stop_token_ids=(1,), temperature=1.0, top_p=top_p)
    assert_same_bits(lambda: list(_choose(logp_SV, uniform_S, sampling)))


@pytest.mark.parametrize("engine", [False, True], ids=["local", "transformer-engine"])
@pytest.mark.parametrize("optimizer_offload", [False, True])
def test_steps_in_two_processes(tmp_path: Path, engine: bool, optimizer_offload: bool) -> None:
    if engine and not transformer_engine_is_there():
        pytest.skip("Transformer Engine is not installed")
    model = small_model(tmp_path)
    one, other = (
        run(model, deterministic=True, transformer_engine=engine, optimizer_offload=optimizer_offload) for _ in range(2)
    )
    assert one["figures"] == other["figures"] and one["digest"] == other["digest"]
