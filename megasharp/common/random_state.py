"""Randomness of a process: generator states that are saved and restored bit for bit, and deterministic computation.

The states are Python's, NumPy's and torch's. Rollouts draw from none of them, and engines have no state to save: a
response's seed is a hash of (run seed, prompt, epoch, index), `rollout/step_request.py: response_seed`, and a token's
random number is a hash of that seed and the token's position. Training draws none either without dropout. The states
are saved for draws of a method, a verifier or a library.

With `deterministic: true` a process computes the same numbers from the same start, bit for bit. torch then takes
deterministic kernels, and raises where it has none. The backward of its flash attention, which otherwise adds up the
gradients of queries in the order in which tiles end, takes another algorithm (`_flash_attention_backward` in torch's
attention_backward.cu asks for this very setting; with `warn_only` it would only warn). Our own kernels have no atomic
additions. Megatron's `deterministic_mode` looks up rows of the embedding by indexing, whose gradient does not depend on
the order of additions. On a CPU a process computes on one thread (`trainer/resolve/devices.py`), because sums depend on
the number of threads.
"""

from __future__ import annotations

import base64
import os
import random

import numpy as np
import torch
from torch import Tensor

from megasharp.common.section import Section


class PythonState(Section):
    """State of `random`: the version of its format, 625 words, and the Gaussian number that was drawn ahead, if any."""

    version: int
    words: list[int]
    gauss: float | None


class NumpyState(Section):
    """State of `numpy.random`'s legacy functions: 624 words of the Mersenne Twister, the place, the Gaussian."""

    words: list[int]
    position: int
    has_gauss: int
    gauss: float


class GeneratorStates(Section):
    """States of one process; torch's are bytes in base64: the CPU's, each CUDA device's, those of libraries by name."""

    python: PythonState
    numpy: NumpyState
    torch_cpu: str
    torch_cuda: list[str] = []
    tracked: dict[str, str] = {}


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators of this process."""
    random.seed(seed)
    # NumPy takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> GeneratorStates:
    """Return the states of this process's generators."""
    version, words, gauss = random.getstate()
    _, numpy_words, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    # Asking would initialise CUDA in a process that uses no GPU, such as the driver.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return GeneratorStates(
        python=PythonState(version=version, words=list(words), gauss=gauss),
        numpy=NumpyState(
            words=[int(word) for word in numpy_words],
            position=int(position),
            has_gauss=int(has_gauss),
            gauss=float(numpy_gauss),
        ),
        torch_cpu=as_text(torch.get_rng_state()),
        torch_cuda=[as_text(state) for state in devices],
    )


def restore_generators(states: GeneratorStates) -> None:
    """Restore this process's generators; of CUDA devices those that both processes have."""
    python, numpy = states.python, states.numpy
    random.setstate((python.version, tuple(python.words), python.gauss))
    words = np.array(numpy.words, dtype=np.uint32)
    np.random.set_state(("MT19937", words, numpy.position, numpy.has_gauss, numpy.gauss))
    torch.set_rng_state(from_text(states.torch_cpu))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, text in enumerate(states.torch_cuda[:devices]):
        torch.cuda.set_rng_state(from_text(text), device)


def as_text(state: Tensor) -> str:
    """Return a generator's bytes (uint8) in base64."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def from_text(text: str) -> Tensor:
    """Return the bytes (uint8) that `as_text` wrote."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# Read by cuBLAS, NCCL and Transformer Engine when a process first uses them. With NCCL's own choice, which may be
# sums inside the switches (NVLS), the order of additions is not fixed; Megatron asks for one of the others too.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def compute_deterministically() -> None:
    """Make this process compute deterministically, before its first product on a GPU. Variables already set stay."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
