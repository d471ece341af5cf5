"""The choice among kernels of attention: what `auto` takes on a card, and the refusal of what cannot be had."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.ops.attention_kernels import KernelName, Kernels, Site, Software, Wanted, choose, software_here

HOPPER = Site(gpu=True, dtype="bfloat16", head_dims=(128,), capability=(9, 0))
BLACKWELL, AMPERE = replace(HOPPER, capability=(10, 0)), replace(HOPPER, capability=(8, 0))
ALL = Software()
NONE = Software({"fa3": "it is not here", "fa4": "it is not here", "te": "it is not here"})


@each_case(
    ("site", "software", "name", "reason"),
    [
        (HOPPER, ALL, "fa3", "the right one for compute capability 9.0$"),
        (HOPPER, NONE, "fa2", "not fa3: it is not here"),
        (BLACKWELL, ALL, "fa4", "the right one for compute capability 10.0"),
        (BLACKWELL, NONE, "fa2", "not fa4: it is not here"),
        (AMPERE, ALL, "fa2", "the right one for compute capability 8.0"),
        (replace(HOPPER, capability=(12, 0)), ALL, "fa2", "the right one for compute capability 12.0"),
        (replace(HOPPER, dtype="float32"), ALL, "blocks", "not fa3: its kernels take no float32; set model.dtype=bf"),
        (replace(HOPPER, head_dims=(128, 260)), ALL, "blocks", "not fa3: a head of 260 is above 256"),
        (replace(HOPPER, head_dims=(256,), deterministic=True), ALL, "fa2", "not fa3: its deterministic backward"),
        (replace(BLACKWELL, windows=True), Software(fa4_windows=False), "fa2", "not fa4: torch .* install torch 2.13"),
        (replace(BLACKWELL, head_dims=(192,)), ALL, "fa2", "not fa4: on Blackwell it takes heads up to 128, or of 256"),
        (Site(gpu=False, dtype="float32"), ALL, "blocks", "the way of CPUs"),
    ],
)
def test_auto(site: Site, software: Software, name: KernelName, reason: str) -> None:
    chosen = choose("auto", site, software)
    assert chosen.name == name and re.match(reason, chosen.reason), chosen


def test_what_did_not_work_is_passed_over() -> None:
    chosen = choose("auto", HOPPER, ALL, {"fa3": "it does not work here (ImportError: undefined symbol)"})
    assert chosen == Kernels("fa2", "not fa3: it does not work here (ImportError: undefined symbol)")


@each_case(
    ("wanted", "site", "told"),
    [
        ("fa3", BLACKWELL, r"it is for Hopper cards \(compute capability 9.0\), and this one has 10.0, or leave"),
        ("fa4", AMPERE, r"it is for Hopper and Blackwell cards .*, and this one has 8.0"),
        ("fa2", replace(AMPERE, capability=(7, 5)), "of compute capability 8.0 and later, and this one has 7.5"),
        ("te", replace(HOPPER, response_window=True), "set policy.attention=fa2, or leave policy.attention at auto"),
        ("te", Site(gpu=False, dtype="float32"), "it needs a GPU; set policy.device=cuda, or leave policy.attention"),
    ],
)
def test_refusals(wanted: Wanted, site: Site, told: str) -> None:
    with pytest.raises(UserError, match=rf"^policy.attention={wanted}: .*{told}") as error:
        choose(wanted, site, ALL)
    assert "\n" not in str(error.value)


def test_what_is_asked_for_is_taken() -> None:
    assert choose("fa4", HOPPER, ALL) == Kernels("fa4", "because policy.attention=fa4")
    assert choose("te", HOPPER, ALL) == Kernels("te", "because policy.attention=te")


def test_packages_that_are_not_here_are_named_with_their_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasharp.ops.attention_kernels.util.find_spec", lambda name: None)
    lacks = software_here().lacks
    assert lacks.keys() == {"fa3", "fa4", "te"}
    assert "pip install --pre flash-attn-4" in lacks["fa4"] and "flash_attn_interface" in lacks["fa3"]
