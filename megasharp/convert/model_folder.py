"""What a model can be loaded from: a Hugging Face folder, or Megatron weights with what describes their model.

`convert hf-to-megatron` makes folders of the second kind, and every checkpoint of a run is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.convert.weight_files import CONFIG_FILE


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`path` as it was named; `is_megatron` where its weights are torch_dist shards."""

    path: Path
    is_megatron: bool

    @property
    def description(self) -> Path:
        """Where config.json and the tokenizer lie."""
        return self.path / "hf" if self.is_megatron else self.path

    @property
    def weights(self) -> Path:
        """Where the weights lie."""
        return self.path / "policy" if self.is_megatron else self.path


def model_folder(path: Path) -> ModelFolder:
    """Which of both a folder is; one of neither kind counts as Hugging Face's, whose reader says what it is instead."""
    parts = any((path / part).is_dir() for part in ("policy", "hf"))
    return ModelFolder(path, is_megatron=parts and not (path / CONFIG_FILE).is_file())
