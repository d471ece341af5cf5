"""What each rank is told about the learners of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.config.policy import LoraConfig
from megasharp.config.run_config import load_run
from megasharp.trainer.factories import learner_settings
from megasharp.trainer.resolve.resolved_run import check

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml"


def test_adapters_are_the_policys_and_the_memory_network_is_trained_whole() -> None:
    lora = "policy.lora={rank: 4, alpha: 2.0, targets: [fc1, qkv]}"
    asked = ["recipe.methods=[grpo,dlc]", lora]
    with pytest.raises(UserError, match=r"recipe.dlc.memory.lr=10x is a multiple of policy.optimizer.lr, which with"):
        check(load_run(QUICKSTART, asked), "run.yaml")
    both = learner_settings(check(load_run(QUICKSTART, [*asked, "recipe.dlc.memory.lr=1e-3"]), "run.yaml"))
    assert both["policy"].policy.lora == LoraConfig(rank=4, alpha=2.0, targets=["fc1", "qkv"])
    assert both["memory"].policy.lora is None


def test_the_memory_network_learns_at_temperature_1_in_one_step_per_training_step_within_its_window() -> None:
    overrides = ["recipe.methods=[grpo,dlc]", "rollout.temperature=0.7", "recipe.mini_batches=2", "steps=30"]
    overrides.append("recipe.dlc.window=8")
    both = learner_settings(check(load_run(QUICKSTART, overrides), "run.yaml"))
    assert (both["policy"].temperature, both["memory"].temperature) == (0.7, 1.0)
    assert (both["policy"].total_steps, both["memory"].total_steps) == (60, 30)
    assert (both["policy"].response_window, both["memory"].response_window) == (None, 8)


def test_a_memory_network_with_windows_of_its_own_takes_no_other(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    shutil.copytree(QUICKSTART.parent / "memory", memory)
    tree = json.loads((memory / "config.json").read_text())
    tree |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
    (memory / "config.json").write_text(json.dumps(tree))
    run = load_run(QUICKSTART, ["recipe.methods=[grpo,dlc]", f"recipe.dlc={{window: 8, memory: {{path: {memory}}}}}"])
    with pytest.raises(UserError, match=r"run.yaml: recipe.dlc.window=8: layers of .* windows of their own \(16 pos"):
        check(run, "run.yaml")


def test_the_memory_networks_schedule_is_its_own() -> None:
    """The quickstart's policy warms up for 10 steps and decays; a frozen step is none of the schedule's."""
    keys = "{path: examples/quickstart/memory, steps: 3, freeze_until: 5, warmup_steps: 4, start: cold}"
    for memory, found in (("{}", (0, "constant", 30, False)), (keys, (4, "constant", 75, True))):
        overrides = [
            "recipe.methods=[grpo,dlc]",
            "data.path=examples/quickstart/data/dev.jsonl",
            "steps=30",
            f"recipe.dlc.memory={memory}",
        ]
        own = learner_settings(check(load_run(QUICKSTART, overrides), "run.yaml"))["memory"]
        assert (own.policy.optimizer.warmup_steps, own.policy.optimizer.decay, own.total_steps, own.cold) == found
        assert own.policy.optimizer.lr == pytest.approx(2e-3)
