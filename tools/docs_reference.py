"""Parts of the reference that the site makes from the code: the keys of a run file, the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from megasharp.cli.examples import EXAMPLES
from megasharp.cli.main import COMMANDS, app
from megasharp.config.key_texts import key_facts
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys
from megasharp.trainer.stored_config import DERIVED

PROGRAM = "megasharp"
_DOTTED = sorted((key for key, _ in described_keys(RunConfig) if "." in key), key=len, reverse=True)
# A dotted key where a text names it, outside of another name.
_NAMED = re.compile(rf"(?<![\w.`/-])({'|'.join(map(re.escape, _DOTTED))})(?![\w`]|[./]\w)")


def keys_text() -> str:
    """Return every key of a run file as Markdown: a part for each table at the top, and an anchor for each key."""
    top = [name for name in RunConfig.model_fields if not _is_section(name)]
    return "\n".join((_part("The run as a whole", "run"), *_keys_below(top), *_sections()))


def _sections() -> Iterator[str]:
    for name in filter(_is_section, RunConfig.model_fields):
        yield _part(f"`{name}`", name)
        yield f"{key_facts(RunConfig, name).text}\n"
        yield from _keys_below([name], named=False)


def _part(title: str, place: str) -> str:
    return f"## {title} {{ #{place} }}\n"


def _is_section(name: str) -> bool:
    return any(key.startswith(f"{name}.") for key, _ in described_keys(RunConfig))


def _keys_below(names: list[str], *, named: bool = True) -> Iterator[str]:
    """Yield the entries of the keys with these first parts, their own included if `named`."""
    for key, (table, name) in described_keys(RunConfig):
        if key.partition(".")[0] in names and (named or "." in key):
            facts = key_facts(table, name)
            default = facts.default and f" · default `{facts.default}`"
            if table.model_fields[name].is_required():
                default = " · required"
            elif key in DERIVED:
                default += ", [found when the run starts](run-file.md#derived-values)"
            yield f"### `{key}` {{ #{anchor(key)} .key }}\n\n{facts.type}{default}\n{{ .facts }}\n"
            yield f"{_linked(facts.text)}\n"


def anchor(key: str) -> str:
    """Return the anchor of a key on its page. Example: "policy-tp"."""
    return key.replace(".", "-")


def _linked(text: str) -> str:
    """Return a key's text with every key that it names as a link to it."""
    return _NAMED.sub(lambda found: f"[`{found[0]}`](#{anchor(found[0])})", text)


def commands_text() -> str:
    """Return every command as Markdown, by the panels of `--help`: usage, examples, arguments and options."""
    program: Any = typer.main.get_command(app)
    context = typer.Context(program, info_name=PROGRAM)
    parts: list[str] = []
    for panel, names in COMMANDS.items():
        parts.append(_part(panel, f"panel-{panel.split()[0].lower()}"))
        for name in names:
            parts += _command(program.commands[name], name, context, "###")
    return "\n".join(parts)


def _command(command: Any, name: str, parent: typer.Context, level: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name, parent=parent)
    path = context.command_path.removeprefix(f"{PROGRAM} ")
    yield f"{level} {path} {{ #{path.replace(' ', '-')} }}\n\n{command.help or ''}\n"
    below = getattr(command, "commands", {})
    if not below:
        usage = " ".join((PROGRAM, path, *command.collect_usage_pieces(context)))
        yield f"```text\n{usage}\n```\n"
        yield "\n".join((f"```{{ .bash title='Examples' }}\n{_examples(path)}\n```\n", *_tables(command, context)))
    for name_below, each in below.items():
        yield from _command(each, name_below, context, f"{level}#")


def _examples(path: str) -> str:
    """Return a command's examples as lines of a shell, with their meanings as comments beside them."""
    lines = EXAMPLES[path]
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{PROGRAM} {line:{width}}  # {text}" if text else f"{PROGRAM} {line}" for line, text in lines)


def _tables(command: Any, context: typer.Context) -> Iterator[str]:
    """Yield a table for the arguments and for each panel of options."""
    tables: dict[str, list[str]] = {}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record and record[0] != "--help":
            title = getattr(param, "rich_help_panel", None) or param.param_type_name
            tables.setdefault(title, []).append(f"| `{_cell(record[0])}` | {_cell(_meaning(record[1]))} |")
    for title, rows in tables.items():
        yield "\n".join((f"| {title.lower()} | meaning |", "|---|---|", *rows, ""))


def _meaning(text: str) -> str:
    """Return an option's help with what typer adds to it in words. Example: "Seed of the samples. Default `1`."."""
    help_, _, added = text.removesuffix("]").rpartition("[") if text.endswith("]") else (text, "", "")
    facts = []
    for fact in filter(None, added.split("; ")):
        default = fact.partition("default: ")[2]
        if default and not default.startswith("no-"):
            facts.append(f"Default `{default}`.")
        elif not default:
            facts.append("Required." if fact == "required" else f"`{fact}`.")
    return " ".join((help_.strip(), *facts)).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace(" range>", ">")
