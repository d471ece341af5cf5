"""A run of mazes on real engines, with DLC and partial rollouts: its tokens held against mazes and an oracle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from example_runs import GAP, REPOSITORY, engine_leaders, finish, rows, running, wait_for, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from megasharp.tasks.maze import MOVES, Maze

pytestmark = pytest.mark.long("fleet-runs")

STEPS = 8
BASE = REPOSITORY / "examples/maze/base"
MAZES = (
    f"steps={STEPS}",
    "deterministic=false",
    "cluster.backend=local",
    f"model.path={BASE}",
    "policy.tp=1",
    "data={task: maze, path: examples/maze/data/train.jsonl, prompts_per_step: 4, responses_per_prompt: 8, "
    "max_prompt_tokens: 24, max_response_tokens: 34}",
    f"recipe.dlc={{mu: 0.2, memory: {{path: {BASE}}}}}",
    "rollout.max_staleness=2",
    "rollout.oversample=0.75",
    "checkpoint={every: 1, keep_last: 100, export_hf: true}",
)


def test_episodes_go_on_after_a_lost_engine_and_a_new_version(tmp_path: Path) -> None:
    """Turns are the mazes' own answers, and log-probs at the policy's tokens are those of the version that its span
    names."""
    with running(tmp_path, *MAZES) as process:
        wait_until(process, lambda: len(rows(tmp_path)) > 1)
        os.kill(engine_leaders(process)[1].pid, signal.SIGKILL)
        seen = wait_for(process, "engine 1 is back")
        output = seen + finish(process)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), output
    assert any(row["rollout/continued"] > 0 for row in found), "no response went over a step's end"
    assert all(row["reward/outcome_infra"] == 0 for row in found), output

    run = tmp_path / "fleet_on_cpu"
    sampled, tokens = (
        pd.concat([pd.read_parquet(table) for table in sorted((run / name).glob("*.parquet"))])
        for name in ("rollouts", "rollout_tokens")
    )
    sampled = sampled.merge(tokens, on=["step", "group_id", "index"])
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    ids = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    folders = {step: run / f"checkpoints/step_{step:06d}/hf_export" for step in range(1, STEPS)} | {0: BASE}
    models = {version: AutoModelForCausalLM.from_pretrained(folder).double() for version, folder in folders.items()}
    crossed = 0
    for row in sampled.itertuples():
        said = walked(row.prompt, [*row.token_texts])
        spans = [(span["policy"], span["start"], span["end"]) for span in row.versions]
        own = {place for _, start, end in spans for place in range(start, end)}
        assert own.isdisjoint(said) and own | said == set(range(len(row.token_texts)))
        crossed += len({version for version, *_ in spans}) > 1
        prompt = tokenizer(row.prompt).input_ids
        whole = torch.tensor([[*prompt, *(ids[text] for text in row.token_texts)]])
        recorded = torch.tensor(row.token_policy_logp).double()
        for version, start, end in spans:
            with torch.no_grad():
                logp = models[version](whole).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
            gap = (logp.gather(1, whole[0, len(prompt) :, None])[start:end, 0] - recorded[start:end]).abs()
            assert float(gap.max()) < GAP
    assert crossed, "no episode has tokens of two versions"


def walked(prompt: str, texts: list[str]) -> set[int]:
    """Walk the maze by the response's moves, checking each answer; return the places of the maze's tokens."""
    maze = Maze(prompt.rstrip(":"))
    square, said, place = maze.find("S"), set(), 0
    while place < len(texts):
        turn = place
        while place < len(texts) and texts[place] != "<eos>":
            place += 1
        # An untrained policy may say other special tokens, which are no part of the text.
        action = "".join(text for text in texts[turn:place] if not text.startswith("<"))
        place += 1
        blocked = not action or not set(action) <= MOVES.keys()
        for move in "" if blocked else action:
            following = maze.step(square, move)
            if blocked := following is None:
                break
            square = following or square
        answer = "".join(texts[place : place + 3])
        if answer:
            assert answer == f"{square[0]}{square[1]}{'!' if blocked else ':'}", (prompt, texts)
            said |= set(range(place, place + 3))
        place += 3
    return said
