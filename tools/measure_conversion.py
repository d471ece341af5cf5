"""Peak memory of converting a large model there and back: makes a random checkpoint, converts it, prints the figures.

    python tools/measure_conversion.py --gigabytes 6
    python tools/measure_conversion.py --gigabytes 4 --single-file

Each conversion is a process of its own; its peak is VmHWM (resident memory, mapped pages of files included). The
program fails when a peak is not below a quarter of the weights plus 2 GB, or when the weights do not come back bit for
bit. It needs three times the weights' size on the disk below --folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import HFReader, expected_hf_shapes, read_config
from megasharp.convert.hf_write import write_hf_folder
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.convert.record import read_record

GB = 10**9
# Qwen2.5-3B's widths; the number of layers makes the size.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_RUN = """
import sys
from pathlib import Path
from megasharp.learner import conversion
getattr(conversion, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def main() -> int:
    """Make, convert, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="about the size of the weights (10^9 bytes)")
    parser.add_argument("--single-file", action="store_true", help="all weights in one file instead of files of 1 GB")
    parser.add_argument("--folder", type=Path, default=None, help="where the folders are made; removed at the end")
    arguments = parser.parse_args()
    smallest = smallest_size()
    if arguments.gigabytes * GB < smallest:
        parser.error(f"--gigabytes {arguments.gigabytes:g}: a model of one layer is {smallest / GB:.2f}, give no less")
    with tempfile.TemporaryDirectory(prefix="measure-conversion-", dir=arguments.folder) as folder:
        return measure(Path(folder), arguments.gigabytes, arguments.single_file)


def measure(folder: Path, gigabytes: float, single_file: bool) -> int:
    """Convert there and back below `folder`; returns the exit code."""
    free = shutil.disk_usage(folder).free
    if free < 3.2 * gigabytes * GB:
        sys.stderr.write(f"{folder}: {free / GB:.1f} GB are free, {3.2 * gigabytes:.1f} are needed\n")
        return 2
    source, megatron, back = folder / "hf", folder / "megatron", folder / "back"
    size = make_checkpoint(source, gigabytes, single_file)
    files = len(list(source.glob("*.safetensors")))
    limit = 0.25 * size + 2 * GB
    print(f"weights: {size / GB:.2f} GB bf16 in {files} file(s); limit 0.25 S + 2 GB = {limit / GB:.2f} GB", flush=True)
    failed = False
    for command, one, other in (("hf_to_megatron", source, megatron), ("megatron_to_hf", megatron, back)):
        peak, seconds = convert(command, one, other)
        failed |= peak >= limit
        print(f"{command}: peak RSS {peak / GB:.2f} GB, {seconds:.0f} s", flush=True)
    there, again = read_record(megatron), read_record(back)
    assert there is not None and again is not None
    same = there.weights_sha256 == again.weights_sha256
    print(f"the weights come back bit for bit: {'yes' if same else 'NO'}")
    return 1 if failed or not same else 0


def smallest_size() -> int:
    """Bytes of the weights of the model with one layer."""
    with tempfile.TemporaryDirectory() as folder:
        return 2 * described(Path(folder), 1).parameter_count()


def described(folder: Path, layers: int) -> Architecture:
    """Write the config.json of a model of so many layers."""
    (folder / CONFIG_FILE).write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return read_config(folder)[2]


def make_checkpoint(folder: Path, gigabytes: float, single_file: bool) -> int:
    """Write a random checkpoint of about that size; returns its weights' bytes."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        description = Path(name)
        one = described(description, 1).parameter_count()
        layer = described(description, 2).parameter_count() - one
        described(description, 1 + round((gigabytes * GB / 2 - one) / layer))
        write_hf_folder(folder, description, random_weights(description), 10**15 if single_file else GB)
    with HFReader(folder) as reader:
        return 2 * reader.architecture.parameter_count()


def random_weights(description: Path) -> Iterator[tuple[str, Tensor]]:
    """Random bf16 values for every tensor of the model that a folder describes."""
    _, family, arch = read_config(description)
    generator = torch.Generator().manual_seed(0)
    for name, shape in expected_hf_shapes(family, arch).items():
        yield name, torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


def convert(command: str, source: Path, target: Path) -> tuple[int, float]:
    """Peak resident bytes and seconds of one conversion."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _RUN, command, str(source), str(target)], check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1]) * 1024, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
