"""Stand-ins for what the papers' sweeps need of the hub: tiny models, and rows in the schemas of their sets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from chat_models import write_tokenizer

from megasharp.config.run_config import run_of
from megasharp.reporting.sweeps.grid import cells, load_sweep
from tests.unit.families import new_model

REPOSITORY = Path(__file__).parents[2]
ROWS = REPOSITORY / "tests" / "unit" / "tasks" / "data" / "files" / "sets"
# Files in the sets' own schemas, of the suites that have another's.
_SAME_SCHEMA = {"lighteval_math": "math_train", "gsm8k_test": "gsm8k"}


@dataclass(frozen=True)
class StandIn:
    """A paper's sweep: the family of its model and of a tokenizer like the model's, the model's positions, its data."""

    family: str
    tokenizer: str
    positions: int
    rows: str


STAND_INS = {
    "paper_iac": StandIn("qwen3", "qwen", 40960, "deepscaler.jsonl"),
    "paper_ds": StandIn("mistral", "llama", 32768, "dapo_en_math12k"),
    "paper_casp": StandIn("qwen2", "qwen", 4096, "math_train.jsonl"),
    "paper_two_stage": StandIn("qwen2", "qwen", 4096, "math_train.jsonl"),
}

# Sweeps over one factor.
ABLATIONS = {
    "casp_table4": STAND_INS["paper_casp"],
    "iac_table5": STAND_INS["paper_iac"],
    "ds_ablations": StandIn("qwen2", "qwen", 32768, "countdown_3to4.jsonl"),
    "entropy_control": StandIn("qwen2", "qwen", 32768, "countdown_3to4.jsonl"),
}


def sweep_file(name: str) -> Path:
    """Return the sweep's file."""
    return REPOSITORY / "configs" / "sweep" / f"{name}.yaml"


def rows_of(name: str) -> list[str]:
    """Return the rows of the sweep's table, in its order."""
    file = sweep_file(name)
    return list(dict.fromkeys(cell.row for cell in cells(load_sweep(file), file)))


def prepare(name: str, here: Path) -> list[str]:
    """Write what the sweep needs into the folder `here`, to start it in; return the overrides that name it."""
    one, file = (STAND_INS | ABLATIONS)[name], sweep_file(name)
    runs = [run_of(cell.tree, file) for cell in cells(load_sweep(file), file)]
    _write_suites(here, {suite for run in runs for suite in run.eval.suites})
    for seed, network in enumerate(("policy", "memory")):
        _write_model(here / network, one, seed)
    networks = [f"set.model.path={here / 'policy'}", f"set.recipe.dlc.memory.path={here / 'memory'}"]
    return [*networks, f"set.data.path={ROWS / one.rows}"]


def _write_model(folder: Path, one: StandIn, seed: int) -> None:
    """Write a model with random weights: two layers, two query heads to a key head."""
    import torch

    torch.manual_seed(seed)
    write_tokenizer(folder, one.tokenizer)
    special = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "tie_word_embeddings": False}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": one.positions}
    new_model(one.family, {**sizes, **settings, **special}, head_dim=8).save_pretrained(folder)


def _write_suites(folder: Path, names: set[str]) -> None:
    """Write suites of these names that read two rows of this repository's, found before those that ship."""
    (folder / "configs" / "task").mkdir(parents=True)
    for name in names:
        # Countdown's test rows begin far behind those of the file here.
        kind = re.sub(r"_128$|(?<=3to4)_test$", "", name)
        rows = next(ROWS.glob(f"{_SAME_SCHEMA.get(kind, kind)}*"))
        (folder / "configs" / "task" / f"{name}.yaml").write_text(f"set: {kind}\npath: {rows}\nlimit: 2\n")
