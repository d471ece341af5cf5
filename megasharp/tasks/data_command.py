"""`megasharp data list` and `show`: the table of data sets, and a look at one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median

from megasharp.config.core import find
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import TEMPLATES, template_named
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.data_set import DataSet
from megasharp.tasks.sets.load import Loaded, load_set, set_named
from megasharp.tasks.stream import prompt_of
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer

Say = Callable[[str], None]
# Tests of programs may be megabytes.
_SHOWN = 400


def list_sets(say: Say) -> None:
    """Say each data set in two lines, and each prompt template in one."""
    say(
        "Data sets: name, problems, where on the hub; then task, prompt, what the schema is known from, licence, papers"
    )
    for each in SETS.values():
        say(f"{each.name:<20} {_expected(each):>15}  {each.hub or 'none, path only'}")
        facts = (each.task, each.prompt, each.known, each.licence or "your own", each.used_by or "no paper")
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
    chosen = set_named(name)
    loaded = load_set(name, find(str(path)) if path else None, prompt)
    tokenizer = load_tokenizer(model) if model else None
    for line in _facts(chosen, loaded, tokenizer, template_named(prompt or chosen.prompt).source):
        say(line)
    for item in loaded.items[:limit]:
        say(f"\n--- {item.id}")
        say(prompt_of(item, tokenizer) if tokenizer else _as_messages(item))
        say(f"--- answer: {_answer(item)}")


def _facts(chosen: DataSet, loaded: Loaded, tokenizer: TextTokenizer | None, prompt: str) -> Iterator[str]:
    measured = loaded.items if tokenizer is None else loaded.items[:1000]
    lengths = [len(tokenizer.encode(prompt_of(item, tokenizer)) if tokenizer else item.text) for item in measured]
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
    """What the verifier compares with, shortened."""
    assert is_dataclass(item.answer)
    parts = [f"{each.name}={getattr(item.answer, each.name)!r}" for each in fields(item.answer)]
    return ", ".join(part if len(part) <= _SHOWN else f"{part[:_SHOWN]}... ({len(part)} characters)" for part in parts)
