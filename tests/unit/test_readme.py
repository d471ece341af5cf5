"""Pages say what the code does: the table of methods is the one that `megasharp methods` prints, and links lead
somewhere.

The README and the architecture page stay pages that one can read in a sitting.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import each_case
from rich.console import Console

from megasharp.algos import METHODS
from megasharp.cli.methods import describe_method, markdown_table, print_methods
from megasharp.common.errors import UserError

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
METHODS_PAGE = REPOSITORY / "docs" / "reference" / "methods.md"
ARCHITECTURE = REPOSITORY / "megasharp" / "README.md"
ROOMS = ("", "configs/**/", "docs/**/", "examples/**/", "megasharp/**/", "slurm/**/", "tests/**/", "tools/**/")
PAGES = sorted({page for room in ROOMS for page in REPOSITORY.glob(f"{room}*.md")})


def test_table_of_methods_is_the_printed_one() -> None:
    assert markdown_table() in METHODS_PAGE.read_text(encoding="utf-8"), "run megasharp methods --markdown"


@each_case("page", (README, ARCHITECTURE), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_are_wrapped(page: Path) -> None:
    """Tables and a Markdown link's target are not."""
    lines = (re.sub(r"\]\([^)]*\)", "]", line) for line in page.read_text(encoding="utf-8").splitlines())
    assert [line for line in lines if len(line) > 125 and not line.startswith("|")] == []


@each_case(("page", "most"), ((README, 150), (ARCHITECTURE, 250)), ids=str)
def test_pages_stay_short(page: Path, most: int) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= most


def test_list_names_every_method_with_its_paper_and_defaults() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_methods(console)
    text = captured.get()
    assert all(f" {name} " in text for name in METHODS)
    assert "2510.14807" in text and "lambda_top1: 1.1" in text


@each_case("name", METHODS)
def test_a_methods_page_opens_with_its_formula_and_names_its_parameters(name: str) -> None:
    page = describe_method(name)
    assert METHODS[name].paper in page
    assert all(f"{key}: " in page for key in METHODS[name].Params.model_fields)


def test_an_unknown_method_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="no method is called 'nope'; known are: grpo, "):
        describe_method("nope")


@each_case("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and to a heading of it where they name one; pages elsewhere are not asked.

    Of a page that the site completes from the code `make docs` knows the headings.
    """
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page}: {target}"
        if anchor and "<!-- site: " not in other.read_text(encoding="utf-8"):
            assert anchor[1:] in headings(other), f"{page}: {target}{anchor}"


# Calls that make a process listen, or start one that does; `bind` also holds a port for one.
LISTENS = re.compile(
    r"\b(create_server|ThreadingHTTPServer|TCPStore|launch_server|init_process_group|_new_process_group_helper)\("
    r"|(?<!\bsignature)\.(bind|listen)\(|\bray\.init\(|ray\.scripts"
)
# These meet in memory.
SILENT = {"megasharp/learner/meta_models.py"}


def test_security_page_names_every_file_that_makes_something_listen() -> None:
    page = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    table = page.split("## What listens where")[1].split("\n## ")[0]
    named = set(re.findall(r"`(megasharp/[\w/]+\.py)`", table))
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "megasharp").rglob("*.py")
        if LISTENS.search(path.read_text(encoding="utf-8"))
    }
    assert found - SILENT <= named, "what it can do, and who may connect, is said in SECURITY.md"
    assert all((REPOSITORY / name).is_file() for name in named)
    everywhere = [
        name for name in found if re.search(r"0\.0\.0\.0|\[::\]", (REPOSITORY / name).read_text(encoding="utf-8"))
    ]
    assert everywhere == []


# Files of other projects that our texts name.
ELSEWHERE = {
    *("configuration_llama.py", "modeling_llama.py"),
    *("data.py", "task2verifier.py", "extraction_utils.py", "testing_util.py"),
}


@pytest.mark.parametrize("room", ["megasharp", "docs", "tests", "tools"])
def test_files_of_ours_that_texts_name_exist(room: str) -> None:
    """In pages and in code: links are not asked here, but files in backquotes, which a move leaves behind."""
    ours = {
        "/" + path.relative_to(REPOSITORY).as_posix() for top in ROOMS[3:] for path in REPOSITORY.glob(f"{top}*.py")
    }
    ours |= {"/setup.py"}
    for text in (*REPOSITORY.glob(f"{room}/**/*.py"), *REPOSITORY.glob(f"{room}/**/*.md")):
        for name in re.findall(r"`([\w/.-]+\.py)`", text.read_text(encoding="utf-8")):
            known = Path(name).name in ELSEWHERE or any(path.endswith(f"/{name}") for path in ours)
            assert known, f"{text}: {name}"


def headings(page: Path) -> set[str]:
    """As a forge names them: lower case, hyphens for spaces, nothing else but letters, digits and underscores."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in found}
