"""A fleet of stand-ins: real processes, launched, watched and killed by the real client; no model in them."""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.sglang.client import api
from megasharp.rollout.sglang.client.api import EngineApi
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.rollout.sglang.client.members import WatchSettings
from megasharp.rollout.sglang.client.router import RouterSettings

STANDIN = Path(__file__).with_name("standin.py")
QUICK = WatchSettings(probe_every=0.3, suspect_every=0.1, probe_limit=HANG_S, dead_after=3, wait_limit=HANG_S)
# Where an engine's silence is to be noticed; with `limited`.
HASTY = replace(QUICK, probe_limit=1.0)


class StandIns:
    """A fleet over stand-ins, with what it told, and a way to command each stand-in."""

    def __init__(self, fleet: Fleet, told: list[str]) -> None:
        self.fleet = fleet
        self.told = told

    def command(self, index: int, behaviour: dict[str, Any] | None = None) -> dict[str, Any]:
        """Change how stand-in `index` behaves from now on, or leave it; returns what it holds."""
        server = self.fleet.members.all[index].process.api
        body = None if behaviour is None else json.dumps(behaviour).encode()
        request = urllib.request.Request(
            f"http://{server.host}:{server.port}/standin", body, {"Authorization": f"Bearer {server.key}"}
        )
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def once_sampling(self, index: int, then: Callable[[], object]) -> threading.Thread:
        """Call `then` in a thread as soon as stand-in `index` has a request."""

        def watch() -> None:
            wait_until(lambda: self.command(index)["at_once"] > 0)
            then()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def conditions(self) -> list[str]:
        """Every engine's condition, in order."""
        return [member.health.condition.value for member in self.fleet.members.all]


Make = Callable[..., StandIns]


def settings(
    folder: Path,
    engines: int = 2,
    memory: bool = False,
    tp: int = 1,
    restarts: int = 0,
    request_limit_s: float = 1800.0,
    sleep: bool = False,
    first_token_limit_s: float | None = None,
    **behaviour: Any,
) -> FleetSettings:
    return FleetSettings(
        python=Path(sys.executable),
        model=folder,
        log_folder=folder / "logs",
        rollout=RolloutConfig(
            engines=engines,
            tp=tp,
            restarts=restarts,
            request_limit_s=request_limit_s,
            first_token_limit_s=first_token_limit_s,
            sglang=behaviour,
        ),
        memory=folder if memory else None,
        sleep=sleep,
        start_limit_s=HANG_S,
        command=(str(STANDIN),),
    )


@pytest.fixture(autouse=True)
def quick_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that will not flush its cache never will."""
    monkeypatch.setattr(api, "_FLUSH_S", 0.2)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Fleet] = []

    def build(
        engines: int = 2,
        *,
        router: RouterSettings | None = None,
        watch: WatchSettings = QUICK,
        memory: bool = False,
        **more: Any,
    ) -> StandIns:
        """`more` goes to `settings`: keys of the run, and how the stand-ins behave."""
        told: list[str] = []
        (tmp_path / "config.json").write_text('{"vocab_size": 60}')
        options = FleetOptions(watch, router or RouterSettings())
        fleet = start_fleet(settings(tmp_path, engines, memory, **more), options, told.append)
        made.append(fleet)
        return StandIns(fleet, told)

    yield build
    for fleet in made:
        fleet.close()


Limited = Callable[..., None]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    """A function: from now on only one engine's calls, to these paths, have the limits that are asked for.

    All others have one that only a hang reaches.
    """

    call = EngineApi._call

    def limit_only(which: EngineApi, *paths: str) -> None:
        def patiently(one: EngineApi, method: str, path: str, body: object, limit: float) -> Any:
            own = one.port == which.port and path.partition("?")[0] in paths
            return call(one, method, path, body, limit if own else max(limit, HANG_S))

        monkeypatch.setattr(EngineApi, "_call", patiently)

    return limit_only


def running(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
