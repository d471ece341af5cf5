"""A hub on this machine's loopback, as much of one as the real libraries ask for to load data sets and models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


@contextmanager
def small_hub(folder: Path) -> Iterator[str]:
    """The address of a hub whose repositories are `folder/OWNER/NAME`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            repository = folder / parts[2] / parts[3]
            paths = asked.get("paths", []) if isinstance(asked, dict) else []
            self._json([entry(repository, repository / path) for path in paths if (repository / path).exists()], True)

        def _answer(self, with_body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] in (["api", "datasets"], ["api", "models"]) and (folder / parts[2] / parts[3]).is_dir():
                self._about(folder / parts[2] / parts[3], parts[4:], with_body)
            elif parts[0] == "datasets" and parts[3] == "resolve":
                self._file(folder / parts[1] / parts[2] / "/".join(parts[5:]), with_body)
            elif parts[2:3] == ["resolve"]:
                self._file(folder / parts[0] / parts[1] / "/".join(parts[4:]), with_body)
            else:
                self._missing("RepoNotFound")

        def _about(self, repository: Path, rest: list[str], with_body: bool) -> None:
            files = [each for each in sorted(repository.rglob("*")) if each.is_file()]
            if not rest or rest[0] == "revision":
                siblings = [
                    {"rfilename": each.relative_to(repository).as_posix(), "size": each.stat().st_size}
                    for each in files
                ]
                name = "/".join(repository.parts[-2:])
                self._json({"id": name, "sha": commit_of(folder), "siblings": siblings, "private": False}, with_body)
            elif rest[0] == "tree":
                below = repository / "/".join(rest[2:])
                inside = sorted(below.rglob("*") if "recursive=True" in self.path else below.iterdir())
                self._json([entry(repository, each) for each in inside], with_body)
            else:
                self._missing("EntryNotFound")

        def _file(self, path: Path, with_body: bool) -> None:
            if not path.is_file():
                self._missing("EntryNotFound")
                return
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit_of(folder))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def _json(self, value: object, with_body: bool) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def _missing(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def commit_of(folder: Path) -> str:
    """The commit of all branches: COMMIT, or what the file `commit` beside the repositories says."""
    moved = folder / "commit"
    return moved.read_text() if moved.exists() else COMMIT


def entry(repository: Path, path: Path) -> dict[str, object]:
    """A file or folder, as the hub's API writes it."""
    name = path.relative_to(repository).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "2" * 40, "size": 0}
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": name, "oid": digest, "size": path.stat().st_size}
