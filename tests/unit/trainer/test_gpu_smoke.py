"""The smoke test of a GPU, without one: its verdicts, its models, and what it says where the engines are missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import each_case

from megasharp.convert.hf_folder import HFReader
from megasharp.trainer import gpu_smoke
from megasharp.trainer.resolve.engine_python import EnginePython

GOOD = {
    "policy/loss": 0.1,
    "policy/grad_norm": 1.0,
    "policy/engine_gap": 0.01,
    "memory/cross_entropy": 2.0,
    "memory/calibration_kl": 0.1,
    "reward/mean": 0.5,
    "time/step": 1.0,
}


@each_case(
    ("changed", "told"),
    [
        ({}, ""),
        ({"policy/loss": math.nan}, "policy/loss is not a finite number"),
        ({"memory/calibration_kl": None}, "memory/calibration_kl is not a finite number"),
        ({"policy/grad_norm": 0.0}, "a network without a gradient"),
        ({"policy/engine_gap": 1.0}, "log-probs are 1 nats off"),
    ],
)
def test_verdicts(changed: dict[str, float], told: str) -> None:
    config, rows = SimpleNamespace(name="learner"), [GOOD, {**GOOD, **changed}]
    if told:
        with pytest.raises(gpu_smoke._Failed, match=told):
            gpu_smoke._judged(Path(), config, rows, steps=2)  # type: ignore[arg-type]
    else:
        assert "2 steps, rewards 0.50 0.50" in gpu_smoke._judged(Path(), config, rows, steps=2)  # type: ignore[arg-type]


def test_models_are_whole_and_missing_engines_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = EnginePython(Path(sys.executable), "the trainer's own")
    monkeypatch.setattr(gpu_smoke, "engine_python", lambda config: own)
    monkeypatch.setattr(gpu_smoke, "find_spec", lambda name: None)
    (outcome,) = gpu_smoke.smoke(tmp_path / "smoke", "cuda", ("engines",))
    assert outcome.how == "note" and outcome.text.startswith("not tried: no engines' Python was found")
    for name in ("policy", "memory"):
        reader = HFReader(tmp_path / "smoke" / name)
        assert reader.architecture.head_dim == 128
        assert reader.config.dtype == torch.bfloat16
        reader.close()
