"""`megasharp data`: the table of data sets, a look at one, and what training shares with evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from megasharp.common.exit_codes import Say

if TYPE_CHECKING:
    from megasharp.tasks.judge import TaskItem
    from megasharp.tasks.sets.data_set import DataSet
    from megasharp.tasks.sets.load import Loaded
    from megasharp.tasks.tokenizer import TextTokenizer

data_app = typer.Typer(no_args_is_help=True, help="Look at data sets, and at what training shares with evaluation.")
# Tests of programs may be megabytes.
_SHOWN = 400
# Tokenizing a whole set takes minutes; a median does not need it.
_MEASURED = 1000


@data_app.command("list")
def list_command() -> None:
    """The data sets that runs and suites may name, and the prompt templates."""
    list_sets(typer.echo)


@data_app.command(
    "show", help="How many problems a data set has, how long they are, and the first ones as a model reads them."
)
def show(
    name: Annotated[str, typer.Argument(help="A data set's name.")],
    path: Annotated[Path | None, typer.Option(help="Its rows: a file or folder; without it, the hub's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Another prompt template.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many problems to print.")] = 3,
    model: Annotated[Path | None, typer.Option(help="A model's folder: its chat template and tokenizer.")] = None,
) -> None:
    show_set(name, path, prompt, limit, model, typer.echo)


@data_app.command("decontaminate")
def decontaminate(
    train: Annotated[str, typer.Argument(help="The name of the data set that is trained on.")],
    against: Annotated[str, typer.Option(help="Suites that are evaluated, comma-separated.")],
    path: Annotated[Path | None, typer.Option(help="The set's rows: a file or folder; without it, the hub's.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Words in a row that make an overlap; 13 as in GPT-3.")] = 13,
    out: Annotated[Path | None, typer.Option(help="Write the rows without overlap: .jsonl, or a folder.")] = None,
) -> None:
    """Say which training problems overlap with which evaluated ones. Exit code 1: some do, and no --out was given."""
    from megasharp.evals.contamination import decontaminate as run

    suites = [name.strip() for name in against.split(",") if name.strip()]
    if run(train, path, suites, n, out, typer.echo) and out is None:
        raise typer.Exit(1)


def list_sets(say: Say) -> None:
    """Say each data set in two lines, and each prompt template in one."""
    from megasharp.tasks.prompts import TEMPLATES, by_chat
    from megasharp.tasks.sets import SETS

    say(
        "Data sets: name, problems, where on the hub; then task, prompt, what the schema is known from, licence, papers"
    )
    for each in SETS.values():
        say(f"{each.name:<20} {_expected(each):>15}  {each.hub or 'none, path only'}")
        asked = by_chat(each.prompt)
        prompt = asked if asked == each.prompt else f"{asked} (published with {each.prompt})"
        facts = (each.task, prompt, each.known, each.licence or "your own", each.used_by or "no paper")
        say(f"    {' | '.join(facts)}")
    say("\nPrompt templates: name, and where it is from; (chat) is written by the model's own chat template")
    for name, template in TEMPLATES.items():
        say(f"{name:<20} {'(chat) ' if template.chat else ''}{template.source}")


def _expected(each: DataSet) -> str:
    if each.expected is None:
        return "?"
    return f"{each.expected:,}" + (f" +- {100 * each.tolerance:g} %" if each.tolerance else "")


def show_set(name: str, path: Path | None, prompt: str | None, limit: int, model: Path | None, say: Say) -> None:
    """Say how many problems a set has, how long they are, and its first `limit` as a model reads them.

    With the folder of a `model`, its chat template writes the prompts and its tokenizer measures them; else messages
    are shown as they are and lengths are in characters. Raises UserError as `load_set` does.
    """
    from megasharp.config.core import find
    from megasharp.tasks.prompts import by_chat, template_named
    from megasharp.tasks.sets.load import load_set, set_named
    from megasharp.tasks.stream import read_prompt
    from megasharp.tasks.tokenizer import load_tokenizer

    chosen = set_named(name)
    prompt = prompt or by_chat(chosen.prompt)
    loaded = load_set(name, find(str(path)) if path else None, prompt)
    tokenizer = load_tokenizer(model) if model else None
    for line in _facts(chosen, loaded, tokenizer, template_named(prompt).source):
        say(line)
    for item in loaded.items[:limit]:
        say(f"\n--- {item.id}")
        say(tokenizer.written_out(read_prompt(item, tokenizer).tokens) if tokenizer else _as_messages(item))
        say(f"--- answer: {_answer(item)}")


def _facts(chosen: DataSet, loaded: Loaded, tokenizer: TextTokenizer | None, prompt: str) -> Iterator[str]:
    from megasharp.tasks.stream import read_prompt

    measured = loaded.items if tokenizer is None else loaded.items[:_MEASURED]
    lengths = [len(read_prompt(item, tokenizer).tokens if tokenizer else item.text) for item in measured]
    unit = "characters" if tokenizer is None else f"tokens (the first {len(measured)})"
    yield f"{chosen.name}: {chosen.about}; task {chosen.task}; {loaded.items[0].source}"
    yield f"problems   {len(loaded.items)} (expected of the hub: {_expected(chosen)})"
    for reason, count in loaded.left_out.items():
        yield f"left out   {count} rows: {reason}"
    yield f"prompts    {min(lengths)} to {max(lengths)} {unit}, median {median(lengths):g}; from: {prompt}"
    yield f"licence    {chosen.licence or 'your own'}; schema from: {chosen.known}; papers: {chosen.used_by or 'none'}"


def _as_messages(item: TaskItem) -> str:
    if not item.turns:
        return item.text
    return "\n".join(f"[{role}] {text}" for role, text in item.turns) + "\n[assistant]"


def _answer(item: TaskItem) -> str:
    """Return what the verifier compares with, shortened."""
    assert is_dataclass(item.answer)
    parts = [f"{each.name}={getattr(item.answer, each.name)!r}" for each in fields(item.answer)]
    return ", ".join(part if len(part) <= _SHOWN else f"{part[:_SHOWN]}... ({len(part)} characters)" for part in parts)
