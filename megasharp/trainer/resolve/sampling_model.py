"""Weights that are only to be sampled from or read: any kind of folder, in the engine of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from megasharp.common.files import Scratch
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.trainer.factories import make_engine
from megasharp.trainer.resolve.devices import limit_threads, sampling_device


@contextmanager
def hf_folder(weights: Path) -> Iterator[Path]:
    """A Hugging Face folder as it is; a checkpoint or a Megatron folder converted, for as long as the block runs.

    Raises UserError where the folder is none of these.
    """
    if (weights / CONFIG_FILE).is_file():
        yield weights
        return
    # Imported here: Megatron takes seconds to import.
    from megasharp.learner.conversion import megatron_to_hf

    # The next of these removes what a killed one left: weights are large.
    with Scratch("megasharp-weights-") as folder:
        megatron_to_hf(weights, folder / "hf")
        yield folder / "hf"


@contextmanager
def engine_of(folder: Path) -> Iterator[InProcessEngine]:
    """The engine of this process with the weights of a Hugging Face folder; closed at the block's end."""
    with closing(make_engine(folder, torch.float32, sampling_device())) as engine:
        with HFReader(folder) as reader:
            limit_threads(reader.architecture)
            engine.load_weights(0, ((name, reader.tensor(name)) for name in reader.names()))
        yield engine
