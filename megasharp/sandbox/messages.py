"""Messages over a socket: a length, then so many bytes, sent and received whole or not at all before a deadline.

The deadline holds for sending too: who does not read what is sent (a process that was stopped) holds nobody up.
"""

from __future__ import annotations

import socket
import struct
import time

_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20


class PeerGone(Exception):
    """The process at the other end has ended, or closed its end."""


def send(peer: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send a message. `deadline` is in seconds of time.monotonic(); raises TimeoutError there, and PeerGone."""
    for part in (_LENGTH.pack(len(message)), message):
        _limit(peer, deadline)
        try:
            peer.sendall(part)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error


def receive(peer: socket.socket, deadline: float | None = None) -> bytes:
    """The next message. `deadline` is in seconds of time.monotonic(); raises TimeoutError there, and PeerGone."""
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, deadline))
    return _exactly(peer, length, deadline)


def _exactly(peer: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        _limit(peer, deadline)
        try:
            part = peer.recv(min(_PIECE, length - len(parts)))
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("closed its end")
        parts += part
    return bytes(parts)


def _limit(peer: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        peer.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    peer.settimeout(left)
