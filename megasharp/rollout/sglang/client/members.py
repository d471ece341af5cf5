"""The engines of a fleet while it runs: who is healthy, who is how busy, and the threads that keep watch.

One lock guards it all. `Members.changed` is called when an engine becomes healthy, doubtful or dead.

`Restarts` starts lost engines again, beside the others; those that are lost again and again stay out (quarantine). An
engine that came back serves nothing before it holds the current weights: it takes part in the next push of all of them,
and is asked for its version like every other. The requests that it had when it was lost went to the others long before;
where there is no other they wait, as long as one may come back (`may_return`).

Engines that share devices with the learner start only while the engines have these devices: they take memory for
weights and cache at their start. How much of it is for the cache SGLang decides by what is free, which is another
amount than at the run's start, so each gets the cache size of the engine before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from megasharp.common.errors import RunFailed, UserError, one_line
from megasharp.rollout.sglang.client.admission import Load
from megasharp.rollout.sglang.client.api import FOREIGN, FOREIGN_WEIGHTS, EngineFailed, Room
from megasharp.rollout.sglang.client.health import (
    Answered,
    Condition,
    Doubted,
    Event,
    Health,
    Lost,
    Missed,
    Wanted,
    after,
)
from megasharp.rollout.sglang.client.launch import EngineHandle

_EXIT_POLL_S = 0.5
# Restarts of an engine are counted within this time.
_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times of the watch, in seconds: it probes engines every `probe_every`, suspects every `suspect_every`.

    A probe may take `probe_limit`: SGLang itself gives its scheduler 20 s to say something. `dead_after` misses in a
    row make an engine dead. Where none serves, requests wait up to `wait_limit` for one.
    """

    probe_every: float = 10.0
    suspect_every: float = 1.0
    probe_limit: float = 25.0
    dead_after: int = 3
    wait_limit: float = 3600.0


# Of an engine that has not been asked yet.
_NO_ROOM = Room(0, 1, 1)


def _nobody() -> None:
    pass


class Member:
    """One engine with what is known of it. Its fields change only under the lock of its `Members`.

    `load` is the exception: the router's own, from when the engine has said what it can take.
    """

    def __init__(self, process: EngineHandle) -> None:
        self.process = process
        self.health = Health()
        # Whatever version it says: an engine that came back has what it has from before, or from elsewhere.
        self.awaits_push = False
        self.load = Load(_NO_ROOM)

    def ask(self) -> Answered:
        """Ask what it can take, and what it serves. Raises EngineFailed where it does not answer."""
        self.load = Load(self.process.api.room())
        return Answered(self.process.api.version())

    @property
    def requests(self) -> int:
        """Number of responses that it has."""
        return self.load.responses

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.process.name


class Members:
    """All engines of a fleet. `tell` gets a line for whoever runs the fleet when an engine is lost.

    An engine that is found dead is killed at once, with its whole process group: then its sockets close, and the
    requests that wait for it fail instead of waiting out their time limit.
    """

    def __init__(self, processes: Sequence[EngineHandle], watch: WatchSettings, tell: Callable[[str], None]) -> None:
        self.all = [Member(process) for process in processes]
        self._watch = watch
        self._tell = tell
        self.changed: Callable[[], None] = _nobody
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pushing = False
        self._asleep = False
        # Replaced where lost engines restart, and weights are pushed when they have.
        self.may_return: Callable[[], bool] = _never
        # Counts what makes the answers of probes under way worthless: starts and ends of weight pushes.
        self._epoch = 0

    def start_watching(self) -> None:
        """Note what the engines, which have just answered the launcher, serve; then probe them in the background.

        Raises EngineFailed where one does not answer any more.
        """
        for member in self.all:
            self.observe(member, member.ask())
        for member in self.all:
            self._watch_on(member)

    def replace(self, index: int, process: EngineHandle) -> None:
        """A new engine, which answers, in the place of one that is lost: it is stale until it says the version wanted.

        Raises EngineFailed where it does not answer any more.
        """
        member = Member(process)
        answered = member.ask()
        with self._lock:
            member.awaits_push = True
            # It is to serve the version that is wanted of the engine whose place it takes.
            member.health = replace(member.health, wanted=self.all[index].health.wanted)
            self.all[index] = member
        self.observe(member, answered)
        self._watch_on(member)

    def _watch_on(self, member: Member) -> None:
        watch = threading.Thread(target=self._watch_one, args=(member,), name=f"watch {member.name}", daemon=True)
        watch.start()

    def end_watching(self) -> None:
        """End the background probes; does not wait for a probe that hangs."""
        self._ended.set()

    def observe(self, member: Member, event: Event, epoch: int | None = None) -> None:
        """Apply an event to one engine's health; an engine that this makes dead is killed.

        With `epoch`, the event counts only where no push of weights began or ended since then, or is under way.
        """
        with self._lock:
            if epoch is not None and (epoch != self._epoch or self._quiet):
                return
            if member.awaits_push and isinstance(event, Answered):
                event = Answered(FOREIGN)
            before = member.health
            member.health = after(before, event, self._watch.dead_after)
            died = before.alive and not member.health.alive
        self.changed()
        if event == Answered(FOREIGN) and before.condition in (Condition.SERVING, Condition.SUSPECT):
            self._tell(f"{member.name} {FOREIGN_WEIGHTS}; it gets no request before this run's next push")
        if died and not self._ended.is_set():
            self._tell(f"{member.name} is lost: {self.describe(member)}")
            member.process.kill()

    def report_failure(self, member: Member, error: EngineFailed) -> None:
        """A call to the engine failed: it is dead if its process ended, suspect otherwise."""
        ended = member.process.exit_reason()
        self.observe(member, Lost(ended, ended=True) if ended is not None else Doubted(str(error)))

    def alive(self) -> list[Member]:
        """Engines that are not given up."""
        with self._lock:
            return [member for member in self.all if member.health.alive]

    def stranded(self) -> bool:
        """Return True where engines are alive, and all of them wait for weights."""
        alive = self.alive()
        return bool(alive) and all(member.health.condition is Condition.STALE for member in alive)

    def serving(self) -> list[Member]:
        """Engines that may get requests."""
        with self._lock:
            return [member for member in self.all if member.health.serving]

    def describe(self, member: Member) -> str:
        """Why an engine is in the state that it is in, and where its log is; how that ends, where the process ended."""
        health = member.health
        why = f" ({health.reason})" if health.reason else ""
        # One that refused said why; what else its log holds would only hide that.
        last = f"; last lines: {member.process.tail()}" if health.ended else ""
        return f"{health.condition.value}{why}; see {member.process.log}{last}"

    def none_left(self) -> RunFailed:
        """The error for a fleet in which no engine can serve: names each engine's fate."""
        fates = "; ".join(f"{member.name} is {self.describe(member)}" for member in self.all)
        return RunFailed(f"no engine is left to sample with: {fates}")

    def hopeful(self) -> bool:
        """Return True where an engine serves, or may serve again by itself."""
        with self._lock:
            # A stale one may serve again by a weight push.
            may_serve = {Condition.SERVING, Condition.SUSPECT} | ({Condition.STALE} if self._pushing else set())
            hopeful = any(member.health.condition in may_serve for member in self.all) or self.may_return()
            return hopeful and not self._ended.is_set()

    @property
    def wait_limit(self) -> float:
        """Seconds to wait while no engine serves."""
        return self._watch.wait_limit

    @contextmanager
    def pushing(self, version: int) -> Iterator[None]:
        """A push of weights: only `version` may be served from now on, and no engine serves until it says so inside.

        Probes have no say inside: a paused engine answers none. Exits of processes are still noticed.
        """
        self._turn(True)
        for member in self.all:
            member.awaits_push = False
            self.observe(member, Wanted(version))
        try:
            yield
        finally:
            self._turn(False)

    def _turn(self, pushing: bool) -> None:
        with self._lock:
            self._pushing = pushing
            self._epoch += 1
        self.changed()

    def let_sleep(self, asleep: bool) -> None:
        """Note that engines sleep, or woke: in between, probes, which sample a token, are not sent or heard."""
        with self._lock:
            self._asleep = asleep
            self._epoch += 1
        self.changed()

    @property
    def asleep(self) -> bool:
        """True while the engines sleep."""
        return self._asleep

    @property
    def _quiet(self) -> bool:
        return self._pushing or self._asleep

    def probe(self, member: Member) -> None:
        """Ask one engine how it is, and note what it says."""
        epoch = self._epoch
        self.observe(member, self._ask(member), epoch)

    def _ask(self, member: Member) -> Event:
        api = member.process.api
        try:
            if api.healthy(self._watch.probe_limit):
                return Answered(api.version(self._watch.probe_limit))
            return Missed("it says that it is not healthy")
        except EngineFailed as error:
            return Missed(str(error))

    def _watch_one(self, member: Member) -> None:
        probed = time.monotonic()
        while not self._ended.wait(_EXIT_POLL_S) and member.health.alive:
            ended = member.process.exit_reason()
            if ended is not None:
                self.observe(member, Lost(ended, ended=True))
                return
            suspect = member.health.condition is Condition.SUSPECT
            if time.monotonic() - probed >= (self._watch.suspect_every if suspect else self._watch.probe_every):
                if not self._quiet:
                    self.probe(member)
                probed = time.monotonic()


def _never() -> bool:
    return False


class Starting(Protocol):
    """An engine on its way."""

    def answered(self) -> EngineHandle | None:
        """The engine once it answers; returns within seconds. Raises UserError, with nothing left, where it won't."""
        ...

    def abandon(self) -> None:
        """End it."""
        ...


class Starter(Protocol):
    """Whoever starts engines: of this machine, or of a cluster."""

    def begin(self, index: int, cache: int | None) -> Starting:
        """Start engine `index` and return at once. Raises UserError or OSError where that fails.

        `cache`: the number of tokens that its cache is to have, None where SGLang decides by the memory that is free.
        """
        ...


class Restarts:
    """The engines of a fleet that are on their way back, each at most `most` times within an hour.

    `room`: tokens of a prompt and its response for which an engine must have room. From number `external` on they are
    engines that others started: they come back as often as they answer again, and a fleet without any other waits
    `patience_s` for one. `tell` gets a line for each turn. All is called in one thread, with which these engines end.
    """

    def __init__(
        self,
        members: Members,
        starter: Starter,
        most: int,
        room: int,
        tell: Callable[[str], None],
        *,
        shared: bool,
        external: int,
        patience_s: float,
    ) -> None:
        self._members = members
        self._starter = starter
        self._most = most
        self._room = room
        self._tell = tell
        self._external = external
        self._patience_s = patience_s
        self._starting: dict[int, Starting] = {}
        self._begun: dict[int, list[float]] = {}
        self._out: set[int] = set()
        # Of engines that share devices: the cache's tokens by the engine's place.
        self._caches = {index: m.process.api.cache_size() for index, m in enumerate(members.all)} if shared else {}
        self._shared = shared

    def look(self, *, devices_free: bool = False) -> None:
        """Let in the engines that answer, and begin those that were lost; waits for none. No push may be under way.

        `devices_free`: the learner has left the devices, though the engines sleep.
        """
        begins = devices_free or not (self._shared and self._members.asleep)
        for index, member in enumerate(self._members.all):
            if index in self._starting:
                self._let_in(index)
            elif member.health.alive:
                continue
            elif index >= self._external:
                self._ask_again(index)
            elif begins and self._most and index not in self._out:
                self._begin(index)

    def possible(self) -> bool:
        """Return True where an engine starts, or may be started again."""
        dead = [index for index, member in enumerate(self._members.all) if not member.health.alive]
        return any(self._may_return(index) for index in dead)

    def _may_return(self, index: int) -> bool:
        if index < self._external:
            return index in self._starting or self._left(index) > 0
        return index not in self._starting or time.monotonic() - self._begun[index][-1] < self._patience_s

    def settle(self) -> None:
        """Wait until no engine starts any more, where they share devices: the learner is about to take these."""
        # Engines of others share no devices with this run, which the configuration's check sees to.
        if self._shared and self._starting:
            names = ", ".join(self._members.all[index].name for index in sorted(self._starting))
            self._tell(f"the policy waits for {names}, which shares its devices and still starts")
            while self._starting:
                for index in list(self._starting):
                    self._let_in(index)
                time.sleep(_EXIT_POLL_S)

    def bring_one_back(self) -> None:
        """Start the lost engines and wait until one is back, or none can come back any more.

        Those that share devices are all waited for: none may start once the learner has these back.
        """
        while not self._members.alive() and self.possible():
            self.look(devices_free=True)
            if self._starting:
                time.sleep(_EXIT_POLL_S)
        self.settle()

    def close(self) -> None:
        """End those that are on their way."""
        starting, self._starting = self._starting, {}
        for one in starting.values():
            one.abandon()

    def _left(self, index: int) -> int:
        """Count the restarts that an engine has left; 0 for one that stays out."""
        if index in self._out:
            return 0
        now = time.monotonic()
        return self._most - sum(now - then < _WITHIN_S for then in self._begun.get(index, []))

    def _ask_again(self, index: int) -> None:
        name = self._members.all[index].name
        if not self._members.alive():
            self._tell(f"no engine is left: the run waits at most {self._patience_s:g} s for {name} to answer again")
        self._begun[index] = [time.monotonic()]
        self._starting[index] = self._starter.begin(index, None)

    def _begin(self, index: int) -> None:
        name, left = self._members.all[index].name, self._left(index)
        if left <= 0:
            self._out.add(index)
            self._tell(
                f"{name} stays out: lost {self._most + 1} times within {_WITHIN_S / 60:g} minutes "
                f"(rollout.restarts is {self._most})"
            )
            return
        if not self._members.alive():
            self._tell(f"no engine is left: the run waits for {name}, which restarts; it may {left - 1} times more")
        self._begun[index] = [*self._begun.get(index, []), time.monotonic()]
        self._members.all[index].process.kill()
        try:
            self._starting[index] = self._starter.begin(index, self._caches.get(index))
        except (UserError, OSError) as error:
            self._tell(f"{name} did not restart: {one_line(error)}")

    def _let_in(self, index: int) -> None:
        name = self._members.all[index].name
        try:
            engine = self._starting[index].answered()
        except UserError as error:
            del self._starting[index]
            self._tell(f"{name} did not restart: {one_line(error)}")
            return
        if engine is None:
            return
        try:
            self._take_in(index, engine)
        except (EngineFailed, UserError) as error:
            engine.kill()
            self._tell(f"{name} did not restart: {one_line(error)}")
        else:
            self._tell(f"{name} is back; it serves once it holds the weights of the next push")
        finally:
            # Only now: until it is alive, whoever waits for an engine must see that one comes.
            del self._starting[index]

    def _take_in(self, index: int, engine: EngineHandle) -> None:
        room = engine.api.room().prompt
        if room < self._room:
            raise UserError(f"it has room for {room} tokens, and prompts with their responses may need {self._room}")
        if self._members.asleep:
            # As the others are while weights come: memory for weights, none for the cache.
            engine.api.flush()
            engine.api.release(("kv_cache",))
        self._members.replace(index, engine)
