"""Where an engine's ranks meet: a store that listens at one address.

torch's own listens on every interface of the machine, and takes and gives values without asking who it is.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

_LISTEN = 128


@contextmanager
def held_port() -> Iterator[int]:
    """A free port, kept for the ranks' store from what others on this machine are given meanwhile.

    SGLang looks for a free one and binds it when its processes have done their imports, half a minute later perhaps.
    Bound and not listened on, with reuse on both sides, it can be taken over.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def meet_at_one_address() -> None:
    """Have the store of a group's rank 0 listen only at the address that the other ranks get."""
    # The package has a function of the module's name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create: Callable[..., Store] = rendezvous._create_c10d_store
    if getattr(create, "__module__", "") == __name__:
        return

    def store(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: object) -> Store:
        if rank != 0:
            return create(hostname, port, rank, world_size, timeout, *rest)
        listener = socket.create_server((hostname, port), backlog=_LISTEN)
        return TCPStore(
            hostname,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    rendezvous._create_c10d_store = store
