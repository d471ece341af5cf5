"""FA3, FA4 and Transformer Engine under our packed rows: torch's operators and registration are real, kernels are not.

What each argument of ours becomes at the kernels' own interfaces, and that shared prompts, windows and the rows of a
context-parallel rank come out as plain attention has them. Numbers are bfloat16's, as torch's registration wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import stand_in_kernels
import torch
from cases import each_case
from plain_attention import inputs, segments_of, visible, written_out
from stand_in_kernels import Recorded
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.learner import attention_setup
from megasharp.learner.attention import attend
from megasharp.learner.attention_setup import Shape, take_up, tried
from megasharp.learner.context_parallel import ContextCut
from megasharp.learner.packed import packed_rows
from megasharp.ops.attention_kernels import Kernels, Software, software_here

# Prompts of 5 and 1 rows with two and one responses, and runs that share nothing: 40 rows.
RUNS = [(5, -1), (7, 0), (1, 0), (1, -1), (12, 3), (9, -1), (1, -1), (4, -1)]
ROWS = 40
WAYS = ["fa3", "fa4 4.0.0b4", "fa4 4.0.0b36", "te"]
DTYPES = {"te": torch.float64}


@contextmanager
def in_place(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    name, _, version = way.partition(" ")
    if name == "te":
        with stand_in_kernels.engine(monkeypatch) as calls:
            yield calls
        return
    assert name in ("fa3", "fa4")
    with stand_in_kernels.registered(name, monkeypatch, version) as calls:  # type: ignore[arg-type]
        yield calls


def takes_windows(way: str, window: int | None) -> bool:
    """Return whether the installed torch hands these kernels that window; where it does not, a run refuses them."""
    return window is None or not way.startswith("fa4") or software_here().fa4_windows


def near(found: Tensor, expected: Tensor) -> bool:
    """To bfloat16's precision; with a window of 1 the gradients of queries and keys are 0."""
    return bool((found.double() - expected).norm() < 0.02 * expected.norm() + 0.01)


def given_in(way: str) -> list[Tensor]:
    return inputs(ROWS, DTYPES.get(way, torch.bfloat16))


def exact(window: int | None, response_window: int | None) -> list[Tensor]:
    query, key, value, cotangent = inputs(ROWS)
    out = written_out(query, key, value, visible(segments_of(RUNS), window, response_window))
    return [out, *torch.autograd.grad(out, (query, key, value), cotangent.detach())]


@each_case("way", WAYS)
@each_case(("window", "response_window"), [(None, None), (1, None), (4, None), (None, 1), (None, 4)])
def test_rows_of_shared_prompts(
    way: str, window: int | None, response_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (way == "te" and response_window is not None) or not takes_windows(way, window or response_window):
        return
    query, key, value, cotangent = given_in(way)
    tables = torch.empty(ROWS, 1)
    packed = packed_rows(segments_of(RUNS), tables, tables, response_window=response_window)
    with in_place(way, monkeypatch) as calls:
        out = attend(query, key, value, packed, window, None, way == "te")
        found = [out, *torch.autograd.grad(out, (query, key, value), cotangent.detach())]
    assert calls
    for mine, true in zip(found, exact(window, response_window), strict=True):
        assert near(mine, true)


@each_case("way", WAYS)
def test_the_rows_of_context_parallel_ranks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is given what it would get; gradients are the sum of what each has for them."""
    window = 4 if takes_windows(way, 4) else None
    query, key, value, cotangent = given_in(way)
    cuts = [ContextCut(rank, 2, ROWS) for rank in range(2)]
    joined, tables = torch.cat([cut.held() for cut in cuts]), torch.empty(ROWS // 2, 1)
    with in_place(way, monkeypatch):
        parts = [
            attend(
                query[cut.held()],
                key[joined],
                value[joined],
                packed_rows(segments_of(RUNS), tables, tables, cut),
                window,
                None,
                way == "te",
            )
            for cut in cuts
        ]
        out = torch.cat(parts)[cuts[0].places()]
        found = [out, *torch.autograd.grad(out, (query, key, value), cotangent.detach())]
    for mine, true in zip(found, exact(window, None), strict=True):
        assert near(mine, true)


@each_case("way", ["fa3", "fa4 4.0.0b36"])
@each_case("deterministic", [False, True])
def test_each_argument_arrives(way: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale, window, mask, starts, the longest stretches and determinism, at the kernels' own interfaces."""
    if not takes_windows(way, 4):
        # torch 2.11 gives FA4 fewer arguments.
        return
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    query, key, value, cotangent = given_in(way)
    tables = torch.empty(ROWS, 1)
    with in_place(way, monkeypatch) as calls:
        for window in (None, 4):
            packed = packed_rows(segments_of(RUNS), tables, tables)
            out = attend(query, key, value, packed, window, 0.25)
            torch.autograd.grad(out, (query, key, value), cotangent.detach())
    causal, no_limit = ("is_causal", -1) if way == "fa3" else ("causal", None)
    masks = [(call[causal], call["window_size_left"], call["window_size_right"]) for call in calls]
    assert masks == [(True, no_limit, no_limit)] * 2 + [(False, 3, 0)] * 2
    assert {call["softmax_scale"] for call in calls} == {0.25}
    starts = [0, 5, 12, 13, 14, 26, 35, 36, 40]
    assert all(call["cu_seqlens_q"].tolist() == starts for call in calls)
    assert [call["cu_seqlens_k"][-1].item() for call in calls] == [51, 51, 47, 47]
    forward, backward = calls[::2], calls[1::2]
    assert {(call["max_seqlen_q"], call["max_seqlen_k"]) for call in forward} == {(12, 13)}
    assert {call["deterministic"] for call in backward} == {deterministic}
    # How FA3's forward splits keys is left to it, but for bits that do not change.
    assert {call["num_splits"] for call in forward} == {int(deterministic or way != "fa3")}


def test_transformer_engine_is_called_without_waiting_and_without_its_plain_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value, _ = given_in("te")
    tables = torch.empty(ROWS, 1)
    with stand_in_kernels.engine(monkeypatch) as calls:
        packed = packed_rows(segments_of(RUNS), tables, tables)
        attend(query, key, value, packed, 4, 0.25, True)
        attend(query, key, value, packed, 4, 0.25, True)
    made, first, second = calls
    assert made["attention_dropout"] == 0.0 and made["softmax_scale"] == 0.25
    assert first["window_size"] == (3, 0) and first["pad_between_seqs"] is False and second is not first


def test_torchs_operators_have_the_arguments_that_are_passed() -> None:
    """By name and place in the installed torch, for whichever kernels are registered under them."""
    forward = torch.ops.aten._flash_attention_forward.default._schema
    backward = torch.ops.aten._flash_attention_backward.default._schema
    stretches = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    places = [argument.name for argument in forward.arguments if not argument.kwarg_only]
    assert places == ["query", "key", "value", *stretches, "return_debug_mask"]
    places = [argument.name for argument in backward.arguments if not argument.kwarg_only]
    assert places == [
        *("grad_out", "query", "key", "value", "out", "logsumexp"),
        *stretches,
        *("rng_state", "unused"),
    ]
    for schema, results in ((forward, 5), (backward, 3)):
        named = {argument.name for argument in schema.arguments if argument.kwarg_only}
        assert {"scale", "window_size_left", "window_size_right"} <= named and len(schema.returns) == results


def test_kernels_that_are_wrong_are_found_by_trying_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that know no window, and attend to everything."""
    shape, device = Shape(4, 2, 16, window=8), torch.device("cpu")
    with stand_in_kernels.registered("fa3", monkeypatch):
        tried(shape, torch.bfloat16, device)
        real = stand_in_kernels.plan_of
        monkeypatch.setattr(stand_in_kernels, "plan_of", lambda call, causal, left, right: real(call, True, None, 0))
        with pytest.raises(ValueError, match=r"^its output is .* % off with windows"):
            tried(shape, torch.bfloat16, device)


def test_transformer_engine_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_kernels.engine(monkeypatch) as calls:
        tried(Shape(4, 2, 16, window=8), torch.float64, torch.device("cpu"), by_engine=True)
    assert len(calls) == 3


def test_what_cannot_be_imported_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wheel for another torch: `auto` takes FA2, and says why; asked for by name it ends the run."""
    monkeypatch.setattr(attention_setup, "software_here", Software)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    shapes, cuda = [Shape(4, 2, 16)], torch.device("cuda")
    why = "fa3: it does not work here (ModuleNotFoundError: No module named 'flash_attn_interface')"
    assert take_up("auto", shapes, torch.bfloat16, cuda) == Kernels("fa2", f"not {why}")
    with pytest.raises(UserError, match=r"^policy.attention=fa3: it does not work here .*leave policy.attention at"):
        take_up("fa3", shapes, torch.bfloat16, cuda)


def test_ranks_take_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of which the second, this one, found FA2 alone."""
    monkeypatch.setattr(attention_setup, "software_here", lambda: Software({"fa3": "it is not here"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    others = iter(["fa3", "fa2"])

    def gather(found: list[tuple[str, str]], mine: tuple[str, str]) -> None:
        found[:] = [(next(others), ""), mine]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    taken = take_up("auto", [Shape(4, 2, 16)], torch.bfloat16, torch.device("cuda"))
    assert taken == Kernels("fa2", "not fa3: rank 1 has fa2 alone")
