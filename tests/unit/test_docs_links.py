"""Links of pages lead on the site where they lead in the repository."""

from __future__ import annotations

import logging
from xml.etree.ElementTree import fromstring

import docs_site
import pytest
from cases import each_case
from markdown import Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("how-to/install.md", "how-to/resume.md", "reference/keys.md", "explanation/security.md")


@pytest.fixture
def links() -> docs_site.RepositoryLinks:
    """Those of a site of four pages, one of which is SECURITY.md."""
    links = docs_site.RepositoryLinks()
    links.site = MkDocsConfig()
    links.site.site_dir = "site"
    links.pages = {"SECURITY.md": "explanation/security.md"}
    links.sources = {"explanation/security.md": "SECURITY.md"}
    links.repo_url = "https://forge/megasharp"
    links.files = Files([File(page, None, "site", use_directory_urls=False) for page in PAGES])
    return links


@each_case(
    ("page", "link", "expected"),
    [
        ("how-to/install.md", "resume.md#retries", "resume.md#retries"),
        ("how-to/install.md", "../../SECURITY.md", "../explanation/security.md"),
        ("how-to/install.md", "../../Makefile", "https://forge/megasharp/blob/main/Makefile"),
        ("how-to/install.md", "../../megasharp/algos", "https://forge/megasharp/tree/main/megasharp/algos"),
        ("how-to/install.md", "https://elsewhere/x", "https://elsewhere/x"),
        ("how-to/install.md", "#here", "#here"),
        ("explanation/security.md", "docs/how-to/resume.md", "../how-to/resume.md"),
        ("explanation/security.md", "setup.py#L1", "https://forge/megasharp/blob/main/setup.py#L1"),
        ("explanation/security.md", "examples/quickstart/pass_at_k.png", "../examples/quickstart/pass_at_k.png"),
    ],
)
def test_links_are_of_the_file_that_a_page_is(
    links: docs_site.RepositoryLinks, page: str, link: str, expected: str
) -> None:
    links.page = page
    assert links.resolve(link) == expected


def test_a_picture_outside_of_docs_is_copied(links: docs_site.RepositoryLinks) -> None:
    links.page = "explanation/security.md"
    links.resolve("examples/quickstart/pass_at_k.png")
    assert "examples/quickstart/pass_at_k.png" in links.files.src_uris


def test_a_target_that_is_not_there_is_a_warning(
    links: docs_site.RepositoryLinks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning fails a strict build."""
    monkeypatch.setattr(docs_site.log, "disabled", False)  # import-linter, if its test came first, disables all loggers
    links.page = "how-to/install.md"
    with caplog.at_level(logging.WARNING):
        assert links.resolve("../../nowhere.py") == "../../nowhere.py"
    assert caplog.messages == ["docs/how-to/install.md links to ../../nowhere.py, which does not exist"]


def test_a_key_in_code_links_to_its_entry_but_in_a_link_and_in_a_heading(links: docs_site.RepositoryLinks) -> None:
    links.page = "how-to/resume.md"
    text = (
        "# `guard.nan_limit`\n\n`guard.nan_limit`, `guard.no_key`, [`policy.tp`](install.md)\n\n    guard.nan_limit\n"
    )
    page = fromstring(f"<div>{Markdown(extensions=[links]).convert(text)}</div>")
    found = [(link.get("href"), "".join(link.itertext())) for link in page.iter("a")]
    assert found == [("../reference/keys.md#guard-nan_limit", "guard.nan_limit"), ("install.md", "policy.tp")]


def test_a_name_in_code_is_told_from_a_message(links: docs_site.RepositoryLinks) -> None:
    """The style sheet wraps messages, not names."""
    links.page = "how-to/resume.md"
    page = fromstring(f"<p>{Markdown(extensions=[links]).convert('`policy.tp` `lambda_top1` `do that`')}</p>")
    assert [code.get("class") for code in page.iter("code")] == ["name", "name", None]
