"""Shared handles: what is pickled, and that another process's view of it is the same memory."""

from __future__ import annotations

import base64
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megasharp.serving.bucket import Header, Stamp, checksum, flattened, parse_header, unflattened
from megasharp.sync.handles import handle_of

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.full((5,), 2.0, dtype=torch.bfloat16)),
]
# Of the names that SGLang's own unpickler allows, those that a handle of a CPU tensor needs.
ALLOWED = {
    "torch ByteTensor",
    "torch Tensor",
    "torch Size",
    "torch.multiprocessing.reductions rebuild_tensor",
    "torch.multiprocessing.reductions rebuild_typed_storage",
    "torch.multiprocessing.reductions rebuild_storage_filename",
    "torch.storage TypedStorage",
    "torch.storage UntypedStorage",
    "torch uint8",
}
READER = """
import base64, pickle, sys
from megasharp.serving.bucket import checksum, parse_header, unflattened
(_, text), (_, flat) = pickle.loads(base64.b64decode(sys.stdin.read()))
for name, tensor in unflattened(parse_header(bytes(text.tolist())).tensors, flat):
    print(name, checksum(tensor))
"""


@pytest.fixture
def payload() -> Iterator[str]:
    """Its tensor lives as long as the test, as a sender's does until the engine has answered."""
    entries, flat = flattened(TENSORS)
    yield handle_of(Header(Stamp(3, None, "ab"), entries), flat)


class Recorder(pickle.Unpickler):
    """Notes every name that it is asked for."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add(f"{module} {name}")
        return super().find_class(module, name)


def test_only_allowed_names_are_pickled(payload: str) -> None:
    recorder = Recorder(base64.b64decode(payload))
    recorder.load()
    assert "torch.multiprocessing.reductions rebuild_storage_filename" in recorder.names
    assert recorder.names <= ALLOWED, recorder.names - ALLOWED


def test_another_process_reads_the_same_bytes(payload: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READER], input=payload, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {checksum(tensor)}" for name, tensor in TENSORS]


def test_the_header_goes_with_it(payload: str) -> None:
    (kind, text), (second, flat) = pickle.loads(base64.b64decode(payload))
    assert (kind, second) == ("header", "flat")
    header = parse_header(bytes(text.tolist()))
    assert header.stamp == Stamp(3, None, "ab")
    assert all(
        torch.equal(got, sent) for (_, got), (_, sent) in zip(unflattened(header.tensors, flat), TENSORS, strict=True)
    )
