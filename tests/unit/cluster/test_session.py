"""Free resources of Ray: a cluster that lacks some is refused; resources in use may be free at the next start."""

from __future__ import annotations

import pytest

from megasharp.cluster.ray_runtime import session as module
from megasharp.cluster.ray_runtime.session import RaySession
from megasharp.cluster.ray_runtime.slot_layout import Needs, NodeCapacity, make_layout
from megasharp.common.errors import RunFailed, UserError
from megasharp.config.rollout import ClusterConfig


@pytest.mark.parametrize(("cpus", "free", "kind"), [(1.0, 1.0, UserError), (2.0, 1.0, RunFailed)])
def test_too_few_places(monkeypatch: pytest.MonkeyPatch, cpus: float, free: float, kind: type) -> None:
    monkeypatch.setattr(module, "_NEWS_S", 0.2)
    monkeypatch.setattr(RaySession, "nodes", lambda _: [NodeCapacity("a", cpus, free)])
    session = RaySession.__new__(RaySession)
    with pytest.raises(UserError, match="Ray cannot place this run: it needs 2 CPUs free on one node") as raised:
        session.reserve(make_layout(Needs(1, 1, 1, 1), ClusterConfig(placement="disaggregated")))
    assert raised.type is kind


def test_what_comes_back_while_one_looks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run's slots: at the first look they are taken, at every later one free."""
    looks = iter([0.0])
    monkeypatch.setattr(RaySession, "nodes", lambda _: [NodeCapacity("a", 2.0, next(looks, 2.0))])
    monkeypatch.setattr(module, "reserve", lambda layout, limit_s: "reserved")
    session = RaySession.__new__(RaySession)
    assert session.reserve(make_layout(Needs(1, 1, 1, 1), ClusterConfig(placement="disaggregated"))) == "reserved"
