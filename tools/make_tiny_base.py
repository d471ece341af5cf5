"""Make small base models: a tokenizer of characters and a Qwen3 trained on one task, as HF folders.

A trace is a prompt, a solution (of Countdown a random expression that reaches its target), and the end token; the loss
is on the response only. The result is weak at one try and rich in many, which is where reinforcement learning has
something to sharpen, and something to lose. Problems of the data files given with `--held-out` are never
trained on. Deterministic in `--seed` for one machine and thread count.

    cd examples/quickstart
    python ../../tools/make_tiny_base.py --size base --out base --held-out data/dev.jsonl data/test.jsonl
    python ../../tools/make_tiny_base.py --size memory --out memory --held-out data/dev.jsonl data/test.jsonl

`--task` is `countdown` unless given; `knights_short` is Knights and Knaves of three people.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megasharp.tasks import countdown, knights, knights_short
from megasharp.tasks.knights_short import signs

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
COUNTDOWN_CHARACTERS = "0123456789+-*/()=: "
KNIGHTS_CHARACTERS = "01234567" + "".join(knights_short.SIGNS.values()) + ",:"
THREE_NUMBER_SHARE = 0.2
IGNORED = -100


@dataclass(frozen=True)
class Trace:
    """A solved problem. `key` is what makes two problems the same."""

    prompt: str
    response: str
    key: object


@dataclass(frozen=True)
class Task:
    """What a model learns: its characters, random solved problems, and the keys of a data file's."""

    characters: str
    make: Callable[[Random], Trace]
    keys: Callable[[Path], set[object]]


def countdown_trace(rng: Random) -> Trace:
    """A problem of four numbers, or in a fifth of the cases of three, with the solution that it was made from."""
    problem = countdown.make_problem(rng, 3 if rng.random() < THREE_NUMBER_SHARE else 4)
    return Trace(countdown.prompt_text(problem.numbers, problem.target), problem.solution, problem.key)


def countdown_keys(path: Path) -> set[object]:
    """Numbers in ascending order and target of each problem."""
    return {(tuple(sorted(record.numbers)), record.target) for record in countdown.read_records(path)}


def knights_trace(rng: Random) -> Trace:
    """A puzzle of three people."""
    puzzle = knights.make_puzzle(rng, 3)
    return Trace(knights_short.prompt_text(puzzle), signs(puzzle.solution), puzzle.statements)


def knights_keys(path: Path) -> set[object]:
    """What the people of each puzzle say."""
    return {record.puzzle.statements for record in knights.read_records(path)}


TASKS = {
    "countdown": Task(COUNTDOWN_CHARACTERS, countdown_trace, countdown_keys),
    "knights_short": Task(KNIGHTS_CHARACTERS, knights_trace, knights_keys),
}


@dataclass(frozen=True)
class Size:
    """The sizes that differ between the models; KV heads and head size are shared, so that caches can be."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    steps: int
    learning_rate: float


SIZES = {
    "base": Size(hidden=128, layers=4, heads=4, intermediate=256, steps=450, learning_rate=3e-3),
    "memory": Size(hidden=64, layers=2, heads=2, intermediate=192, steps=1000, learning_rate=3e-3),
}
KV_HEADS, HEAD_DIM, BATCH, WARMUP = 2, 32, 256, 50


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character; an even vocabulary, so that it splits over two ranks."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def traces(rng: Random, task: Task, held_out: set[object]) -> Iterator[Trace]:
    """Solved problems without end, none of them held out."""
    while True:
        trace = task.make(rng)
        if trace.key not in held_out:
            yield trace


def collate(some: list[Trace], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids [B, L], padded on the right, and labels [B, L] that ignore prompt and padding."""
    rows: list[tuple[list[int], int]] = []
    for trace in some:
        prompt = tokenizer.encode(trace.prompt)
        rows.append((prompt + tokenizer.encode(trace.response) + [tokenizer.eos_token_id], len(prompt)))
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (tokens, prompt_length) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = ids[row, prompt_length : len(tokens)]
    return ids, labels


def learning_rate(step: int, size: Size) -> float:
    """Linear warm-up, then linear decay to a twentieth."""
    return size.learning_rate * min(1.0, (step + 1) / WARMUP) * max(0.05, 1 - step / size.steps)


def train(
    model: Qwen3ForCausalLM,
    size: Size,
    tokenizer: PreTrainedTokenizerFast,
    source: Iterator[Trace],
) -> None:
    """AdamW on cross-entropy of the responses; prints the loss as it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, weight_decay=0.01)
    started = time.monotonic()
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        ids, labels = collate([next(source) for _ in range(BATCH)], tokenizer)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == size.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


@torch.no_grad()
def fill_padding_row(model: Qwen3ForCausalLM, pad_token_id: int) -> None:
    """Give the padding token the mean embedding of the others.

    transformers keeps that row at zero, where the gradient of RMS normalisation is 1 / sqrt(eps), a thousandfold: a
    policy that once samples the token would lose a whole step to it.
    """
    rows = model.model.embed_tokens.weight
    others = torch.arange(len(rows)) != pad_token_id
    rows[pad_token_id] = rows[others].mean(dim=0)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a normal HF folder."""
    fill_padding_row(model, tokenizer.pad_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="countdown")
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="data files never to train on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the size's own")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    size = SIZES[arguments.size]
    if arguments.steps:
        size = replace(size, steps=arguments.steps)
    task = TASKS[arguments.task]
    held_out = {key for path in arguments.held_out for key in task.keys(path)}
    tokenizer = make_tokenizer(task.characters)
    model = make_model(size, tokenizer)
    print(f"{arguments.size}: {sum(p.numel() for p in model.parameters())} parameters")
    train(model, size, tokenizer, traces(Random(arguments.seed), task, held_out))
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
