"""Other weights under the same names have another fingerprint, wherever in a file they differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasharp.common.errors import UserError
from megasharp.convert.model_folder import model_folder
from megasharp.convert.record import weights_fingerprint

BASE = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "base"


def test_weights_that_were_trained_on_differ(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BASE, tmp_path / "model"))
    before = weights_fingerprint(model_folder(folder))
    assert before == weights_fingerprint(model_folder(BASE)) and len(before) == 64
    (folder / "notes.txt").write_text("what else lies there does not count")
    assert weights_fingerprint(model_folder(folder)) == before
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 1.001 for name, weight in weights.items()}, folder / "model.safetensors")
    assert weights_fingerprint(model_folder(folder)) != before


@pytest.mark.parametrize("place", [0, -1])
def test_a_large_files_first_and_last_bytes_count(tmp_path: Path, place: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2_000_000)}, file)
    before = weights_fingerprint(model_folder(tmp_path))
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(model_folder(tmp_path)) != before
    file.write_bytes(content + b"0")
    longer = weights_fingerprint(model_folder(tmp_path))
    file.rename(tmp_path / "model-00001.safetensors")
    assert len({before, longer, weights_fingerprint(model_folder(tmp_path))}) == 3


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone cannot be read"):
        weights_fingerprint(model_folder(tmp_path / "gone"))
