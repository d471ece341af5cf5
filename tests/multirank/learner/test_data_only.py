"""Nothing that is planted in a checkpoint is executed: each place of a pickle, through every reader of shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted import PLACES, Command, plant
from torch.distributed.checkpoint.metadata import StorageMeta

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import read_config
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf
from megasharp.learner.meta_models import alone
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.sharded_state import load_model
from megasharp.learner.verification import transformers_outputs
from megasharp.tasks.tokenizer import load_tokenizer

STORED = Path(__file__).parents[2] / "stored" / "2026_11_24" / "megatron"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a stored Megatron folder."""
    return Path(shutil.copytree(STORED, tmp_path / "megatron"))


def convert(folder: Path) -> None:
    megatron_to_hf(folder, folder.parent / "converted")


def load(folder: Path) -> None:
    """As a rank starts from it, resumes from it and reads a reference."""
    _, _, arch = read_config(folder / "hf")
    with alone() as place:
        config = transformer_config(arch, ParallelLayout(), torch.float32, PolicyConfig(), {})
        config.use_cpu_initialization = True
        load_model(folder / "policy", build_chunks(config, arch, place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", [convert, load])
def test_what_is_planted_is_refused_in_one_line_and_not_executed(
    folder: Path, place: str, read: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By which torch would unpickle `common.pt` as it stands.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    made = folder.parent / "made"
    path, words = plant(folder / "policy", place, made)
    before = dict(vars(StorageMeta))
    if read is convert and place in ("common", "object"):
        # The conversion reads tensors alone.
        read(folder)
    else:
        with pytest.raises(UserError) as refused:
            read(folder)
        said = str(refused.value)
        # Of a tensor that Megatron reads the folder is known.
        where = path.parent if read is load and place == "tensor" else path
        assert said.startswith(f"{where}: ") and words in said and "\n" not in said
    assert not made.exists() and dict(vars(StorageMeta)) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_pickled_weights_of_a_hugging_face_folder_are_not_opened(tmp_path: Path, name: str) -> None:
    folder, made = Path(shutil.copytree(STORED.parent / "model", tmp_path / "model")), tmp_path / "made"
    (folder / "model.safetensors").unlink()
    torch.save({"planted": Command(made)}, folder / name)
    with pytest.raises(UserError, match="no safetensors weights in"):
        hf_to_megatron(folder, tmp_path / "converted")
    # Beside safetensors it is not asked for.
    shutil.copy(STORED.parent / "model" / "model.safetensors", folder)
    transformers_outputs(folder, [torch.tensor([1, 2])], torch.float32)
    assert not made.exists()


def test_a_tokenizer_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = Path(shutil.copytree(STORED.parent / "model", tmp_path / "model")), tmp_path / "made"
    # Whoever is asked for leave to run it says yes.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(f"open({str(made)!r}, 'w')\nclass Own:\n    pass\n")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    for name, keys in (("tokenizer_config.json", own), ("config.json", {"model_type": "own"})):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(UserError, match="cannot load its tokenizer"):
        load_tokenizer(folder)
    assert not made.exists()


def test_an_untouched_folder_is_read(folder: Path) -> None:
    convert(folder)
    load(folder)
