"""A model's arguments beside its weights: written, read back, compared key by key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.convert.architecture import (
    ARGUMENTS_FILE,
    Architecture,
    Experts,
    check_arguments,
    model_arguments,
    read_arguments,
    record_arguments,
)
from megasharp.convert.hf_folder import read_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture
def arch(save_model) -> Architecture:
    _, _, found = read_config(save_model("mistral", sliding_window=8))
    return found


def test_what_is_written_is_read_back(arch: Architecture, tmp_path: Path) -> None:
    assert read_arguments(tmp_path) is None
    record_arguments(tmp_path, arch)
    recorded = read_arguments(tmp_path)
    assert recorded == model_arguments(arch)
    assert recorded["windows"] == [8, 8, 8] and recorded["num_key_value_heads"] == 2
    check_arguments(tmp_path / "config.json", arch, tmp_path, recorded)


def test_every_field_of_an_architecture_counts(arch: Architecture, tmp_path: Path) -> None:
    """But for the dtype, which is the weights' own matter, and the folder."""
    fields = {field.name for field in dataclasses.fields(arch)} - {"dtype", "folder"}
    recorded = model_arguments(arch)
    for name in fields - {"rope_parameters"}:
        value = getattr(arch, name)
        others = {"windows": (9, 9, 9), "family": "another", "experts": Experts(4, 2, 8, True)}
        other = others[name] if name in others else value + 1
        with pytest.raises(UserError, match="does not describe the weights in"):
            check_arguments(tmp_path, dataclasses.replace(arch, **{name: other}), tmp_path, recorded)


def test_a_record_of_a_version_without_a_switch_fits_a_model_without(save_model, tmp_path: Path) -> None:
    recorded = model_arguments(read_config(save_model("qwen3"))[2])
    assert recorded.keys().isdisjoint({"qk_norm_whole", "post_norm"})
    _, _, arch = read_config(save_model("olmo2"))
    for name in ("qk_norm_whole", "post_norm"):
        older = {key: value for key, value in model_arguments(arch).items() if key != name}
        check_arguments(tmp_path, dataclasses.replace(arch, **{name: False}), tmp_path, older)
        with pytest.raises(UserError, match=f": {name}=True, recorded None: restore"):
            check_arguments(tmp_path, arch, tmp_path, older)


def test_each_rope_setting_is_named(save_model, tmp_path: Path) -> None:
    _, _, arch = read_config(save_model("qwen3", rope_parameters=YARN))
    recorded = model_arguments(arch)
    scaling = tuple((key, 2.0 if key == "factor" else value) for key, value in arch.rope_parameters.scaling)
    rope = dataclasses.replace(arch.rope_parameters, scaling=scaling)
    with pytest.raises(UserError, match=r": rope_scaling.factor=2.0, recorded 4.0: restore"):
        check_arguments(tmp_path, dataclasses.replace(arch, rope_parameters=rope), tmp_path, recorded)


def test_a_record_of_a_version_without_windows_fits_a_model_without(save_model, tmp_path: Path) -> None:
    _, _, arch = read_config(save_model("qwen3"))
    older = {key: value for key, value in model_arguments(arch).items() if key != "windows"}
    check_arguments(tmp_path, arch, tmp_path, older)
    with pytest.raises(UserError, match=r"sliding_window, layer_types \(layers 0-2\)=4, recorded None"):
        check_arguments(tmp_path, dataclasses.replace(arch, windows=(4, 4, 4)), tmp_path, older)


@pytest.mark.parametrize("nothing", [[], None])
def test_no_windows_are_recorded_one_way_or_another(save_model, tmp_path: Path, nothing: list[None] | None) -> None:
    _, _, arch = read_config(save_model("qwen3"))
    recorded = {**model_arguments(arch), "windows": nothing}
    check_arguments(tmp_path, arch, tmp_path, recorded)
    with pytest.raises(UserError, match=r": sliding_window, layer_types \(layers 1\)=4, recorded None: restore"):
        check_arguments(tmp_path, dataclasses.replace(arch, windows=(None, 4, None)), tmp_path, recorded)


def test_windows_that_differ_are_told_by_their_sizes_and_layers(arch: Architecture, tmp_path: Path) -> None:
    recorded = {**model_arguments(arch), "windows": [8, 6, 6]}
    with pytest.raises(UserError, match=r": sliding_window \(layers 1-2\)=8, recorded 6: restore"):
        check_arguments(tmp_path, arch, tmp_path, recorded)
    other = dataclasses.replace(arch, windows=(None, 8, None))
    with pytest.raises(UserError, match=r": sliding_window, layer_types \(layers 0, 2\)=None, recorded 8: restore"):
        check_arguments(tmp_path, other, tmp_path, model_arguments(arch))


def test_windows_of_another_number_of_layers_are_told_by_that_number(arch: Architecture, tmp_path: Path) -> None:
    other = dataclasses.replace(arch, num_layers=2, windows=(8, 8))
    with pytest.raises(UserError, match=r": num_hidden_layers=2, recorded 3: restore"):
        check_arguments(tmp_path, other, tmp_path, model_arguments(arch))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_unreadable_record_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / ARGUMENTS_FILE).write_text(text)
    with pytest.raises(UserError) as caught:
        read_arguments(tmp_path)
    assert str(tmp_path / ARGUMENTS_FILE) in str(caught.value) and "\n" not in str(caught.value)
