"""A converted folder loads at any TP x PP, whatever layout its conversion was told of, and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import LAYOUTS, save_model
from safetensors import safe_open
from torch import Tensor

from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import HFReader
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.parallel import destroy, initialize, megatron_device
from megasharp.learner.sharded_state import load_model
from megasharp.learner.weights import global_parameters, load_hf

LOADED_AT = {2: ("tp2", "pp2"), 4: ("tp2pp2",)}
# (model, tp, pp): the other families' tables are in test_hf_parity, what is asked here is the checkpoint's cut.
CONVERSIONS = (("qwen3-tied", 1, 1), ("qwen3", 2, 2), ("qwen2", 2, 1), ("olmo2", 2, 2))
HINTED = "qwen3-2-2"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


def loaded_parameters(rank: int, world: int, pairs: list[tuple[Path, Path]]) -> int:
    """Every parameter of the Megatron folder equals the one filled from the other folder; returns their number."""
    compared = 0
    for source, converted in pairs:
        for layout_name in LOADED_AT[world]:
            compared += compare_at(layout_name, source, converted)
    return compared


def compare_at(layout_name: str, source: Path, converted: Path) -> int:
    layout = LAYOUTS[layout_name]
    with megatron_device(torch.device("cpu")), HFReader(source) as reader:
        place = initialize(layout, seed=0)
        try:
            config = transformer_config(reader.architecture, layout, torch.float32, PolicyConfig(), {})
            expected, found = (build_chunks(config, reader.architecture, place) for _ in range(2))
            with torch.no_grad():
                for _, parameter in global_parameters(found):
                    parameter.fill_(float("nan"))
            load_hf(expected, reader, reader.family, reader.architecture, place)
            load_model(converted / "policy", found)
            present = dict(global_parameters(found))
            for name, parameter in global_parameters(expected):
                assert torch.equal(parameter, present[name]), f"{converted} {name} at {layout_name}"
            return len(present)
        finally:
            destroy()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Each tiny model's Hugging Face folder, and the Megatron folders made of it."""
    root = tmp_path_factory.mktemp("converted")
    pairs = []
    for name, tp, pp in CONVERSIONS:
        source, target = Path(save_model(root / "hf", name)), root / f"{name}-{tp}-{pp}"
        hf_to_megatron(source, target, tp=tp, pp=pp)
        pairs.append((source, target))
    return pairs


# Four ranks cut both ways.
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long("ranks")), 4])
def test_loads_at_any_layout(converted: list[tuple[Path, Path]], world: int) -> None:
    compared = run_ranks(world, loaded_parameters, converted)
    assert min(compared) > 10 * len(converted)


def tensors(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_comes_back_bit_for_bit(converted: list[tuple[Path, Path]], tmp_path: Path) -> None:
    for number, (source, folder) in enumerate(converted):
        megatron_to_hf(folder, tmp_path / str(number))
        there, back = tensors(source), tensors(tmp_path / str(number))
        assert there.keys() == back.keys()
        for name, tensor in there.items():
            assert tensor.dtype == back[name].dtype and torch.equal(tensor, back[name]), f"{folder}: {name}"


def test_hinted_layouts_ranks_find_their_part_in_pieces_of_its_own(converted: list[tuple[Path, Path]]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    hinted = next(folder for _, folder in converted if folder.name == HINTED)
    metadata = FileSystemReader(hinted / "policy").read_metadata()
    qkv = metadata.state_dict_metadata[QKV]
    layers, rows, _ = qkv.size
    assert sorted(tuple(chunk.offsets[:2]) for chunk in qkv.chunks) == [
        (layer, start) for layer in range(layers) for start in (0, rows // 2)
    ]
    file_of = {index.offset[0]: info.relative_path for index, info in metadata.storage_data.items() if index.fqn == QKV}
    assert [file_of[layer] for layer in range(layers)] == ["__0_0.distcp"] * 2 + ["__1_0.distcp"] * 2
