"""Ranks of an engine meet at one address, whatever torch would do by itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import psutil
import torch
import torch.distributed as dist
from waiting import HANG_S, SOON_S

from megasharp.rollout.sglang.engine.rendezvous import held_port, meet_at_one_address


def rank(number: int, port: int, answer: Connection) -> None:
    meet_at_one_address()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    total = torch.tensor([number + 1.0])
    dist.all_reduce(total)
    connections = psutil.Process().net_connections(kind="tcp")
    answer.send((float(total), [c.laddr.ip for c in connections if c.laddr.port == port and c.status == "LISTEN"]))
    dist.barrier()
    dist.destroy_process_group()


def test_the_store_of_a_group_listens_on_the_address_it_was_given() -> None:
    """The port was held for it, and taken over."""
    context = multiprocessing.get_context("spawn")
    answers, processes = [], []
    with held_port() as port:
        for number in (0, 1):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=rank, args=(number, port, theirs)))
            answers.append(ours)
        for process in processes:
            process.start()
        try:
            assert all(answer.poll(HANG_S) for answer in answers)
            found = [answer.recv() for answer in answers]
        finally:
            for process in processes:
                process.join(SOON_S)
                process.kill()
    assert [total for total, _ in found] == [3.0, 3.0]
    assert [addresses for _, addresses in found] == [["127.0.0.1"], []]
