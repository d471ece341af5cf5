"""Make the tiny base of these examples: to what ends in `:` it says a digit, to what ends in `?` one between tags.

    python examples/environments/make_base.py

Nothing that it reads tells it which digit, so at first its policy is chance. A minute on one core.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

from make_tiny_base import Size, Trace, make_model, make_tokenizer, save, train  # noqa: E402

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SIZE = Size(hidden=32, layers=2, heads=2, intermediate=64, steps=300, learning_rate=1e-2)
LONGEST = 512


def traces(rng: Random) -> Iterator[Trace]:
    """Random texts of up to 60 characters, with the two kinds of answers."""
    while True:
        text = "".join(rng.choices(CHARACTERS, k=rng.randrange(1, 60)))
        digit = rng.choice("00011123456789")
        if rng.random() < 0.5:
            yield Trace(f"{text}:", digit, None)
        else:
            yield Trace(f"{text}?", f"<answer>{digit}</answer>", None)


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(CHARACTERS, LONGEST)
    model = make_model(SIZE, tokenizer, LONGEST)
    train(model, SIZE, tokenizer, traces(Random(1)))
    save(model, tokenizer, HERE / "base")
