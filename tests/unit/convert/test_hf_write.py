"""Writing a checkpoint folder: transformers loads it unchanged, and a failure leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.hf_write import write_hf_folder


def weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with HFReader(folder) as reader:
        for name in reader.names():
            yield name, reader.tensor(name)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@each_case("limit", [5 * 1024**3, 4000])
@each_case("tied", [True, False])
@each_case("family", ["qwen3", "qwen2", "olmo2"])
def test_transformers_loads_the_same_model(save_model, make_model, family: str, tied: bool, limit: int) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(family, tie_word_embeddings=tied)
    target = source.parent / "new" / "copy"
    write_hf_folder(target, source, weights(source), max_shard_bytes=limit)
    assert (target / "model.safetensors").exists() == (limit > 4000)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    expected = make_model(family, tie_word_embeddings=tied).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert [path.name for path in target.parent.iterdir()] == ["copy"]


def test_shards_are_bounded_and_written_as_the_stream_goes(save_model) -> None:
    source = save_model()
    target = source.parent / "copy"
    seen: list[int] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for pair in weights(source):
            seen.append(len(list(source.parent.glob(".copy.partial-*/*.safetensors"))))
            yield pair

    write_hf_folder(target, source, watched(), max_shard_bytes=8000)
    files = sorted(target.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert seen[-1] >= len(files) - 2
    assert seen[0] == 1
    assert all(path.stat().st_size - data_start(path) <= 8000 for path in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in weights(source))


def test_reused_and_strided_memory_is_copied(save_model) -> None:
    source = save_model()
    target = source.parent / "copy"
    buffer = torch.empty(53 * 32)

    def reusing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(source):
            view = buffer[: tensor.numel()].view(tensor.shape[::-1]).t() if tensor.ndim == 2 else tensor
            yield name, view.copy_(tensor) if tensor.ndim == 2 else view

    write_hf_folder(target, source, reusing())
    with HFReader(target) as reader:
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in weights(source))


def test_tokenizer_and_templates_are_carried_over_and_nothing_else(save_model) -> None:
    source = save_model()
    carried = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "vocab.json"]
    for name in [*carried, "optimizer.pt", "notes.txt"]:
        (source / name).write_text(f"content of {name}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("tool")
    target = source.parent / "copy"
    write_hf_folder(target, source, weights(source))
    expected = [
        *carried,
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert sorted(path.name for path in target.iterdir()) == sorted(expected)
    assert all((target / name).read_text() == f"content of {name}" for name in carried)
    assert (target / "additional_chat_templates" / "tool.jinja").read_text() == "tool"
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    ordinary = (target / "config.json").stat().st_mode
    assert (target / "model.safetensors").stat().st_mode == ordinary


def test_a_file_of_the_source_that_cannot_be_read_is_named(save_model) -> None:
    source = save_model()
    tokenizer = source / "tokenizer.json"
    # This process's memory: a file that opens, but begins with what cannot be read; then one that is not there.
    for link, reason in (("/proc/self/mem", "Input/output error"), ("/nowhere", "No such file or directory")):
        tokenizer.symlink_to(link)
        with pytest.raises(UserError) as caught:
            write_hf_folder(source.parent / "copy", source, weights(source))
        assert str(caught.value).startswith(f"{tokenizer} cannot be read: {reason}: ")
        assert str(caught.value).endswith("complete the download or remove it")
        tokenizer.unlink()
        assert [path.name for path in source.parent.iterdir()] == ["model"]


def test_config_names_the_dtype_that_was_written(save_model) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(dtype="bfloat16")
    path = source / "config.json"
    path.write_text(path.read_text().replace('"dtype"', '"torch_dtype"'))
    target = source.parent / "copy"
    write_hf_folder(target, source, ((name, tensor.double() / 3) for name, tensor in weights(source)))
    written = json.loads((target / "config.json").read_text())
    assert written["dtype"] == "float64"
    assert "torch_dtype" not in written
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(loaded[name], tensor.double() / 3) for name, tensor in weights(source))


def test_existing_target_is_refused_and_untouched(save_model) -> None:
    source = save_model()
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(UserError, match="already exists"):
        write_hf_folder(source, source, weights(source))
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_link_to_nowhere_has_the_name_already(save_model) -> None:
    source = save_model()
    (source.parent / "copy").symlink_to("nowhere")
    with pytest.raises(UserError, match="copy already exists: remove it"):
        write_hf_folder(source.parent / "copy", source, weights(source))


def test_of_two_that_write_one_folder_the_first_stays(save_model) -> None:
    source = save_model()
    target = source.parent / "copy"

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights(source)):
            if number == 7:
                write_hf_folder(target, source, ((name, tensor + 1) for name, tensor in weights(source)))
            yield pair

    with pytest.raises(UserError) as caught:
        write_hf_folder(target, source, interrupted())
    assert str(caught.value) == f"{target} was made by another process in the meantime: it stays, this one goes"
    with HFReader(target) as reader:
        assert all(torch.equal(reader.tensor(name), tensor + 1) for name, tensor in weights(source))
    assert sorted(path.name for path in source.parent.iterdir()) == ["copy", "model"]


def test_a_failing_stream_leaves_nothing(save_model) -> None:
    source = save_model()

    def failing() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights(source)):
            if number == 7:
                raise RuntimeError("rank died")
            yield pair

    with pytest.raises(RuntimeError, match="rank died"):
        write_hf_folder(source.parent / "copy", source, failing(), max_shard_bytes=4000)
    assert [path.name for path in source.parent.iterdir()] == ["model"]


def test_an_incomplete_stream_leaves_nothing(save_model) -> None:
    source = save_model()
    with pytest.raises(AssertionError, match="not written"):
        write_hf_folder(source.parent / "copy", source, list(weights(source))[:-1])
    assert [path.name for path in source.parent.iterdir()] == ["model"]


def test_a_file_the_disk_cannot_hold_is_one_line(save_model) -> None:
    source = save_model()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            write_hf_folder(source.parent / "copy", source, weights(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"no space left for {source.parent / 'copy'}")
    assert "\n" not in str(caught.value)
    assert [path.name for path in source.parent.iterdir()] == ["model"]


@each_case(("number", "start"), [(errno.ENOSPC, "no space left for {}"), (errno.EIO, "{} cannot be written")])
def test_an_error_at_the_last_flush_leaves_nothing(
    save_model, monkeypatch: pytest.MonkeyPatch, number: int, start: str
) -> None:
    source = save_model()
    target = source.parent / "copy"

    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        write_hf_folder(target, source, weights(source))
    assert str(caught.value).startswith(start.format(target))
    assert [path.name for path in source.parent.iterdir()] == ["model"]
