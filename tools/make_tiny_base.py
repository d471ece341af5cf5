"""Make small base models: a tokenizer of characters and a Qwen3 trained on one task, as HF folders.

A trace is a prompt, a solution (of Countdown a random expression that reaches its target), and the end token; the loss
is on the response only. The result is weak at one try and rich in many, which is where reinforcement learning has
something to sharpen, and something to lose. Problems of the data files given with `--held-out` are never
trained on. Deterministic in `--seed` for one machine and thread count.

    cd examples/quickstart
    python ../../tools/make_tiny_base.py --size base --out base --held-out data/dev.jsonl data/test.jsonl
    python ../../tools/make_tiny_base.py --size memory --out memory --held-out data/dev.jsonl data/test.jsonl

`--task` is `countdown` unless given; `knights_short` is Knights and Knaves of three people, `maze` walks through mazes,
and `calculator` solves Countdown with a calculator at hand.
"""

from __future__ import annotations

import argparse
import asyncio
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

from megasharp.tasks import countdown, knights, knights_short, maze
from megasharp.tasks.knights_short import signs
from megasharp.tasks.tools.calculator import Calculator
from megasharp.tasks.tools.calls import SHORT_ANSWER, SHORT_CALL, SHORT_END
from megasharp.tasks.tools.tool_environment import ToolEnvironment

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
COUNTDOWN_CHARACTERS = "0123456789+-*/()=: "
KNIGHTS_CHARACTERS = "01234567" + "".join(knights_short.SIGNS.values()) + ",:"
MAZE_CHARACTERS = "0123:!/.#SGudlr"
THREE_NUMBER_SHARE = 0.2
IGNORED = -100


@dataclass(frozen=True)
class Trace:
    """A solved problem. `key` is what makes two problems the same.

    `turns` are what the model says and what its environment answers, where it is asked more than once.
    """

    prompt: str
    response: str
    key: object
    turns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Task:
    """What a model learns: its characters, random solved problems, and the keys of a data file's."""

    characters: str
    make: Callable[[Random], Trace]
    keys: Callable[[Path], set[object]]
    positions: int = 64


def countdown_trace(rng: Random) -> Trace:
    """A problem of four numbers, or in a fifth of the cases of three, with the solution that it was made from."""
    problem = countdown.make_problem(rng, 3 if rng.random() < THREE_NUMBER_SHARE else 4)
    return Trace(countdown.prompt_text(problem.numbers, problem.target), problem.solution, problem.key)


def countdown_keys(path: Path) -> set[object]:
    """Numbers in ascending order and target of each problem."""
    return {(tuple(sorted(record.numbers)), record.target) for record in countdown.read_records(path)}


def calculator_trace(rng: Random) -> Trace:
    """A problem of Countdown that is solved at once, or after one to three guesses that the calculator has worked out.

    A guess is a solution in four of ten cases, and then the answer too.
    """
    problem = countdown.make_problem(rng, 3 if rng.random() < THREE_NUMBER_SHARE else 4)
    calculator = ToolEnvironment([Calculator()], "short", calls=1, characters=100)
    turns, answer = [], problem.solution
    for _ in range(rng.randrange(4)):
        right = rng.random() < 0.4
        guess = (
            problem.solution
            if right
            else countdown.random_expression(rng, rng.sample(problem.numbers, len(problem.numbers)))[0]
        )
        worked_out = asyncio.run(calculator.step(SHORT_CALL + guess)).text
        turns.append((SHORT_CALL + guess, worked_out))
        if worked_out == f"{SHORT_ANSWER}{problem.target}{SHORT_END}":
            answer = guess
            break
    turns.append((answer, ""))
    return Trace(countdown.prompt_text(problem.numbers, problem.target), "", problem.key, tuple(turns))


def knights_trace(rng: Random) -> Trace:
    """A puzzle of three people."""
    puzzle = knights.make_puzzle(rng, 3)
    return Trace(knights_short.prompt_text(puzzle), signs(puzzle.solution), puzzle.statements)


def knights_keys(path: Path) -> set[object]:
    """What the people of each puzzle say."""
    return {record.puzzle.statements for record in knights.read_records(path)}


def maze_trace(rng: Random) -> Trace:
    """A walk through a maze in turns of one move or two, of which two in three lead towards the goal."""
    found = maze.make_maze(rng)
    walk, turns = maze.Walk(), []
    asyncio.run(walk.reset({"maze": found.text}))
    done = False
    while not done:
        said, square = "", walk.square
        for _ in range(rng.choice((1, 1, 2))):
            said += maze_move(found, square, rng)
            square = found.step(square, said[-1]) or square
            if square == found.find(maze.GOAL):
                break
        answer = asyncio.run(walk.step(said))
        turns.append((said, answer.text))
        done = answer.done
    return Trace(found.text + maze.END, "", found.text, tuple(turns))


def maze_move(found: maze.Maze, square: maze.Square, rng: Random) -> str:
    """A random move, or one of a shortest way."""
    if rng.random() < 1 / 3:
        return rng.choice([*maze.MOVES])
    ways = maze.ways_to_goal(found)
    left = ways[square][0] - 1
    return rng.choice([m for m in maze.MOVES if (at := found.step(square, m)) is not None and ways[at][0] == left])


def maze_keys(path: Path) -> set[object]:
    """The grid of each maze."""
    return {found.text for _, found in maze.read_mazes(path)}


TASKS = {
    "calculator": Task(COUNTDOWN_CHARACTERS + "?!", calculator_trace, countdown_keys, positions=256),
    "maze": Task(MAZE_CHARACTERS, maze_trace, maze_keys),
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


def make_tokenizer(characters: str, positions: int) -> PreTrainedTokenizerFast:
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
        model_max_length=positions,
    )


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast, positions: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def begin_from(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Take the weights of a smaller task's model, whose characters are the first of this one's."""
    known = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        tensor[: len(known[name])] = known[name]


def traces(rng: Random, task: Task, held_out: set[object]) -> Iterator[Trace]:
    """Solved problems without end, none of them held out."""
    while True:
        trace = task.make(rng)
        if trace.key not in held_out:
            yield trace


def collate(some: list[Trace], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids [B, L], padded on the right, and labels [B, L] that ignore prompt and padding."""
    rows: list[list[tuple[int, bool]]] = []
    for trace in some:
        parts = [(trace.prompt, False)]
        for said, answer in trace.turns or ((trace.response, ""),):
            parts += [(said, True), (answer, False)]
        row = []
        for text, learned in parts:
            row += [(token, learned) for token in tokenizer.encode(text)]
            row += [(tokenizer.eos_token_id, True)] if learned else []
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for place, row in enumerate(rows):
        tokens, learned_T = torch.tensor([token for token, _ in row]), torch.tensor([learned for _, learned in row])
        ids[place, : len(row)] = tokens
        labels[place, : len(row)] = torch.where(learned_T, tokens, IGNORED)
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
    parser.add_argument("--begin", type=Path, help="folder of a model to begin with, of the same size")
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the size's own")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    size = SIZES[arguments.size]
    if arguments.steps:
        size = replace(size, steps=arguments.steps)
    task = TASKS[arguments.task]
    held_out = {key for path in arguments.held_out for key in task.keys(path)}
    tokenizer = make_tokenizer(task.characters, task.positions)
    model = make_model(size, tokenizer, task.positions)
    print(f"{arguments.size}: {sum(p.numel() for p in model.parameters())} parameters")
    if arguments.begin:
        begin_from(model, arguments.begin)
    train(model, size, tokenizer, traces(Random(arguments.seed), task, held_out))
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
