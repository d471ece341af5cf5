"""`megasharp data`: the table of data sets, a look at one, and what training shares with evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say, status

if TYPE_CHECKING:
    from megasharp.tasks.judge import TaskItem
    from megasharp.tasks.sets.data_set import DataSet
    from megasharp.tasks.sets.load import Loaded
    from megasharp.tasks.tokenizer import TextTokenizer

data_app = typer.Typer(
    no_args_is_help=True, help="List and show data sets; find overlap between training and evaluation."
)
OWN = "Rows of your own (the keys of data in a run file)"
# Tests of programs may be megabytes.
_SHOWN = 400
# Tokenizing a whole set takes minutes; a median does not need it.
_MEASURED = 1000


@data_app.command("list")
def list_command() -> None:
    """List the known data sets and the prompt templates."""
    list_sets(typer.echo)


@data_app.command(
    "show", help="Show a data set: number and length of its problems, and the first ones as a model reads them."
)
def show(
    source: Annotated[
        str, typer.Argument(help="Name of a known data set, your own rows (a path or an id on the hub), or a run file.")
    ],
    path: Annotated[
        Path | None, typer.Option(help="File or folder with the known set's rows. Without it: the hub.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Name of another prompt template.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of problems to print.")] = 3,
    model: Annotated[
        str | None, typer.Option(help="Folder or id on the hub whose chat template and tokenizer are used.")
    ] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompt.", rich_help_panel=OWN)] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answer.", rich_help_panel=OWN)] = None,
    task: Annotated[str | None, typer.Option(help="Task whose verifier judges.", rich_help_panel=OWN)] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a folder or of a set on the hub.", rich_help_panel=OWN)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Configuration of a set on the hub.", rich_help_panel=OWN)] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a set on the hub.", rich_help_panel=OWN)] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompts.", rich_help_panel=OWN)] = None,
    template: Annotated[
        str | None, typer.Option(help="Text around a prompt, with {question} in it.", rich_help_panel=OWN)
    ] = None,
) -> None:
    status(f"reading {source}")
    from megasharp.tasks.sets import SETS
    from megasharp.tasks.sets.load import set_named
    from megasharp.tasks.sets.row_sources import SUFFIXES

    keys = {"prompt_key": prompt_key, "answer_key": answer_key, "task": task, "split": split, "name": name}
    keys |= {"revision": revision, "system": system, "template": template}
    given = {key: value for key, value in keys.items() if value is not None}
    if source.endswith((".yaml", ".yml")):
        if ignored := [*given, *(["path"] if path else []), *(["prompt"] if prompt else [])]:
            raise UserError(f"{source} says what is read; leave --{ignored[0].replace('_', '-')} out")
        show_run(source, limit, model, typer.echo)
    elif source not in SETS and (Path(source).exists() or "/" in source or source.endswith(SUFFIXES)):
        if path is not None:
            raise UserError(f"{source} names rows of your own; leave --path out")
        show_own({"path": source, "prompt": prompt, **given}, limit, model, typer.echo)
    else:
        set_named(source)
        if given:
            raise UserError(f"--{next(iter(given)).replace('_', '-')} is for rows of your own, not for set {source}")
        show_set(source, path, prompt, limit, model, typer.echo)


@data_app.command("decontaminate")
def decontaminate(
    train: Annotated[str, typer.Argument(help="Name of the data set that is trained on.")],
    against: Annotated[str, typer.Option(help="Suites that are evaluated on, comma-separated.")],
    path: Annotated[Path | None, typer.Option(help="File or folder with the set's rows. Without it: the hub.")] = None,
    n: Annotated[
        int, typer.Option(min=1, help="Number of consecutive words that count as overlap; 13 is GPT-3's.")
    ] = 13,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows without overlap here: a .jsonl file, or a folder.")
    ] = None,
) -> None:
    """Find training problems that overlap with evaluated ones. Exit code 1: some do, and --out is not given."""
    status(f"reading {train}")
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


def show_run(file: str, limit: int, model: str | None, say: Say) -> None:
    """Say of each source of a run's training data what `show_set` says of a set, with the run's model or another.

    Raises UserError as a start of the run does for its data.
    """
    from megasharp.config.core import find
    from megasharp.config.data import DataSource
    from megasharp.config.hub import model_place
    from megasharp.config.run_config import load_run

    config = load_run(Path(file), [])
    folder = model or str(model_place(config.model.path, config.model.revision, weights=False))
    for number, source in enumerate(config.data.sources):
        if number:
            say("")
        if source.set is not None:
            show_set(source.set, find(source.path) if source.path else None, source.prompt, limit, folder, say)
        else:
            show_own({key: getattr(source, key) for key in DataSource.model_fields}, limit, folder, say)


def show_own(keys: Mapping[str, object], limit: int, model: str | None, say: Say) -> None:
    """Say of rows of a user's own, which the keys of `data` name, or of a task's file, what `show_set` says of a set.

    Raises UserError as training on them does.
    """
    from megasharp.config.core import validate
    from megasharp.config.data import DataSource
    from megasharp.tasks.problems import is_worded, prompt_of, task_of
    from megasharp.trainer.resolve.models import source_problems

    source = validate(DataSource, dict(keys), "data show")
    items = source_problems(source, "data show: data")
    tokenizer = _tokenizer(model)
    judge = f"task {task_of(source)}" if source.task else "a function of yours judges (reward.function)"
    say(f"{source.label}: {len(items)} problem{'s' if len(items) != 1 else ''}; {judge}")
    say(f"columns    {', '.join(items[0].row or {}) or 'not kept'}")
    by = prompt_of(source) if is_worded(source, items) else ""
    say(_lengths(items, tokenizer, by or "their own words"))
    _first(items[:limit], tokenizer, say)


def _tokenizer(model: str | None) -> TextTokenizer | None:
    from megasharp.config.hub import given_model
    from megasharp.tasks.tokenizer import load_tokenizer

    return load_tokenizer(given_model(model, weights=False)) if model else None


def show_set(name: str, path: Path | None, prompt: str | None, limit: int, model: str | None, say: Say) -> None:
    """Say how many problems a set has, how long they are, and its first `limit` as a model reads them.

    With a `model`, a folder or a hub's id, its chat template writes the prompts and its tokenizer measures them; else
    messages are shown as they are and lengths are in characters. Raises UserError as `load_set` does.
    """
    from megasharp.config.core import find
    from megasharp.tasks.prompts import by_chat, template_named
    from megasharp.tasks.sets.load import load_set, set_named

    chosen = set_named(name)
    prompt = prompt or by_chat(chosen.prompt)
    loaded = load_set(name, find(str(path)) if path else None, prompt)
    tokenizer = _tokenizer(model)
    for line in _facts(chosen, loaded, tokenizer, template_named(prompt).source):
        say(line)
    _first(loaded.items[:limit], tokenizer, say)


def _first(items: Sequence[TaskItem], tokenizer: TextTokenizer | None, say: Say) -> None:
    from megasharp.tasks.stream import read_prompt

    for item in items:
        say(f"\n--- {item.id}")
        if tokenizer:
            say(tokenizer.written_out(read_prompt(item, tokenizer).tokens))
        else:
            messages = [f"[{role}] {text}" for role, text in item.turns]
            say("\n".join([*messages, "[assistant]"]) if messages else item.text)
        say(f"--- answer: {_answer(item)}")


def _facts(chosen: DataSet, loaded: Loaded, tokenizer: TextTokenizer | None, prompt: str) -> Iterator[str]:
    yield f"{chosen.name}: {chosen.about}; task {chosen.task}; {loaded.items[0].source}"
    yield f"problems   {len(loaded.items)} (expected of the hub: {_expected(chosen)})"
    for reason, count in loaded.left_out.items():
        yield f"left out   {count} rows: {reason}"
    yield _lengths(loaded.items, tokenizer, f"from: {prompt}")
    yield f"licence    {chosen.licence or 'your own'}; schema from: {chosen.known}; papers: {chosen.used_by or 'none'}"


def _lengths(items: Sequence[TaskItem], tokenizer: TextTokenizer | None, template: str) -> str:
    from megasharp.tasks.stream import read_prompt

    measured = items if tokenizer is None else items[:_MEASURED]
    lengths = [len(read_prompt(item, tokenizer).tokens if tokenizer else item.text) for item in measured]
    unit = "characters" if tokenizer is None else f"tokens (the first {len(measured)})"
    return f"prompts    {min(lengths)} to {max(lengths)} {unit}, median {median(lengths):g}; {template}"


def _answer(item: TaskItem) -> str:
    """Return what the verifier compares with, shortened."""
    if item.answer.given is not item.answer:
        return _cut(repr(item.answer.given))
    assert is_dataclass(item.answer)
    parts = [f"{each.name}={getattr(item.answer, each.name)!r}" for each in fields(item.answer)]
    return ", ".join(map(_cut, parts))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
