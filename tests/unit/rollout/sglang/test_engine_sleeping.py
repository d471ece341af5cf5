"""The account of what sleeps in an engine: which calls are refused, and when requests may come again."""

from __future__ import annotations

import pytest

from megasharp.rollout.sglang.engine.sleeping import Sleep


def asleep(*tags: str, loses_weights: bool = False) -> Sleep:
    sleep = Sleep(able=True, loses_weights=loses_weights)
    sleep.released(sleep.to_release(tags))
    return sleep


def test_no_tags_means_all() -> None:
    sleep = asleep()
    assert "kv_cache, weights" in str(sleep.why_closed()) and sleep.why_fixed() is not None
    assert sleep.to_resume(None) == ["weights", "kv_cache"]
    sleep.resumed(["weights", "kv_cache"])
    assert sleep.why_closed() is None and sleep.why_fixed() is None


def test_parts_wake_one_by_one() -> None:
    sleep = asleep("weights", "kv_cache")
    sleep.resumed(sleep.to_resume(["weights"]))
    assert sleep.why_fixed() is None and "kv_cache" in str(sleep.why_closed())
    sleep.resumed(sleep.to_resume(["kv_cache"]))
    assert sleep.why_closed() is None


def test_lost_weights_must_come_before_requests() -> None:
    sleep = asleep("weights", loses_weights=True)
    sleep.resumed(["weights"])
    assert "no weights since it woke" in str(sleep.why_closed()) and sleep.why_fixed() is None
    sleep.updated()
    assert sleep.why_closed() is None
    cache_only = asleep("kv_cache", loses_weights=True)
    cache_only.resumed(["kv_cache"])
    assert cache_only.why_closed() is None


def test_calls_at_the_wrong_time() -> None:
    with pytest.raises(ValueError, match="cannot sleep"):
        Sleep(able=False, loses_weights=False).to_release(None)
    sleep = asleep("weights")
    with pytest.raises(ValueError, match="weights sleeps already"):
        sleep.to_release(["weights", "kv_cache"])
    with pytest.raises(ValueError, match="kv_cache sleeps not"):
        sleep.to_resume(["kv_cache"])
    with pytest.raises(ValueError, match="cuda_graph is no part"):
        sleep.to_release(["cuda_graph"])
    sleep.not_released(["weights"])
    with pytest.raises(ValueError, match="nothing sleeps"):
        sleep.to_resume(None)
