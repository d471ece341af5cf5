"""The page as one HTML file, and a server of it on this machine's loopback address.

The file contains its styles and scripts and loads nothing from a network. Text of models and users is in it as JSON
only, with `<`, `>` and `&` escaped, so that no text can end the script element that contains it; the scripts make text
nodes of it. The page's own policy (CSP) allows only its one script, by hash, and no loading; a served page may ask its
own server.

The server makes the page anew when the runs' files have changed. It listens on 127.0.0.1 only and answers only requests
that name it or localhost: otherwise a page of another site could read this one by giving its own name this address.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socket import socket

from megasharp.common.errors import UserError, one_line
from megasharp.reporting.page.records import Page

_SCRIPTS = ("dom.js", "chart.js", "bars.js", "matrix.js", "browser.js", "page.js", "live.js")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_json(page: Page) -> str:
    """Return the page's JSON, safe inside of a script element. Halves of surrogate pairs become U+FFFD."""
    text = json.dumps(asdict(page), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], readable)


def as_html(page: Page) -> str:
    """Return the whole HTML file."""
    # One strict script: `"use strict"` has an effect only at its beginning.
    script = '"use strict";\n' + "\n".join(_static(name).replace('"use strict";\n', "", 1) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "CONNECT": "'self'" if page.live else "'none'",
        "TITLE": html.escape(page.title.encode("utf-8", "replace").decode()),
        "STYLE": _static("page.css"),
        "DATA": as_json(page),
        "SCRIPT": script,
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _static("page.html"))


def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


HOST = "127.0.0.1"
_WATCHED = ("metrics.jsonl", "config.yaml", "evals", "rollouts", "probe", "checkpoints", "logs")


class LivePage:
    """The newest page of some run folders and evaluations' `files`, which `collect` reads.

    Where they cannot be read, requests are answered with the error.
    """

    def __init__(self, folders: Sequence[Path], collect: Callable[[], Page], files: Sequence[Path] = ()) -> None:
        self._watched = [folder / name for folder in folders for name in _WATCHED] + list(files)
        self._collect = collect
        self._lock = threading.Lock()
        self._state = ""
        self._page: Page | None = None

    def newest(self) -> tuple[str, Page]:
        """Return a tag that changes with the runs' files, and the page. Raises UserError for a damaged run."""
        with self._lock:
            state = fingerprint(self._watched)
            if self._page is None or state != self._state:
                self._page, self._state = self._collect(), state
            return self._state, self._page


def fingerprint(watched: Sequence[Path]) -> str:
    """Return a hash that changes when one of these files, or a file in one of these folders, was written."""
    seen = []
    for path in (each for one in watched for each in (one, *sorted(one.glob("*")))):
        try:
            stat = path.stat()
        except OSError:
            continue
        seen.append((str(path), stat.st_mtime_ns, stat.st_size))
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:32]


def open_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Open a server, not serving yet; port 0 is any free one. Raises UserError where the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, page)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: nobody reads a line for each request."""

    try:
        server = _Server((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port}: cannot listen on {HOST}:{port} ({one_line(error)}); choose another") from error
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Report an error, unless the page was closed while it was answered."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _answer(request: BaseHTTPRequestHandler, page: LivePage) -> None:
    if request.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
        return _send(request, 403, "text/plain", "this server answers for 127.0.0.1 only", "")
    if request.path not in ("/", "/data.json"):
        return _send(request, 404, "text/plain", "there is / and /data.json", "")
    try:
        tag, newest = page.newest()
    except UserError as error:
        return _send(request, 503, "text/plain", str(error), "")
    if request.path == "/":
        return _send(request, 200, "text/html", as_html(newest), "")
    if request.headers.get("If-None-Match") == tag:
        return _send(request, 304, "application/json", "", tag)
    return _send(request, 200, "application/json", as_json(newest), tag)


def _send(request: BaseHTTPRequestHandler, status: int, kind: str, text: str, tag: str) -> None:
    body = text.encode("utf-8")
    request.send_response(status)
    request.send_header("Content-Type", f"{kind}; charset=utf-8")
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Cache-Control", "no-store")
    request.send_header("X-Content-Type-Options", "nosniff")
    if tag:
        request.send_header("ETag", tag)
    request.end_headers()
    request.wfile.write(body)
