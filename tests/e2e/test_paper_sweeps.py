"""The papers' sweeps, as a lab starts them: every case for two steps on a stand-in of its model, then the table."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from chat_models import write_tokenizer
from quickstart import REPOSITORY, Command
from waiting import HANG_S

from megasharp.config.run_config import run_of
from megasharp.reporting.sweeps.grid import cells, load_sweep
from tests.unit.families import new_model

ROWS = REPOSITORY / "tests" / "unit" / "tasks" / "data" / "files" / "sets"
# Files in the sets' own schemas, of the suites that have another's.
SAME_SCHEMA = {"lighteval_math": "math_train", "gsm8k_test": "gsm8k"}
# Of each paper's sweep: the family of the stand-in, that of its tokenizer, and rows of the set that it trains on.
STAND_INS = {
    "paper_iac": ("qwen3", "qwen", "deepscaler.jsonl"),
    "paper_ds": ("mistral", "llama", "dapo_en_math12k"),
    "paper_casp": ("qwen2", "qwen", "math_train.jsonl"),
    "paper_two_stage": ("qwen2", "qwen", "math_train.jsonl"),
}
SMALL = (
    "seeds=[1]",
    "set.steps=2",
    "set.model.dtype=float32",
    "set.data.prompts_per_step=4",
    "set.data.max_prompt_tokens=900",
    "set.data.max_response_tokens=8",
    "set.recipe.soft_overlong={max_tokens: 8, cache_tokens: 2}",
    "set.eval.n=2",
    "set.eval.k=[1,2]",
    "set.eval.max_response_tokens=4",
    "results.k=[1,2]",
    f"set.reward.function={REPOSITORY / 'tests/support/parity_reward.py'}:judge",
)


def write_stand_in(folder: Path, family: str, tokenizer: str, seed: int) -> Path:
    """Write a tiny model of the family with random weights: two layers, two query heads to a key head."""
    import torch

    torch.manual_seed(seed)
    write_tokenizer(folder, tokenizer)
    special = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "tie_word_embeddings": False}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 1024}
    new_model(family, {**sizes, **settings, **special}, head_dim=8).save_pretrained(folder)
    return folder


def write_suites(folder: Path, names: set[str]) -> None:
    """Write suites of these names that read two rows of this repository's, found before those that ship."""
    (folder / "configs" / "task").mkdir(parents=True)
    for name in names:
        kind = re.sub(r"_128$", "", name)
        rows = next(ROWS.glob(f"{SAME_SCHEMA.get(kind, kind)}*"))
        suite = f"set: {kind}\npath: {rows}\nlimit: 2\n"
        (folder / "configs" / "task" / f"{name}.yaml").write_text(suite)


@pytest.mark.long("runs")
@pytest.mark.timeout(4 * HANG_S)
@pytest.mark.parametrize("name", STAND_INS)
def test_every_case_trains_two_steps_and_is_in_the_table(name: str, command: Command, tmp_path: Path) -> None:
    file = REPOSITORY / "configs" / "sweep" / f"{name}.yaml"
    found = {cell.row: run_of(cell.tree, file) for cell in cells(load_sweep(file), file)}
    here = tmp_path / "here"
    write_suites(here, {suite for run in found.values() for suite in run.eval.suites})
    family, tokenizer, rows = STAND_INS[name]
    write_stand_in(here / "policy", family, tokenizer, seed=1)
    write_stand_in(here / "memory", family, tokenizer, seed=2)
    # In place of the node of GPUs.
    (here / "cpu.yaml").write_text("policy: {device: cpu}\nlog: {tensorboard: false}\n")
    data = [f"set.model.path={here / 'policy'}", "set.recipe.dlc.memory.path=memory", f"set.data.path={ROWS / rows}"]
    arguments = ["sweep", str(file), f"run={here / 'cpu.yaml'}", *SMALL, *data, "--runs", str(command.runs)]

    listed = command.run(*arguments, "--dry-run", folder=here)
    assert listed.splitlines() == [f"{row}_s1: to do" for row in found]
    # Up to twelve runs of some 7 s of CPU.
    command.run(*arguments, "--at-once", "2", folder=here, timeout_s=3 * HANG_S)
    for row in found:
        steps = command.rows(f"{name}/{row}_s1")
        assert len(steps) == 2
        assert all(math.isfinite(step["policy/loss"]) for step in steps), row
        assert any(step["policy/grad_norm"] > 0.0 for step in steps), row
    text = command.run(*arguments, "--results", folder=here)
    assert "Partial" not in text
    assert re.findall(r"^\| `(\w+)` \| 1 \|", text, re.MULTILINE) == ["base", *found]
