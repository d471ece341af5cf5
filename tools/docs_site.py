"""mkdocs hook: pages from outside docs/, parts that the code writes, and links that work as in the repository.

Pages link to each other, and to any other file of the repository, by relative paths. `RepositoryLinks` points each link
to the page that the file has on the site, else to the file in the repository on the web.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element, SubElement

import docs_reference
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys

ROOT = Path(__file__).resolve().parents[1]
# Where a page has `<!-- site: keys -->`, the code writes the text.
MADE = re.compile(r"<!-- site: (\w+) -->")
PARTS: dict[str, Callable[[], str]] = {"keys": docs_reference.keys_text, "commands": docs_reference.commands_text}
KEYS_PAGE = "reference/keys.md"
# Dotted keys of a run file, which link to their anchors wherever a text has one as code.
KEYS = {key for key, _ in described_keys(RunConfig) if "." in key}
_TEXTS = ("p", "li", "td", "em", "strong")
# Markup of mkdocs-material and mkdocstrings that GitHub does not render.
SITE_ONLY = re.compile(r"^(:::|!!!|===|\?\?\?) |\[\^", flags=re.MULTILINE)
ASKS_GITHUB = 'data-md-component="source"'
log = logging.getLogger("mkdocs.hooks.docs_site")


class RepositoryLinks(Extension):
    """Resolve links relative to a page's file in the repository, before mkdocs checks those between pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, str] = {}  # file of the repository -> page
        self.sources: dict[str, str] = {}  # page -> file of the repository
        self.page = ""
        self.repo_url = ""
        self.files = Files([])
        self.site = MkDocsConfig()

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Resolve(md, self), "repository_links", 1)  # mkdocs' own has priority 0

    def resolve(self, link: str) -> str:
        """Return `link` as it has to stand in the page that is being rendered; an image is copied to the site."""
        scheme, host, path, _, anchor = urlsplit(link)
        if scheme or host or not path or path.startswith("/"):
            return link
        source = self.sources.get(self.page, f"docs/{self.page}")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(path)))
        file = ROOT / target
        if not file.exists():
            log.warning("%s links to %s, which does not exist", source, link)
            return link
        return self._to_site(target, anchor) or self._to_web(target, anchor)

    def _to_site(self, target: str, anchor: str) -> str:
        """Return a link to the page or file of the site that `target` is, or nothing."""
        page = self.pages.get(target) or target.removeprefix("docs/")
        if self.files.get_file_from_path(page) is None:
            if not target.endswith((".png", ".svg")):
                return ""
            self.files.append(File(page, str(ROOT), self.site.site_dir, use_directory_urls=False))
        return self.from_page(page) + (f"#{anchor}" if anchor else "")

    def from_page(self, page: str) -> str:
        """Return the relative path of another page."""
        return posixpath.relpath(page, posixpath.dirname(self.page) or ".")

    def _to_web(self, target: str, anchor: str) -> str:
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{self.repo_url.rstrip('/')}/{kind}/main/{target}{'#' if anchor else ''}{anchor}"


class _Resolve(Treeprocessor):
    def __init__(self, md: Markdown, links: RepositoryLinks) -> None:
        super().__init__(md)
        self.links = links

    def run(self, root: Element) -> None:
        parents = {child: parent for parent in root.iter() for child in parent}
        for element in [*root.iter()]:
            key = {"a": "href", "img": "src"}.get(element.tag)
            if key and (link := element.get(key)):
                element.set(key, self.links.resolve(link))
            elif element.tag == "code" and element.text in KEYS and parents[element].tag in _TEXTS:
                name, element.text = element.text, None
                element.tag = "a"
                element.set("href", f"{self.links.from_page(KEYS_PAGE)}#{docs_reference.anchor(name)}")
                SubElement(element, "code", {"class": "name"}).text = AtomicString(name)
            elif element.tag == "code" and element.text and " " not in element.text:
                element.set("class", "name")  # site.css does not wrap these


LINKS = RepositoryLinks()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Register the links, and write folders of `nav` out."""
    LINKS.pages = dict(config.extra["repository_pages"])
    LINKS.sources = {page: source for source, page in LINKS.pages.items()}
    LINKS.repo_url = config.repo_url or ""
    LINKS.site = config
    config.markdown_extensions = [*config.markdown_extensions, LINKS]  # type: ignore[list-item]
    config.nav = _expanded(config.nav or [], Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that are pages as well."""
    LINKS.files = files
    for source, uri in LINKS.pages.items():
        page = File.generated(config, uri, abs_src_path=str(ROOT / source))
        page.edit_uri = f"../{source}"
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Note the page whose links are resolved next, and write what the code says where the page asks for it."""
    LINKS.page = page.file.src_uri
    return MADE.sub(lambda asked: PARTS[asked[1]](), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve the links of a notebook, which is rendered without extensions; compare any other page with GitHub's."""
    if page.file.src_uri.endswith(".ipynb"):
        LINKS.page = page.file.src_uri
        return re.sub(r'href="([^"]*)"', lambda found: f'href="{_in_html(found[1], page, files)}"', html)
    _compare(html, page)
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme's script from asking GitHub for stars and releases on every visit."""
    return output.replace(ASKS_GITHUB, "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Treat pages that are no documentation, such as 404.html, as `on_post_page` does."""
    return output_content.replace(ASKS_GITHUB, "")


def _in_html(link: str, page: Page, files: Files) -> str:
    """Return a link as it has to stand in a page that mkdocs does not look through for links."""
    path, _, anchor = LINKS.resolve(link).partition("#")
    file = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path)))
    address = file.url_relative_to(page.file) if path and file else path
    return f"{address}#{anchor}" if anchor else address


def _compare(html: str, page: Page) -> None:
    """Warn where a list, a table or a block of code is one on the site or on GitHub only."""
    text = page.markdown or ""
    theirs = "" if SITE_ONLY.search(text) else MarkdownIt("commonmark").enable("table").render(text)
    for tag in ("li", "pre", "table") if theirs else ():
        if len(re.findall(f"<{tag}[ >]", html)) != len(re.findall(f"<{tag}[ >]", theirs)):
            log.warning("%s: a <%s> is none on GitHub, or here; mind blank lines and indents", page.file.src_uri, tag)


def _expanded(nav: list[object], docs: Path) -> list[object]:
    """Return `nav` with the pages of a folder in place of `folder/*`, without those that it names before."""
    expanded: list[object] = []
    for entry in nav:
        if isinstance(entry, dict):
            expanded.append({title: _expanded(at, docs) if isinstance(at, list) else at for title, at in entry.items()})
        elif isinstance(entry, str) and entry.endswith("/*"):
            found = sorted(path.relative_to(docs).as_posix() for path in docs.glob(f"{entry}.md"))
            expanded += [page for page in found if page not in expanded]
        else:
            expanded.append(entry)
    return expanded
