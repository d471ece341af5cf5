"""Environments behind an OpenEnv server, whose protocol is JSON over a WebSocket, one session a connection.

    use: openenv
    options:
      url: http://localhost:8000
      action: message          # the field of its actions that the policy's turn is; null: the turn is the whole action
      observation: response    # the field of its observations that the policy reads; null: all of them, as JSON
    rows: rows.jsonl           # fields of a row, but `id`, are arguments of the environment's reset

The server is somebody else's process, with its own Python and libraries: nothing of OpenEnv's package is needed here.
Its reset by a row must be repeatable. Each response that is sampled holds a session from its first turn to its last, so
the server has to allow as many (`max_concurrent_envs`).

An action that the server's schema refuses is answered by what is wrong with it. Other errors of the server's are
failures of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from megasharp.common.errors import UserError, one_line
from megasharp.tasks.environment import Observation, Row
from megasharp.tasks.environments.text_play import TextPlay

_MOST_BYTES = 1 << 26
_LOCAL = ("localhost", "127.0.0.1", "::1")


class OpenEnv(TextPlay):
    """A session at a server."""

    def __init__(
        self,
        url: str,
        action: str | None = "message",
        observation: str | None = None,
        fixed: Mapping[str, Any] | None = None,
        **texts: Any,
    ) -> None:
        """`fixed` are fields that each action has besides the policy's."""
        super().__init__(**texts)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise UserError(f"url: {url!r} is no address such as http://localhost:8000")
        scheme = "wss" if parts.scheme in ("https", "wss") else "ws"
        self._address = urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", parts.query, ""))
        self._proxy = None if parts.hostname in _LOCAL else True
        self._action, self._observation, self._fixed = action, observation, dict(fixed or {})
        self._connect = _library()
        self._socket: Any = None

    async def reset(self, row: Row) -> Observation:
        """Open a session and begin."""
        await self.close()
        self._socket = await self._connect(self._address, max_size=_MOST_BYTES, proxy=self._proxy)
        kind, data = await self._ask("reset", {name: value for name, value in row.items() if name != "id"})
        if kind == "error":
            raise RuntimeError(f"the server cannot begin: {_told(data)}")
        return self._first(self._text(data))

    async def step(self, action: str) -> Observation:
        """Send the action."""
        try:
            given = json.loads(action) if self._action is None else {self._action: action.strip()}
        except (ValueError, RecursionError) as error:
            return self._next(f"No such action. It must be a JSON object ({one_line(error)}).", None)
        if not isinstance(given, dict):
            return self._next("No such action. It must be a JSON object.", None)
        kind, data = await self._ask("step", {**given, **self._fixed})
        if kind == "error":
            self._refuse(data)
            return self._next(f"No such action. {_told(data)}.", None)
        return self._next(self._text(data), action.strip(), float(data.get("reward") or 0.0), bool(data.get("done")))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        return answer["type"], answer["data"]

    def _refuse(self, data: Mapping[str, Any]) -> None:
        """Raise but for an error that is the policy's. Names of fields are the policy's only where it writes them."""
        kinds = {error.get("type") for error in data.get("errors", ())}
        if data.get("code") != "VALIDATION_ERROR":
            raise RuntimeError(f"the server failed: {_told(data)}")
        if self._action is not None and kinds & {"missing", "extra_forbidden"}:
            raise UserError(f"openenv: the server's actions have other fields than {self._action} ({_told(data)})")

    def _text(self, data: Mapping[str, Any]) -> str:
        seen = data["observation"]
        if self._observation is None:
            return json.dumps({name: value for name, value in seen.items() if name != "metadata"}, ensure_ascii=False)
        if self._observation not in seen:
            raise UserError(f"openenv: observations have no field {self._observation!r}, but {', '.join(sorted(seen))}")
        found = seen[self._observation]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _told(data: Mapping[str, Any]) -> str:
    errors = (f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in data.get("errors", ()))
    return "; ".join(errors) or str(data.get("message", data))


def _library() -> Any:
    try:
        from websockets.asyncio.client import connect
    except ImportError as error:
        raise UserError(
            f"environments of OpenEnv need the library websockets ({one_line(error)}); "
            "pip install 'megasharp[environments]'"
        ) from error
    return connect
