"""A process group that joins one rank of the learner with the ranks of engines, outside the learner's own group.

Engines make theirs with SGLang's init_weights_update_group: rank 0 keeps a store at an address, all meet there. This
is the same over torch.distributed alone. Where a rank's default group is, and whether it has one, does not matter.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

_LISTEN = 128


class Meeting:
    """A store that listens at one address only; `port` is where."""

    def __init__(self, host: str, world: int, limit_s: float) -> None:
        listener = socket.create_server((host, 0), backlog=_LISTEN)
        self.port: int = listener.getsockname()[1]
        # torch's own listening would be on every interface of the machine.
        self.store = TCPStore(
            host,
            self.port,
            world,
            is_master=True,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


class SenderGroup:
    """Rank 0 of a group whose other ranks are engines'; blocks until all have joined.

    Raises RuntimeError where they do not within the time limit.
    """

    def __init__(self, meeting: Meeting, name: str, world: int, backend: str, limit_s: float) -> None:
        self._meeting = meeting
        group, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            c10d.Backend(backend),
            PrefixStore(name, meeting.store),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=limit_s),
        )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self._group = group

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor to all other ranks; it must not change until the work is done."""
        work: dist.Work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        return work

    def close(self) -> None:
        """Leave the group, whatever is still under way in it."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(self._group)
