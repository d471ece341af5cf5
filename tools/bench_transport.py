"""A step's batch from the driver to its ranks, with real packing and processes: CPU seconds, bytes and copies.

    python tools/bench_transport.py                         # all cases, a few minutes, 8 GB of memory
    python tools/bench_transport.py --cases 512x8k-dp4      # one

A case is a step with the ranks of four nodes of eight. One node's ranks are processes that receive and open their
shares; of the other nodes' shares the driver does its part. As a step does, each case sends every rank its share before
the passes that find old log-probs, and then what changed since. A small step goes first, so that code is loaded; then
come two. Of a case the table has, CPU seconds and bytes as the mean of both steps,

    bytes a token     of a share, prompts and tables too, over its response tokens
    driver CPU        seconds of both calls together: packing (with the plan of micro-batches), pickling, sending; the
                      last is one copy of each share into memory that its ranks of a node map
    to a node         bytes of both calls
    copies            the most that the driver held above the step's sequences, over the shares' bytes: the packed
                      shares (1), what packing needs beside them, and the largest share's file on its way (1 / dp)
    stays             what the driver holds of two steps when they are over, without Python's search for cycles
    receiving         from the first byte to micro-batches whose ids were read: CPU seconds of the slowest rank
    before shares     the same with every micro-batch's fields pickled whole, for all ranks, twice
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import pickle
import random
import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from results import Figure, Setting, report, unusual

from megasharp.batching.delivery import Update, annotated, opened, shares_of, updates_of
from megasharp.batching.packing import PackLayout, pack
from megasharp.batching.share import Share
from megasharp.batching.views import Annotation, Kept
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Sequence as TrainSequence
from megasharp.common.records import StepBatch
from megasharp.learner.learner import POLICY, RankLearner
from megasharp.learner.ranks.messages import Message, Shared, receive, send
from megasharp.learner.ranks.processes import Call

NODE = 8
TOKEN_BAR, CPU_BAR, NODE_BAR, COPIES_BAR = 24.0, 0.5, 100.0, 1.1
_MB = 1e6
_TICKET = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A step: groups of responses to prompts of `prompt` tokens, and the ranks that train on it.

    `shortest` and `longest` bound the responses, which are evenly spread. `by_token`: each token has an advantage and a
    mask of its own, which few methods give it.
    """

    prompts: int
    group: int
    prompt: int
    shortest: int
    longest: int
    layout: ParallelLayout
    mini_batches: int = 1
    budget: int = 20480
    by_token: bool = False
    bars: bool = False


_TP8, _DP32 = ParallelLayout(dp=4, tp=8), ParallelLayout(dp=32)
CASES: dict[str, Case] = {
    "512x8k-dp4": Case(64, 8, 512, 8192, 8192, _TP8, bars=True),
    "512x8k-dp32": Case(64, 8, 512, 8192, 8192, _DP32, bars=True),
    "512x8k-dp4-by-token": Case(64, 8, 512, 8192, 8192, _TP8, by_token=True, bars=True),
    "128x8k-dp4": Case(16, 8, 512, 8192, 8192, _TP8),
    # examples/qwen2.5-32b-casp: responses as its plan assumes them.
    "casp-32b": Case(1024, 8, 512, 1, 8192, _TP8, mini_batches=4),
}


def sequences(case: Case) -> list[TrainSequence]:
    """Return the step's training sequences, with values of all bits."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    made = []
    for group in range(case.prompts):
        prompt = torch.randint(0, 150_000, (case.prompt,), generator=generator)
        for index in range(case.group):
            count = rng.randint(case.shortest, case.longest)
            logp_T = -torch.rand(2, count, generator=generator)
            # One value for a whole response costs no memory, as methods give it.
            advantage_T, mask_T = (
                torch.tensor([rng.gauss(0.0, 1.0)]).double().expand(count),
                torch.ones(1).expand(count),
            )
            if case.by_token:
                advantage_T, mask_T = logp_T[0].double(), (logp_T[1] > -0.5).float()
            made.append(
                TrainSequence(
                    group_id=f"g{group}",
                    index=index,
                    group_size=case.group,
                    group_correct=case.group // 2,
                    seed=rng.getrandbits(64),
                    tokens=torch.cat([prompt, torch.randint(0, 150_000, (count,), generator=generator)]),
                    prompt_length=case.prompt,
                    reward=float(index % 2),
                    correct=bool(index % 2),
                    advantage_T=advantage_T,
                    mask_T=mask_T,
                    sampler_logp_T=logp_T[0],
                    policy_logp_T=logp_T[1],
                )
            )
    return made


@dataclass(frozen=True, slots=True)
class Received:
    """CPU seconds of a rank for a call, from its first byte to opened micro-batches; their tokens' sum."""

    seconds: float
    ids: int


def rank(connection: Connection) -> None:
    """Receive calls, open the micro-batches of shares and read all of their ids, until the driver is gone."""
    while True:
        connection.poll(None)
        before = time.process_time()
        try:
            call: Call = receive(connection)
        except EOFError:
            return
        ids, (share, *_) = 0, call.args
        if isinstance(share, Share):
            ids = sum(int(micro.tokens_P.sum()) for micros in opened(share, draws=False) for micro in micros)
        elif isinstance(share, Update) and share.labels is not None:
            ids = int(share.labels.advantage.values.numel())
        del call, share
        send(connection, Message.of(Received(time.process_time() - before, ids)))


@contextmanager
def node(layout: ParallelLayout) -> Iterator[list[tuple[int, int, Connection]]]:
    """Yield the ranks of the first node: data-parallel place, process id, connection."""
    context = multiprocessing.get_context("fork")
    ranks, processes = [], []
    for number in range(min(NODE, layout.world)):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ranks.append((layout.data_rank(number), process.pid or 0, ours))
    try:
        yield ranks
    finally:
        # Each holds our ends of the pipes of those before it, so that none sees us close them.
        for process in processes:
            process.kill()
            process.join()


@dataclass(slots=True)
class Driver:
    """Costs of the driver: CPU seconds by name, bytes that go to the first node, largest share on its way."""

    cpu: dict[str, float] = field(default_factory=dict)
    to_node: int = 0
    largest: int = 0
    receiving: float = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's CPU seconds under a name."""
        before = time.process_time()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - before

    def call(self, ranks: Sequence[tuple[int, int, Connection]], shares: Sequence[object]) -> list[Received]:
        """Send every share to its ranks of the first node, and as `ProcessRanks` does prepare all others."""
        for place, share in enumerate(shares):
            with self.timed("pickling"):
                message = Message.of(Call(POLICY, RankLearner.step, (share, None)))
            own = [(process, connection) for of, process, connection in ranks if of == place]
            size = len(message.pickled) + sum(message.sizes)
            self.to_node += size if own else 0
            self.largest = max(self.largest, size)
            with self.timed("sending"), closing(Shared(message)) as shared:
                for process, connection in own:
                    shared.send(connection, process)
        found: list[Received] = [receive(connection) for _, _, connection in ranks]
        self.receiving += max(one.seconds for one in found)
        return found


def peak_bytes(reset: bool = False) -> int:
    """Return the most memory that this process had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the memory that this process has now, less what its allocator has for others to come."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


_STEPS = 2


def measure(name: str, case: Case) -> list[Figure]:
    """Send a case's step twice, and return its rows of the table."""
    step, driver = sequences(case), Driver()
    tokens = sum(sequence.response_length for sequence in step)
    with node(case.layout) as ranks:
        _sent(dataclasses.replace(case, prompts=4), step[: 4 * case.group], Driver(), ranks)
        gc.collect()
        gc.disable()
        before = resident_bytes()
        peak_bytes(reset=True)
        for _ in range(_STEPS):
            size, ids = _sent(case, step, driver, ranks)
        held, stays = peak_bytes() - before, resident_bytes() - before
        gc.enable()
    batch = pack(step, _cut(case), seed=0)
    assert ids == sum(int(micro.tokens_P.sum()) for mini in batch.mini_batches for micro in mini.per_rank[0])
    rows = _rows(name, case, driver, size, tokens, held)
    rows.append(Figure(f"{name}: stays", stays / _MB, "MB", repeats=_STEPS, note=f"shares have {size / _MB:.0f} MB"))
    return [*rows, *_before(name, case, batch, driver)]


def _cut(case: Case) -> PackLayout:
    return PackLayout(case.layout.dp, case.budget, case.mini_batches, 8, 1.0)


def _sent(
    case: Case, step: Sequence[TrainSequence], driver: Driver, ranks: Sequence[tuple[int, int, Connection]]
) -> tuple[int, int]:
    """Pack and send a step, share and update; returns the bytes of all shares, and the sum of ids that rank 0 read."""
    with driver.timed("packing"):
        batch = pack(step, _cut(case), seed=0)
        shares = shares_of(batch)
    size = sum(share.bytes for share in shares if isinstance(share, Share))
    found = driver.call(ranks, shares)
    with driver.timed("packing"):
        kept = Kept(_TICKET, frozenset({"old_logp_T"}))
        updates = updates_of(annotated(batch, kept, [Annotation()] * case.layout.dp), _TICKET)
    assert not any(update.share for update in updates), "a share would be sent again"
    driver.call(ranks, updates)
    assert len(found) == len(ranks)
    return size, found[0].ids


def _rows(name: str, case: Case, driver: Driver, size: int, tokens: int, held: int) -> list[Figure]:
    total = sum(driver.cpu.values()) / _STEPS
    parts = ", ".join(f"{part} {seconds / _STEPS:.2f}" for part, seconds in driver.cpu.items())
    bar, sent, receiving = case.bars, driver.to_node / _STEPS / _MB, driver.receiving / _STEPS
    slowest = "slowest of 8 ranks on this machine's cores"
    own, moving = held / size, driver.largest / size
    where = f"{own:.2f} in the driver, {moving:.2f} on its way"
    return [
        Figure(f"{name}: bytes a response token", size / tokens, "bytes", TOKEN_BAR),
        Figure(f"{name}: driver CPU", total, "s", CPU_BAR if bar else None, repeats=_STEPS, note=parts),
        Figure(f"{name}: to a node", sent, "MB", NODE_BAR if bar else None, repeats=_STEPS, note="both calls"),
        Figure(
            f"{name}: copies in the driver", own + moving, "", COPIES_BAR if bar else None, repeats=_STEPS, note=where
        ),
        Figure(f"{name}: receiving", receiving, "s", repeats=_STEPS, note=slowest),
    ]


def _whole(record: object) -> object:
    """Return a plain record with tensors in memory of their own: PyTorch pickles a view's whole storage."""
    if isinstance(record, torch.Tensor):
        return record.clone()
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    plain = dataclasses.replace(record)
    return dataclasses.replace(
        plain, **{each.name: _whole(getattr(plain, each.name)) for each in dataclasses.fields(plain)}
    )


def _before(name: str, case: Case, batch: StepBatch, driver: Driver) -> list[Figure]:
    """Pickle and unpickle every rank's micro-batches with all fields, one rank's at a time: memory holds no more."""
    size, pickling, unpickling = 0, 0.0, 0.0
    for place in range(case.layout.dp):
        plain = [[_whole(micro) for micro in mini.per_rank[place]] for mini in batch.mini_batches]
        started = time.process_time()
        data = pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
        pickling += time.process_time() - started
        size += len(data)
        del plain
        started = time.process_time()
        pickle.loads(data)
        unpickling += time.process_time() - started
        del data
    total = sum(driver.cpu[part] for part in ("pickling", "sending")) / _STEPS
    times = 2 * size * _STEPS / driver.to_node
    return [
        Figure(f"{name}, before shares: pickling", 2 * pickling, "s", note=f"{2 * pickling / total:.0f} times as long"),
        Figure(f"{name}, before shares: unpickling on each rank", 2 * unpickling, "s"),
        Figure(
            f"{name}, before shares: to a node",
            2 * size / _MB,
            "MB",
            note=f"{times:.0f} times as much; to each rank of it where ranks are processes",
        ),
    ]


def main() -> None:
    """Parse, measure every case, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for name in arguments.cases:
        # A process of its own: memory of the case before would hide the peak of the next.
        figures += _alone(name)
    settings: dict[str, Setting] = {
        name: f"{case.prompts} x {case.group} responses of {case.shortest} to {case.longest} tokens, prompts of "
        f"{case.prompt}, dp {case.layout.dp} x tp {case.layout.tp}, {case.mini_batches} mini-batch(es)"
        for name, case in CASES.items()
        if name in arguments.cases
    }
    report("bench_transport", figures, settings, subject=unusual(parser, arguments, ("cases",)))


def _alone(name: str) -> list[Figure]:
    """Measure a case in a child process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        theirs.send(measure(name, CASES[name]))
        os._exit(0)
    theirs.close()
    found: list[Figure] = ours.recv()
    os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    main()
