"""The head's kernels as compiled for a GPU, at sizes beyond one tile, one split, a grid's limits and int32."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_cases import Case, observe, oracle
from torch import Tensor

from megasharp.ops.chunked_head import chunked_token_head
from megasharp.ops.head import HeadOutput, VocabShard, token_head

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]

# Several tiles of 1,024, and neither a multiple of one nor of 16 bytes.
VOCABULARY, COLUMNS = 4997, 5003


def case(dtype: torch.dtype = torch.bfloat16, columns: int = COLUMNS, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(0)
    logits_TVp = 3 * torch.randn(6, columns, generator=generator)
    logits_TVp[:, VOCABULARY:] = math.nan
    logits_TVp[1, 77] += 1e4
    logits_TVp[2, :VOCABULARY] = logits_TVp[2, :VOCABULARY].round()
    logits_TVp[3, :4000] = -math.inf
    logits_TVp[4, :VOCABULARY] -= 1e4
    target_T = torch.tensor([0, 77, 4996, 4500, 1024, 1023])
    return Case(logits_TVp.to(dtype), target_T, VOCABULARY, block=1024, **options)


@pytest.mark.parametrize("programs", [1, 2112])
@pytest.mark.parametrize("topn", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_to_the_oracle(dtype: torch.dtype, topn: int, programs: int) -> None:
    for columns in (COLUMNS, 5008):
        cpu = case(dtype, columns, topn=topn, programs=programs, temperature=0.7)
        expected = oracle(cpu.logits_TVp, cpu.target_T, VOCABULARY, cpu.temperature, topn)
        gpu = replace(cpu, logits_TVp=cpu.logits_TVp.cuda(), target_T=cpu.target_T.cuda())
        for overwrite in (False, True):
            observed = observe(gpu, "auto", overwrite)
            for name, value in observed.outputs.items():
                exact = getattr(expected.output, name)
                torch.testing.assert_close(value.cpu(), exact, rtol=1e-5, atol=1e-5, check_dtype=False)
            tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
            torch.testing.assert_close(
                observed.gradient.cpu(), expected.gradient, rtol=tolerance, atol=tolerance, check_dtype=False
            )


def head_of(logits_TV: Tensor, target_T: Tensor, **options: Any) -> HeadOutput:
    whole = VocabShard(0, logits_TV.shape[1], None)
    return token_head(logits_TV, target_T, whole, entropy=True, entropy_gradient=True, topn=3, **options)


@pytest.mark.parametrize(("tokens", "vocab"), [(15_000, 151_936), (70_000, 256)])
def test_more_elements_than_int32_and_more_rows_than_a_grid_has_elsewhere(tokens: int, vocab: int) -> None:
    logits_TV = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target_T = torch.randint(0, vocab, (tokens,), device="cuda")
    kept = logits_TV[-3:].detach().double().requires_grad_()
    x = logits_TV.view_as(logits_TV)
    head = head_of(x, target_T, overwrite_logits=True)
    (gradient,) = torch.autograd.grad(head.logp_T.sum(), x)
    logp_T = torch.log_softmax(kept, 1).gather(1, target_T[-3:, None])[:, 0]
    logp_T.sum().backward()
    torch.testing.assert_close(head.logp_T[-3:], logp_T, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(gradient[-3:], kept.grad, rtol=1e-2, atol=1e-3, check_dtype=False)


def test_no_memory_of_the_logits_size() -> None:
    tokens, vocab = 4096, 32_000
    logits_TV = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    x = logits_TV.view_as(logits_TV)
    target_T = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head = head_of(x, target_T, overwrite_logits=True)
    (gradient,) = torch.autograd.grad(head.logp_T.sum(), x)
    assert gradient.data_ptr() == logits_TV.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < 8 * 2**20


def test_chunks_equal_the_whole() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_TH = torch.randn(3000, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight_VH = torch.randn(5000, 64, device="cuda", generator=generator).mul(0.2).bfloat16().requires_grad_()
    target_T = torch.randint(0, 5000, (3000,), device="cuda", generator=generator)
    whole = VocabShard(0, 5000, None)
    chunked = chunked_token_head(hidden_TH, weight_VH, target_T, whole, entropy=True, topn=3)
    plain = token_head(hidden_TH @ weight_VH.t(), target_T, whole, entropy=True, topn=3)
    torch.testing.assert_close(chunked.logp_T, plain.logp_T, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(each.logp_T.sum(), (hidden_TH, weight_VH)) for each in (chunked, plain)]
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine.double() - theirs.double()).norm() < 1e-2 * theirs.double().norm()
