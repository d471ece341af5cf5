"""The reference that the site makes from the code is complete, and pages name commands and options that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import docs_reference
import pytest
import typer

from megasharp.cli.main import COMMANDS, app
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PROGRAM = typer.main.get_command(app)
PAGES = [REPOSITORY / "README.md", *DOCS.rglob("*.md"), *REPOSITORY.glob("examples/*/README.md")]


def test_every_key_has_an_entry_with_its_anchor_type_and_text() -> None:
    page = docs_reference.keys_text()
    for key, (table, name) in described_keys(RunConfig):
        text = table.model_fields[name].description or ""
        assert f"{{ #{key.replace('.', '-')}" in page, key
        assert text.split(" ", 1)[0] in page
    assert "### `policy.tp` { #policy-tp .key }\n\ninteger >= 1 · default `1`\n" in page
    assert "### `name` { #name .key }\n\nstring of letters, digits and . _ + - that begins" in page
    assert re.search(r"### `data.max_response_tokens` .*\n\ninteger >= 1 or null · default `null`, \[found", page)
    assert "where [`rollout.max_staleness`](#rollout-max_staleness) is above 0" in page


def test_every_command_is_listed_with_its_options_and_examples() -> None:
    text = docs_reference.commands_text()
    names = [name for panel in COMMANDS.values() for name in panel]
    assert re.findall(r"^### .* \{ #(\S+) \}$", text, flags=re.MULTILINE) == names
    assert "#### data show { #data-show }\n" in text
    assert "megasharp runs show [OPTIONS] {run}\n" in text and "\nmegasharp runs show mine\n" in text
    assert re.search(r"^\| `--limit <int>` \| .*\. Default `3`\. `x>=0`\. \|$", text, flags=re.MULTILINE)


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """The command that the words begin with, and the options that it has."""
    command, path = PROGRAM, "megasharp"
    for word in words:
        below = getattr(command, "commands", {}).get(word)
        if below is None:
            break
        command, path = below, f"{path} {word}"
    named = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return path, named | {"--help", "--install-completion", "--show-completion"}


def code_lines(page: Path) -> Iterator[str]:
    """The lines of a page's code, indented or fenced; continued ones as one."""
    fenced = False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip().removeprefix("$ ")


# The command that the page on adding one adds.
EXAMPLES = {"families"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_in_pages_exist(page: Path) -> None:
    for line in code_lines(page):
        if not line.startswith("megasharp "):
            continue
        words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)[1:]
        path, known = options_of(words)
        assert path != "megasharp" or words[0] in known | EXAMPLES, f"{page}: {line}"
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert words[0] in EXAMPLES or asked <= known, f"{page}: {path} has no {asked - known}"
