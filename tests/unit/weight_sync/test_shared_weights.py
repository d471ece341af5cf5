"""Weights read out of lent memory: what arrives, however it is cut, and that no old handle is ever read.

Lender and borrower are the run's own; handles are of files in shared memory. What is expected is what lies there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from waiting import HANG_S

from megasharp.config.rollout import SyncConfig
from megasharp.convert.hf_folder import TensorView
from megasharp.rollout.sglang.bucket import Header, checksum, flat_size, laid_out, new_stamp, parse_header, unflattened
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, Refused
from megasharp.rollout.sglang.shared_weights import (
    NOT_HELD,
    NOT_OPEN,
    Borrower,
    DeviceHandle,
    FileHandle,
    Goal,
    Loan,
    Memory,
    Piece,
    handle_of,
    memory_to_json,
    opened,
    parse_loan,
    parse_memory,
)
from megasharp.weight_sync.colocation import SharePlan
from megasharp.weight_sync.ipc import share

ROWS, COLUMNS = 12, 8
CONFIG = SyncConfig(bucket_mb=1, limit_s=5.0)
READER = """
import sys
from megasharp.rollout.sglang.bucket import checksum
from megasharp.rollout.sglang.shared_weights import opened, parse_memory
(handle,) = parse_memory(sys.stdin.read()).handles
print(checksum(opened(handle)))
"""


class Place:
    pp, exports, first_stage, last_stage = 0, True, True, True


class Part:
    """A rank that holds a matrix cut by rows, by columns and whole, and a vector; all in one buffer."""

    device, place = torch.device("cpu"), Place()

    def __init__(self, seed: int = 0, stays: bool = True) -> None:
        self.weights_stay = stays
        self.moves = 0
        self.exports = 0
        self.buffer = torch.randn(3 * ROWS * COLUMNS + 5, generator=torch.Generator().manual_seed(seed))

    def whole(self) -> dict[str, Tensor]:
        *matrices, vector = self.buffer.split([ROWS * COLUMNS] * 3 + [5])
        return {f"{kind}.weight": m.view(ROWS, COLUMNS) for kind, m in zip("abc", matrices, strict=True)} | {
            "n": vector
        }

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        self.exports += 1
        yield from self.whole().items()

    def weight_views(self) -> list[TensorView] | None:
        views = []
        for name, tensor in self.whole().items():
            # In two parts, as query groups are.
            half = len(tensor) // 2
            views += [TensorView(name, 0, 0, tensor[:half]), TensorView(name, 0, half, tensor[half:])]
        return views

    def weights_state(self) -> tuple[int, ...]:
        return (self.moves, self.buffer.data_ptr())

    def move(self) -> None:
        """The weights lie elsewhere, and what was there is spoiled."""
        self.moves += 1
        old, self.buffer = self.buffer, self.buffer.clone()
        old.fill_(float("nan"))


class Engine:
    """Ranks of one engine in this process, cut as SGLang cuts; takes what `EngineApi.load_lent` posts."""

    def __init__(self, tp: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.tp = tp
        self.dtype = dtype
        self.messages: list[str] = []
        self.down = False
        self.restart()

    def restart(self) -> None:
        """Another process, at the same address."""
        rows, columns = ROWS // self.tp, COLUMNS // self.tp
        self.borrowers = [Borrower() for _ in range(self.tp)]
        self.held: list[dict[str, Tensor]] = []
        self.goals: list[dict[str, Goal]] = []
        for rank in range(self.tp):
            fused = torch.full((2 * rows + 3, COLUMNS), 7.0, dtype=self.dtype)
            held = {
                "fused": fused,
                "c": torch.zeros(ROWS, columns, dtype=self.dtype),
                "n": torch.zeros(5, dtype=self.dtype),
            }
            shape = (ROWS, COLUMNS)
            self.held.append(held)
            self.goals.append(
                {
                    "a.weight": Goal(fused[:rows], 0, rank * rows, shape),
                    "b.weight": Goal(fused[rows : 2 * rows], 0, rank * rows, shape, fused[2 * rows :]),
                    "c.weight": Goal(held["c"], 1, rank * columns, shape),
                    "n": Goal(held["n"], 0, 0, (5,)),
                }
            )

    def load_lent(self, ranks: list[list[tuple[str, str]]], limit: float) -> Refused | None:
        if self.down:
            raise EngineFailed("connection refused")
        for rank, [(kind, text), *rest] in enumerate(ranks):
            self.messages.append(text)
            try:
                if kind == "loan":
                    self.borrowers[rank].prepare(parse_loan(text), lambda rank=rank: self.goals[rank], id(self.held))
                    self.borrowers[rank].copy(parse_loan(text))
                else:
                    self.load_bucket(rank, text, parse_memory(rest[0][1]))
            except ValueError as error:
                return Refused(str(error))
        return None

    def load_bucket(self, rank: int, text: str, memory: Memory) -> None:
        header = parse_header(text)
        (flat,) = self.borrowers[rank].storages(memory, header.stamp.push)
        for name, tensor in unflattened(header.tensors, flat):
            goal = self.goals[rank][name]
            goal.values.copy_(tensor.narrow(goal.cut, goal.first, goal.values.shape[goal.cut]))
            if goal.padding is not None:
                goal.padding.zero_()

    def end_push(self) -> None:
        for borrower in self.borrowers:
            borrower.end_push()

    def check(self, part: Part) -> None:
        """It holds the part's weights, each rank its own."""
        want = {name: tensor.to(self.dtype) for name, tensor in part.whole().items()}
        for goals in self.goals:
            for name, goal in goals.items():
                assert torch.equal(goal.values, want[name].narrow(goal.cut, goal.first, goal.values.shape[goal.cut]))
                assert goal.padding is None or not goal.padding.any()


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def push(part: object, *engines: Engine, verify: bool = False, prefix: str = "") -> dict[str, str]:
    """One push to the end; the digests. Fails where an engine does."""
    apis: tuple[tuple[int, EngineApi], ...] = tuple(enumerate(engines))  # type: ignore[arg-type]
    config = CONFIG.model_copy(update={"verify": verify})
    plan = SharePlan(new_stamp(1, None), prefix, engines[0].dtype, config, apis, engines[0].tp)
    sent = share(part, plan)  # type: ignore[arg-type]
    assert sent is not None and sent.good, sent
    for engine in engines:
        engine.end_push()
    return sent.digests


def kinds(messages: list[str]) -> list[str]:
    """What of a loan each message had: its handles, its pieces, or neither."""
    loans = [parse_loan(text) for text in messages]
    return [f"{'h' * (loan.memory.handles is not None)}{'p' * (loan.pieces is not None)}" for loan in loans]


@each_case("tp", [1, 2, 4])
@each_case("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_its_part_and_is_told_only_once(tp: int, dtype: torch.dtype) -> None:
    part, engine = Part(), Engine(tp, dtype)
    for _ in range(3):
        part.buffer.mul_(1.25)
        push(part, engine)
        engine.check(part)
    assert kinds(engine.messages) == ["hp"] * tp + [""] * (2 * tp)
    assert max(len(text) for text in engine.messages[tp:]) < 300
    assert part.exports == 0, "nothing was gathered"


def test_memory_that_moved_is_handed_out_anew() -> None:
    part, engine = Part(), Engine()
    push(part, engine)
    part.move()
    push(part, engine)
    engine.check(part)
    part.move()
    part.move()
    push(part, engine)
    engine.check(part)
    assert kinds(engine.messages) == ["hp", "h", "h"]


def test_an_old_generation_is_never_read() -> None:
    part, engine = Part(), Engine()
    push(part, engine)
    before = {name: tensor.clone() for name, tensor in engine.held[0].items()}
    loan = parse_loan(engine.messages[0])
    newer = Memory(loan.memory.lender, loan.memory.generation + 1, True)
    borrower = engine.borrowers[0]
    with pytest.raises(ValueError, match=NOT_OPEN):
        borrower.prepare(Loan(loan.stamp, newer, loan.layout), lambda: engine.goals[0], id(engine.held))
    with pytest.raises(ValueError, match=NOT_OPEN):
        # What was open is closed by it: the older generation does not come back either.
        older = Memory(loan.memory.lender, loan.memory.generation, True)
        borrower.prepare(Loan(loan.stamp, older, loan.layout), lambda: engine.goals[0], id(engine.held))
    with pytest.raises(ValueError, match=f"{NOT_OPEN}: layout other"):
        borrower.prepare(Loan(loan.stamp, loan.memory, "other"), lambda: engine.goals[0], id(engine.held))
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.held[0].items())


def test_an_engine_that_began_anew_is_told_everything() -> None:
    part, engine, other = Part(), Engine(), Engine()
    push(part, engine, other)
    engine.restart()
    push(part, engine, other)
    engine.check(part)
    other.check(part)
    assert kinds(engine.messages) == ["hp", "", "hp"]
    assert kinds(other.messages) == ["hp", ""]


def test_another_learner_is_not_mistaken_for_the_last() -> None:
    """A resumed run: the same engine, weights that lie elsewhere."""
    engine = Engine()
    for seed in range(3):
        part = Part(seed)
        push(part, engine)
        engine.check(part)
    assert kinds(engine.messages) == ["hp"] * 3


def test_what_was_lent_for_one_push_is_closed_by_its_end() -> None:
    part, engine = Part(stays=False), Engine()
    push(part, engine)
    borrower = engine.borrowers[0]
    assert not borrower._open
    part.move()
    push(part, engine)
    engine.check(part)
    assert kinds(engine.messages) == ["hp", "h"]


def test_what_a_broken_push_left_open_is_closed_by_the_next() -> None:
    part, engine = Part(stays=False), Engine()
    plan = SharePlan(new_stamp(1, None), "", torch.float32, CONFIG, ((0, engine),), 1)  # type: ignore[arg-type]
    assert share(part, plan) is not None
    assert len(engine.borrowers[0]._open) == 1, "its end never came"
    other = Part(1)
    push(other, engine)
    assert [name for name, _ in engine.borrowers[0]._open.items()] == [parse_loan(engine.messages[1]).memory.lender]


def test_goals_that_moved_are_found_again() -> None:
    """An engine whose parameters were replaced: nothing is copied to where they were."""
    part, engine = Part(), Engine()
    push(part, engine)
    left = engine.held[0]["fused"]
    engine.goals[0] = {
        name: Goal(goal.values.clone(), goal.cut, goal.first, goal.shape) for name, goal in engine.goals[0].items()
    }
    engine.held = list(engine.held)
    part.buffer.add_(1)
    before = left.clone()
    push(part, engine)
    engine.check(part)
    assert torch.equal(left, before)


def test_weights_that_lie_elsewhere_come_in_buckets() -> None:
    """The engine needs more than this rank has: it says so before it copies, and is not asked again."""

    class Half(Part):
        def weight_views(self) -> list[TensorView] | None:
            return [view for view in super().weight_views() or [] if view.name != "a.weight" or view.start == 0]

    part, engine = Half(), Engine()
    for _ in range(2):
        part.buffer.mul_(1.5)
        push(part, engine)
        engine.check(part)
    assert part.exports == 2
    assert [text.startswith('{"stamp"') for text in engine.messages] == [True, False, False]
    with pytest.raises(ValueError, match=f"{NOT_HELD} a.weight as it is cut here"):
        engine.borrowers[0].prepare(parse_loan(engine.messages[0]), lambda: engine.goals[0], "anew")


def test_adapters_come_in_buckets() -> None:
    class Adapted(Part):
        def weight_views(self) -> list[TensorView] | None:
            return None

    part, engine = Adapted(), Engine(2)
    digests = push(part, engine, verify=True)
    engine.check(part)
    assert digests == {name: checksum(tensor) for name, tensor in part.whole().items()}


def test_a_part_that_cannot_lend_comes_in_buckets_of_memory_that_is_kept() -> None:
    class Plain:
        """Satisfies `RankPart` alone."""

        device, place = torch.device("cpu"), Place()

        def __init__(self) -> None:
            self.export_weights = Part(3).export_weights

    engine = Engine(dtype=torch.bfloat16)
    opened_at = []
    for _ in range(2):
        push(Plain(), engine)
        engine.check(Part(3))
        (memory,) = engine.borrowers[0]._open.values()
        opened_at.append((memory.generation, memory.storages[0].data_ptr()))
    assert opened_at[0] == opened_at[1]


def test_digests_are_of_what_engines_hold() -> None:
    part, engine = Part(), Engine(dtype=torch.bfloat16)
    digests = push(part, engine, verify=True)
    assert digests == {name: checksum(tensor.bfloat16()) for name, tensor in part.whole().items()}


def test_an_engine_that_fails_is_named_and_the_others_get_all() -> None:
    part, engine, other = Part(), Engine(), Engine()
    engine.down = True
    apis = ((4, engine), (7, other))
    plan = SharePlan(new_stamp(1, None), "", torch.float32, CONFIG, apis, 1)  # type: ignore[arg-type]
    sent = share(part, plan)  # type: ignore[arg-type]
    assert sent is not None
    assert {number: failure.kind for number, failure in sent.failures.items()} == {4: "gone"}
    other.check(part)


@each_case("change", ["name", "shape"])
def test_a_network_that_is_not_the_engines_is_refused_unread(change: str) -> None:
    part, engine = Part(), Engine()
    goals = engine.goals[0]
    if change == "name":
        del goals["a.weight"]
    else:
        goals["a.weight"] = Goal(torch.zeros(ROWS, 3), 0, 0, (ROWS, 3))
    apis: tuple[tuple[int, EngineApi], ...] = ((0, engine),)  # type: ignore[assignment]
    sent = share(part, SharePlan(new_stamp(1, None), "", torch.float32, CONFIG, apis, 1))  # type: ignore[arg-type]
    assert sent is not None
    message = "has no weight a.weight" if change == "name" else "a.weight came with shape"
    assert message in sent.failures[0].reason
    assert not engine.held[0]["c"].any(), "nothing was copied"


def test_a_tied_models_spare_head_is_left_out() -> None:
    class Tied(Part):
        def weight_views(self) -> list[TensorView] | None:
            return [*(super().weight_views() or []), TensorView("lm_head.weight", 0, 0, self.buffer[:5])]

    part, engine = Tied(), Engine()
    push(part, engine)
    engine.check(part)


def test_another_process_reads_the_same_bytes() -> None:
    tensor = torch.arange(600, dtype=torch.float32)
    text = memory_to_json(Memory("a", 1, True, (handle_of(tensor.untyped_storage()),)))
    tensor.mul_(3)
    done = subprocess.run(
        [sys.executable, "-c", READER], input=text, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == checksum(tensor)


def test_memory_that_is_gone_is_refused() -> None:
    tensor = torch.ones(300)
    handle = handle_of(tensor.untyped_storage())
    del tensor
    with pytest.raises(ValueError, match="lent memory cannot be opened"):
        opened(handle)


def test_messages_survive_json() -> None:
    device = DeviceHandle("GPU-1", "00ff", 5, 6, "aa", 7, "bb", True)
    memory = Memory("x", 3, False, (FileHandle("m", "n", 4), device))
    assert parse_memory(memory_to_json(memory)) == memory
    loan = Loan(new_stamp(1, 2), memory, "l", (Piece("a", 1, 2, (3, 4), "bfloat16", 0, 64),))
    assert parse_loan(loan.to_json()) == loan
    bare = Loan(new_stamp(1, None), Memory("x", 3, True), "l")
    assert parse_loan(bare.to_json()) == bare
    for text in ("{}", "[]", '{"memory": 3}', "nonsense"):
        with pytest.raises(ValueError):
            parse_loan(text)
        with pytest.raises(ValueError):
            parse_memory(text)


def test_one_flat_tensor_holds_a_bucket() -> None:
    named = [("a", torch.ones(3)), ("b", torch.zeros(2, 2, dtype=torch.bfloat16))]
    entries = laid_out(named)
    assert Header(new_stamp(0, None), entries).tensors == entries
    assert flat_size(entries) % 64 == 0


HOLDER = """
import os, socket, sys, torch
from megasharp.rollout.sglang.shared_weights import Memory, handle_of, memory_to_json
ours, theirs = socket.socketpair()
os.set_inheritable(theirs.fileno(), True)
tensor = torch.ones(300)
print(memory_to_json(Memory("a", 1, True, (handle_of(tensor.untyped_storage()),))), flush=True)
assert not os.get_inheritable(theirs.fileno()), "its peers would wait for a program of torch's"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel says what is open")
def test_a_lenders_pipes_end_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
