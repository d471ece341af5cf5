"""A stand-in for a server of OpenAI's API, on the loopback: it answers by a script, and fails in every way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

Json = dict[str, Any]
# From the request's body and its number, from 0 on, to a status and what is sent: an object, or text as it stands.
Script = Callable[[Json, int], "tuple[int, Json | str, dict[str, str]]"]


def chat(body: Json, *texts: str, **changes: Any) -> tuple[int, Json, dict[str, str]]:
    """An answer to a chat request: a choice for each text, of one token a letter."""
    choices = [
        {"index": index, "message": {"content": text}, "finish_reason": "stop", **changes}
        for index, text in enumerate(texts or ("yes",) * body.get("n", 1))
    ]
    tokens = sum(len(text) for text in texts) or 3 * len(choices)
    return 200, {"choices": choices, "usage": {"completion_tokens": tokens}}, {}


def error(status: int, message: str, **headers: str) -> tuple[int, Json, dict[str, str]]:
    return status, {"error": {"message": message}}, {name.replace("_", "-"): value for name, value in headers.items()}


class StandinServer(ThreadingHTTPServer):
    """Requests are in `asked`: path, headers, body. `busiest` is how many were there at once; `hold` keeps them."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[tuple[str, dict[str, str], Json]] = []
        self.lock = Lock()
        self.now = self.busiest = 0
        self.hold = Event()
        self.hold.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandinServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Json) -> None:
        server = self.server
        with server.lock:
            number = len(server.asked)
            server.asked.append((self.path, dict(self.headers), body))
            server.now += 1
            server.busiest = max(server.busiest, server.now)
        server.hold.wait(30)
        status, sent, headers = server.script(body, number)
        with server.lock:
            server.now -= 1
        data = (sent if isinstance(sent, str) else json.dumps(sent)).encode()
        self.close_connection = True
        # Whoever asked may have hung up.
        with suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)


@contextmanager
def serving(script: Script) -> Iterator[StandinServer]:
    server = StandinServer(script)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.hold.set()
        server.shutdown()
        server.server_close()
