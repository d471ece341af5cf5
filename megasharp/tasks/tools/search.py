"""A search over documents of a JSONL file: the passages whose words fit a query best, by BM25.

A document is an object with `text`, and optionally `id` and `title`. The index is SQLite's FTS5, in memory, made once
in a process, when the problems are read, and never written again. Equal scores are in the documents' order, so that a
query has one answer.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from megasharp.common.errors import UserError
from megasharp.tasks.data_fields import name_of, optional_text, read_objects, text_field
from megasharp.tasks.environment import called
from megasharp.tasks.tools.tool import Tool, ToolError, file_beside

_WORD = re.compile(r"\w+")
# Words of a query that count; so many that no question is cut, and no policy makes a search take seconds.
_MOST_WORDS = 64
_FIND = (
    "SELECT name, title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents, 0, 2, 1), rowid LIMIT ?"
)


class Index:
    """The documents of a file. Raises UserError where it is no such file, or SQLite has no full-text index."""

    def __init__(self, path: Path) -> None:
        # Calls come from several threads, one at a time.
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = Lock()
        try:
            self._base.execute("CREATE VIRTUAL TABLE documents USING fts5(name UNINDEXED, title, text)")
        except sqlite3.OperationalError as error:
            raise UserError(f"the tool search needs SQLite's FTS5, which this Python's lacks ({error})") from error
        rows = read_objects(path, "write a document a line, with 'text' and 'title'")
        self._base.executemany(
            "INSERT INTO documents VALUES (?, ?, ?)",
            (
                (name_of(row, ("id",), path, where), optional_text(row, "title", where), text_field(row, "text", where))
                for where, row in rows
            ),
        )
        self._base.execute("PRAGMA query_only = ON")

    def best(self, query: str, most: int) -> list[tuple[str, str, str]]:
        """Return the documents (id, title, text) that have some word of a query, the best first."""
        words = _WORD.findall(query)[:_MOST_WORDS]
        if not words:
            return []
        with self._lock:
            return self._base.execute(_FIND, (" OR ".join(f'"{word}"' for word in words), most)).fetchall()


@lru_cache(maxsize=8)
def index_of(path: Path) -> Index:
    """Return the index of a file, made once."""
    return Index(path)


class Search(Tool):
    """Searches the documents of the file `path`, and answers with the best `passages`, cut to `characters` each.

    The file is looked for in `folder` first, which is that of the file of tools.
    """

    name = "search"
    description = "Search the documents for words; the best passages are returned."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for."}},
        "required": ["query"],
    }

    def __init__(self, path: str, passages: int = 3, characters: int = 600, folder: str = "") -> None:
        self._index = index_of(file_beside(path, [folder, "", *sys.path], "tools: search: path").resolve())
        self._passages, self._characters = passages, characters

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the passages, numbered."""
        query = arguments["query"]
        if not _WORD.search(query):
            raise ToolError("the query has no words")
        found = await called(self._index.best, query, self._passages)
        shown = []
        for number, (name, title, text) in enumerate(found, start=1):
            passage = text if len(text) <= self._characters else f"{text[: self._characters].rstrip()} ..."
            shown.append(f"[{number}] {title or name}\n{passage}")
        return "\n\n".join(shown) or "nothing was found"
