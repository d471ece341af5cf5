"""The figures of an update's tokens against transformers' logits, over layouts."""

from __future__ import annotations

import math

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings

from megasharp.common.records import Metrics

TEMPERATURE, SAMPLES = 0.7, 4


def figures(rank: int, world: int, folder: str, layout_name: str) -> Metrics:
    layout, method = LAYOUTS[layout_name], recipe()
    with learner_on(settings(folder, layout, method.needs, temperature=TEMPERATURE)) as (learner, _):
        return learner.step(packed(ragged_sequences(), layout, micro_batch_tokens=32), method).metrics


def by_transformers(folder: str) -> dict[str, float]:
    """Lambda of two candidates; distinct next tokens of four draws where a response has its top fifth of entropy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    lambdas, distinct, entropies = [], [], []
    for sequence in ragged_sequences():
        if not sequence.mask_T.any():
            continue
        logits = model(sequence.tokens[None]).logits[0].detach()
        logp = (logits[sequence.prompt_length - 1 : -1] / TEMPERATURE).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        gate = entropy > entropy.quantile(0.8)
        distinct += (1 - (1 - logp[gate].exp()) ** SAMPLES).sum(-1).tolist()
        lambdas.append(logp.topk(2).values.mean(0))
        entropies.append(entropy.mean())
    first, second = torch.stack(lambdas).mean(0).tolist()
    return {
        "candidates/lambda_1": first,
        "candidates/lambda_2": second,
        "candidates/distinct_next": sum(distinct) / len(distinct),
        "entropy/response_mean": float(torch.stack(entropies).mean()),
    }


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(layout, marks=pytest.mark.long("layouts")) for layout in ("tp1", "pp2", "dp2"))]
)
def test_figures_are_those_of_the_whole_step(tmp_path_factory: pytest.TempPathFactory, layout: str) -> None:
    folder = save_model(tmp_path_factory.mktemp("models"), "qwen3-tied")
    metrics = run_ranks(LAYOUTS[layout].world, figures, folder, layout)[0]
    for name, value in by_transformers(folder).items():
        assert math.isclose(metrics[name].value, value, rel_tol=2e-5), name
