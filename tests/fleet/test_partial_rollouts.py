"""A run of partial rollouts with DLC, whose engines are killed, held against an oracle that has each step's weights."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from example_runs import GAP, REPOSITORY, engine_leaders, finish, rows, running, wait_for, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long("fleet-runs")

STEPS, PROMPTS, RESPONSES = 14, 4, 8
PARTIAL = (
    f"steps={STEPS}",
    "deterministic=false",
    "cluster.backend=local",
    "policy.tp=1",
    "rollout.max_staleness=2",
    "rollout.oversample=0.75",
    "checkpoint={every: 1, keep_last: 100, export_hf: true}",
)


def test_partial_rollouts_train_every_prompt_once_on_what_was_sampled(tmp_path: Path) -> None:
    """With DLC, staleness 2 and an engine killed twice nothing is discarded, and log-probs are the oracle's."""
    with running(tmp_path, *PARTIAL) as process:
        seen = ""
        for _ in range(2):
            done = len(rows(tmp_path)) if seen else 0
            wait_until(process, lambda done=done: len(rows(tmp_path)) > done)
            os.kill(engine_leaders(process)[1].pid, signal.SIGKILL)
            seen += wait_for(process, "engine 1 is back")
        output = seen + finish(process)
    assert output.count("engine 1 is lost: dead (") == 2, output
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert all(row["rollout/staleness_max"] <= 2 and row["rollout/stale_dropped"] == 0 for row in found)
    assert any(row["rollout/continued"] > 0 for row in found), "no response went over a step's end"

    run = tmp_path / "fleet_on_cpu"
    sampled, tokens = (
        pd.concat([pd.read_parquet(table) for table in sorted((run / name).glob("*.parquet"))])
        for name in ("rollouts", "rollout_tokens")
    )
    _every_prompt_once(run, sampled)
    # Each row's account is of the responses in its table.
    lengths = sampled.groupby("step")["length"]
    for row in found:
        account = {name: row[f"responses/{name}"] for name in ("trained", "discarded", "dropped")}
        assert account == {"trained": PROMPTS * RESPONSES, "discarded": 0, "dropped": 0}
        assert row["responses/trained_tokens"] == lengths.get_group(row["step"]).sum()
    assert sum(row["responses/finished_tokens"] for row in found) >= sampled["length"].sum()
    assert _oracle_gap(run, sampled.merge(tokens, on=["step", "group_id", "index"])) < 1e-5


def _every_prompt_once(run: Path, sampled: pd.DataFrame) -> None:
    """Trained prompts and those that wait in the last checkpoint are the stream's first ones, each once."""
    order = [json.loads(line)["id"] for line in (REPOSITORY / "examples/quickstart/data/train.jsonl").open()]
    random.Random("prompts-1-0").shuffle(order)
    groups = sampled.groupby("group_id")["prompt_id"]
    assert len(groups) == PROMPTS * STEPS and set(groups.size()) == {RESPONSES}
    last = json.loads((run / f"checkpoints/step_{STEPS:06d}/manifest.json").read_text())
    waiting = [entry["position"] for entry in last["pending"]]
    places = {name: place for place, name in enumerate(order)}
    assert sorted([*(places[name] for name in groups.first()), *waiting]) == list(range(last["cursor"]["position"]))


def _oracle_gap(run: Path, sampled: pd.DataFrame) -> float:
    """Return the mean |recorded log-prob - transformers'| by the weights that each token's span names, in nats."""
    base = REPOSITORY / "examples/quickstart/base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    folders = {step: run / f"checkpoints/step_{step:06d}/hf_export" for step in range(1, STEPS)} | {0: base}
    models = {version: AutoModelForCausalLM.from_pretrained(folder).double() for version, folder in folders.items()}
    total, count = 0.0, 0
    for row in sampled.itertuples():
        prompt = tokenizer(row.prompt).input_ids
        whole = torch.tensor([[*prompt, *(ids[text] for text in row.token_texts)]])
        recorded = torch.tensor(row.token_policy_logp).double()
        for span in row.versions:
            with torch.no_grad():
                logp = models[span["policy"]](whole).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
            own = logp.gather(1, whole[0, len(prompt) :, None])[span["start"] : span["end"], 0]
            gap = (own - recorded[span["start"] : span["end"]]).abs()
            assert float(gap.max()) < GAP
            total, count = total + float(gap.sum()), count + gap.numel()
    assert count > STEPS * PROMPTS * RESPONSES
    return total / count
