"""HTTP to a server of OpenAI's API: the address that a user gives, the key, and calls that another thread may end.

The key comes from the environment and is taken out of it. It goes nowhere but into the header of calls to this address:
redirects are not followed, and it is cut out of what a server says of an error. Proxies are those of the environment,
but for the loopback.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any
from urllib.parse import unquote, urlsplit

from megasharp.common.errors import UserError, one_line

KEY_VARIABLE = "MEGASHARP_ENDPOINT_KEY"
# Paths of calls, which a pasted address may end with.
_CALLS = ("/chat/completions", "/completions", "/models")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Far more than any answer has; a server that never ends one would fill the memory.
_MOST_BYTES = 1 << 28
_CHUNK = 1 << 16
_PORTS = {"http": 80, "https": 443}


class Failed(Exception):
    """The server cannot be reached, hung up, was late, or sent half an answer: asking again may help."""


class Late(Failed):
    """The server has not answered within the time limit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer; `retry_after_s` is how long it asks callers to wait, None where it does not say."""

    status: int
    text: str
    retry_after_s: float | None = None
    location: str = ""

    def json(self) -> Any:
        """Return the body. Raises Failed where it is no JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise Failed(f"the answer is no JSON: {self.text[:100]!r}") from error

    @property
    def message(self) -> str:
        """The server's own words about an error, in one line."""
        try:
            body: Any = json.loads(self.text)
        except (ValueError, RecursionError):
            body = None
        while isinstance(body, dict) and (inner := body.get("error", body.get("message", body.get("detail")))):
            body = inner
        return " ".join(str(body or self.text).split())[:400] or "no message"

    @property
    def param(self) -> str:
        """The field that an error is about, where the server says it apart from its message; else empty."""
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            return str(json.loads(self.text)["error"]["param"] or "")
        return ""


@dataclass(frozen=True, slots=True)
class Address:
    """A server's base address, to which `/chat/completions` and so on are added.

    As text it is without its query, which may hold what nobody should read: results are identified by it.

    Example: `Address.parse("localhost:30000")` is that of http://localhost:30000/v1.
    """

    scheme: str
    host: str
    port: int
    path: str
    query: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read an address; without a path it is that of version 1. Raises UserError for what is none."""
        split = urlsplit(url if "://" in url else f"http://{url}")
        if split.username is not None or split.password is not None:
            raise UserError(
                f"--endpoint: the address of {split.hostname} holds a password, which lists of processes show; "
                f"put the key into the environment variable {KEY_VARIABLE}"
            )
        try:
            port = split.port or _PORTS[split.scheme]
        except (KeyError, ValueError):
            port = 0
        if not split.hostname or not port:
            raise UserError(f"--endpoint {url}: expected an address such as http://localhost:30000/v1")
        path = split.path.rstrip("/")
        for call in _CALLS:
            path = path.removesuffix(call)
        return cls(split.scheme, split.hostname, port, path or "/v1", split.query)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    @property
    def is_local(self) -> bool:
        """Return whether it is on this machine."""
        return self.host in _LOOPBACK


class Call:
    """One call under way, which another thread may end."""

    def __init__(self) -> None:
        self.ended = Event()
        self._connection: http.client.HTTPConnection | None = None

    def end(self) -> None:
        """Hang up; the server sees that nobody waits. What waits for the answer gets Failed."""
        self.ended.set()
        connection = self._connection
        if connection is not None and (sock := connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def uses(self, connection: http.client.HTTPConnection | None) -> None:
        """Note the connection that it has now."""
        self._connection = connection


class Server:
    """One server: each call has a connection of its own, which is little beside the seconds that a sample takes."""

    def __init__(self, address: Address, key: str | None = None) -> None:
        """Take the key out of the environment, which workers that judge inherit, unless another is given.

        Raises UserError for a key that no header may hold.
        """
        self.address = address
        self._key = os.environ.pop(KEY_VARIABLE, "").strip() if key is None else key
        if not self._key.isascii() or not self._key.isprintable():
            raise UserError(f"{KEY_VARIABLE}: the key holds characters that no HTTP header may hold")

    @property
    def has_key(self) -> bool:
        """Return whether there is a key."""
        return bool(self._key)

    def ask(self, path: str, body: object, limit_s: float, call: Call | None = None) -> Answer:
        """POST `body`, or GET where it is None; redirects are answers. The whole of it may take `limit_s`.

        Raises Failed where there is no whole answer.
        """
        call, deadline = call or Call(), time.monotonic() + limit_s
        connection, prefix = self._connection(limit_s)
        call.uses(connection)
        target = f"{prefix}{self.address.path}{path}" + (f"?{self.address.query}" if self.address.query else "")
        try:
            connection.connect()
            # From here on `end` finds a socket to hang up.
            if call.ended.is_set():
                raise Failed("the call was ended")
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "megasharp"}
            headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connection.request("GET" if data is None else "POST", target, data, headers)
            response = connection.getresponse()
            text = _read(response, connection, deadline).decode("utf-8", "replace")
            if self._key and response.status >= 300:
                text = text.replace(self._key, "[the key]")
            return Answer(
                response.status,
                text,
                _seconds(response.headers.get("Retry-After")),
                response.headers.get("Location", ""),
            )
        except TimeoutError as error:
            raise Late(f"no answer within {limit_s:g} s") from error
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # The last two: http.client meets a socket that another thread has ended.
            raise Failed(f"{type(error).__name__}: {one_line(error)}") from error
        finally:
            call.uses(None)
            connection.close()

    def _connection(self, limit_s: float) -> tuple[http.client.HTTPConnection, str]:
        """Return an unopened connection, and what a target begins with there."""
        at = self.address
        kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
        direct = at.is_local or urllib.request.proxy_bypass(at.host)
        found = None if direct else urllib.request.getproxies().get(at.scheme)
        proxy = urlsplit(found if "://" in found else f"http://{found}") if found else None
        if proxy is None or proxy.hostname is None:
            return kind(at.host, at.port, timeout=limit_s), ""
        through = kind(proxy.hostname, proxy.port or 3128, timeout=limit_s)
        headers: dict[str, str] = {}
        if proxy.username is not None:
            words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(words).decode()}"
        if at.scheme == "https":
            through.set_tunnel(at.host, at.port, headers)
            return through, ""
        return through, f"http://{at.host}:{at.port}"


def _read(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    """The whole body; each wait ends at the deadline, so that a server that sends a byte a minute does not hold it."""
    parts: list[bytes] = []
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = response.read1(_CHUNK)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise OSError(f"the answer has more than {_MOST_BYTES >> 20} MiB")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _seconds(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None without one, or for a date."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return max(0.0, value) if value < float("inf") else None
