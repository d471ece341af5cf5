"""A fleet of SGLang engines that answer as one engine.

`Fleet` satisfies `megasharp.rollout.step_request.AsyncEngine`. `Sleeper` has engines give their device's memory to the
learner and take it back; `LocalStarter` starts single engines of this machine while others run.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from megasharp.common.errors import EnginesLost, NotSampled, RunFailed, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.rollout.sglang.client.admission import limits_of
from megasharp.rollout.sglang.client.api import FOREIGN, FOREIGN_WEIGHTS, EngineApi, EngineFailed, Refused
from megasharp.rollout.sglang.client.health import Answered, Lost
from megasharp.rollout.sglang.client.launch import (
    GLANCE_S,
    EngineHandle,
    EngineProcess,
    FleetSettings,
    HeldPort,
    answers,
    launch,
    new_key,
    start_one,
    start_problem,
    stop,
    vocabulary,
    why_not_started,
    with_cache,
)
from megasharp.rollout.sglang.client.members import Member, Members, Restarts, Starter, WatchSettings
from megasharp.rollout.sglang.client.router import Router, RouterSettings
from megasharp.rollout.sglang.routed_experts import routed_experts
from megasharp.rollout.streaming import Asked, Ended, Stream, answered


class Sleeper:
    """All engines of a fleet sleep and wake together; one that does not is lost. All must be idle.

    A request between `sleep` and the last `wake` would find an engine without memory: the caller keeps them apart, and
    `Members` those that wait for an engine. `settle` returns once no engine starts beside these; where all are lost but
    one may return, nothing is done.
    """

    def __init__(self, members: Members, settle: Callable[[], None] | None = None) -> None:
        self._members = members
        self._settle = settle

    def sleep(self) -> None:
        """Free weights and cache. What they held is lost, so the next `wake_weights` must be followed by a push.

        Raises RunFailed where no engine is left.
        """
        self._flush()
        self._each("sleep", lambda api: api.release(("weights", "kv_cache")))

    def rest(self) -> None:
        """Free the cache only. Raises RunFailed where no engine is left."""
        self._flush()
        self._each("sleep", lambda api: api.release(("kv_cache",)))

    def wake_weights(self) -> None:
        """Take memory for weights again, for a push to fill. Raises RunFailed where no engine is left."""
        self._each("wake", lambda api: api.resume(("weights",)))

    def wake_cache(self) -> None:
        """Take the cache's memory again: the engines can sample. Raises RunFailed where no engine is left."""
        self._each("wake", lambda api: api.resume(("kv_cache",)))
        self._members.let_sleep(False)

    def _flush(self) -> None:
        if self._settle is not None:
            self._settle()
        self._members.let_sleep(True)
        # The flush waits for what has just ended, a probe's token too.
        self._each("flush before sleep", lambda api: api.flush())

    def _each(self, what: str, action: Callable[[EngineApi], Refused | None]) -> None:
        """Raises UserError when no engine is left and none may return."""
        taking = self._members.alive()
        if taking:
            with ThreadPoolExecutor(len(taking)) as pool:
                list(pool.map(lambda member: self._one(member, what, action), taking))
        if not self._members.alive() and not self._members.may_return():
            raise self._members.none_left()

    def _one(self, member: Member, what: str, action: Callable[[EngineApi], Refused | None]) -> None:
        try:
            refused = action(member.process.api)
        except EngineFailed as error:
            ended = member.process.exit_reason()
            self._members.observe(member, Lost(f"{what}: {ended or error}", ended=ended is not None))
            return
        if refused is not None:
            self._members.observe(member, Lost(f"{what}: refused: {refused.message}"))


class LocalStarter:
    """Starts single engines on this machine; satisfies `Starter`."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings

    def begin(self, index: int, cache: int | None = None) -> LocalStarting:
        """Start engine `index`, with a cache of `cache` tokens where it is given; it ends with the calling thread.

        Raises OSError where its files, port or process cannot be made.
        """
        return LocalStarting(with_cache(self._settings, cache), index)


class LocalStarting:
    """An engine of this machine that does not answer yet; satisfies `Starting`."""

    def __init__(self, settings: FleetSettings, index: int) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + settings.start_limit_s
        with ExitStack() as stack:
            port = stack.enter_context(HeldPort())
            self._engine = start_one(settings, index, port.number, new_key())
            self._port = stack.pop_all()

    def answered(self) -> EngineProcess | None:
        """Return the engine once it answers, None before; returns within seconds.

        Raises UserError, with the engine killed, where it has ended or `start_limit_s` seconds have passed.
        """
        problem = start_problem(self._engine)
        if problem is None and answers(self._engine.api, GLANCE_S):
            self._engine.settled()
            self._port.close()
            return self._engine
        if problem is None and time.monotonic() > self._deadline:
            problem = f"no answer within {self._settings.start_limit_s:g} s"
        if problem is not None:
            failure = why_not_started(self._engine, problem)
            self.abandon()
            raise UserError(failure)
        return None

    def abandon(self) -> None:
        """Kill it."""
        self._engine.kill()
        self._port.close()


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Settings of a fleet that are no keys of the run: watching engines, and feeding them.

    `room`: tokens of a prompt with its response that an engine which restarts must have room for. `external`: how many
    of the engines, the last ones, were started by others.
    """

    watch: WatchSettings = field(default_factory=WatchSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    room: int = 0
    external: int = 0


def _silent(_: str) -> None:
    pass


class Fleet:
    """Engines of one model that answer as one engine.

    A prompt that no engine takes (empty, too long) gets aborted completions; `tell` gets a line about the first. An
    engine that is lost is left out from then on, and its unfinished prompts go to the others; `tell` gets a line about
    each. With a `starter` it restarts, and is let in by a push; after `push_again_with` requests wait for it where no
    other is left. `engines` have started, and the fleet ends them. Raises RunFailed when one of them fails meanwhile.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        settings: FleetSettings,
        options: FleetOptions | None = None,
        tell: Callable[[str], None] = _silent,
        starter: Starter | None = None,
    ) -> None:
        options = options or FleetOptions()
        self._settings = settings
        self._tell = tell
        self._version = -1
        self._closed = False
        self._vocabulary = vocabulary(settings.model)
        self._first_refusal = threading.Lock()
        # A child that outlives an interpreter in trouble is killed by the kernel; a clean end asks first.
        atexit.register(self.close)
        self._members = Members(engines, options.watch, tell)
        experts = routed_experts(settings.model) if settings.returns_experts else None
        self._router = Router(self._members, options.router, limits_of(settings.rollout), experts)
        self._restarts: Restarts | None = None
        self._push_again: Callable[[], None] | None = None
        self._devices_free: Callable[[], AbstractContextManager[None]] = nullcontext
        try:
            if starter is not None:
                self._restarts = Restarts(
                    self._members,
                    starter,
                    settings.rollout.restarts,
                    options.room,
                    tell,
                    shared=settings.sleep,
                    external=len(engines) - options.external,
                    patience_s=settings.start_limit_s,
                )
            self._members.start_watching()
            self._prompt_limit = min(member.load.room.prompt for member in self._members.all)
        except EngineFailed as error:
            self.close()
            raise RunFailed(f"the engines started, but one then failed: {error}; see {settings.log_folder}") from error
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The policy version last pushed whole; -1 before the first."""
        return self._version

    @property
    def settings(self) -> FleetSettings:
        """Settings that the engines were started with."""
        return self._settings

    @property
    def prompt_limit(self) -> int:
        """Number of tokens from which on a prompt, with what is begun of a response, gets no samples."""
        return self._prompt_limit

    @property
    def members(self) -> Members:
        """The engines, with their health."""
        return self._members

    def push_again_with(
        self, push_again: Callable[[], None], devices_free: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Let requests and pushes wait for an engine that restarts where no other is left, from now on.

        `push_again` pushes the weights last pushed while requests wait. Inside `devices_free` the learner leaves the
        devices that it shares with the engines. Both are called in the thread that calls `tend`, and pushes.
        """
        if self._restarts is not None:
            self._push_again, self._devices_free = push_again, devices_free
            self._members.may_return = self._may_return

    def _may_return(self) -> bool:
        assert self._restarts is not None
        return self._members.stranded() or self._restarts.possible()

    def tend(self) -> None:
        """Restart what was lost; where only engines without the weights are left, push them, and requests go on.

        To be called about every second while engines are waited for, by the thread that pushes.
        """
        if self._restarts is None or self._push_again is None:
            return
        self._restarts.look()
        if self._members.stranded():
            self._push_again()
            names = ", ".join(member.name for member in self._members.serving())
            self._tell(f"the weights of version {self._version} were pushed again: the run goes on with {names}")

    def settle(self) -> None:
        """Wait until no engine starts any more on devices that it shares with the learner."""
        if self._restarts is not None:
            self._restarts.settle()

    def healthy(self) -> bool:
        """Return True where at least one engine can serve the current weights."""
        return not self._closed and bool(self._members.serving())

    def close(self) -> None:
        """Stop all engines; returns when their processes are gone."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._members.end_watching()
        self._router.close()
        if self._restarts is not None:
            self._restarts.close()
        stop([member.process for member in self._members.all])

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds.

        Seeds fix completions only where the engines are deterministic.
        Raises UserError when no engine is left, when the engines refuse every prompt, when log-probs are not finite,
        when a token is outside the vocabulary, or when a memory network is asked for and the engines have none.
        """
        self._check(requests, sampling)
        with self.stream([(request, sampling) for request in requests], math.inf) as ended:
            done = dict(ended)
        return [done[place] for place in range(len(requests))]

    @property
    def capacity(self) -> int:
        """Responses that the engines run at once, by what they say: those that are left, or all where none is."""
        return sum(member.load.room.responses for member in self._members.alive() or self._members.all)

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: float) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does, and answer each when its samples have ended.

        Leaving the block ends what is in flight.
        """
        with Stream(self, asked, at_once, self.tend) as stream:
            yield answered(stream, "the engines", lambda request: self._obstacle(request) is None)

    @property
    def retried(self) -> int:
        """Number of responses that were sent again, because their engine failed or began nothing of them."""
        return self._router.retried

    def take_retried(self) -> list[int]:
        """Return the seeds of the samples sent again since the last call, each as often as it was."""
        return self._router.take_retried()

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Sample one request; returns at once. What `generate` says of errors of sampling holds for the future.

        The future raises NotSampled where the engine refuses the request, EnginesLost where several failed over it.
        Raises at once UserError where a token is outside the vocabulary or a memory network is missing, and
        RuntimeError after `close`.
        """
        self._check([request], sampling)
        obstacle = self._obstacle(request)
        if obstacle is not None:
            self._tell_of_refusal(obstacle)
            future: Future[list[Completion]] = Future()
            future.set_result([Completion.unsampled(seed, sampling, obstacle) for seed in request.seeds])
            return future
        sent = self._router.submit(request, sampling)
        sent.add_done_callback(self._tell_of_failure)
        return sent

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """End these requests and wait until they are done: unfinished completions keep their tokens, and say ABORT."""
        self._router.abort(futures)

    def drop(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """Send none of these requests that has not gone out yet; nobody waits for any."""
        self._router.drop(futures)

    @contextmanager
    def updating(self, version: int, *, whole: bool = True) -> Iterator[None]:
        """Bring all weights of policy version `version` to the engines inside; they serve them from the end on.

        With `whole` the weights of every network come, so an engine that came back can take part. Nothing is sampled
        inside. An engine that fails is left out. Raises RunFailed when none is left, or when one says that it serves
        another version afterwards. After any error no engine serves until an update succeeds.
        """
        if self._closed:
            raise RuntimeError("the fleet was closed")
        if whole and self._restarts is not None:
            self._restarts.look()
            if not self._members.alive() and self._members.may_return():
                with self._devices_free():
                    self._restarts.bring_one_back()
        with self._members.pushing(version):
            yield
            self._confirm(version)
        self._version = version

    def _confirm(self, version: int) -> None:
        """Every engine that is left says itself that it serves `version`."""
        for member in self._members.alive():
            try:
                served = member.process.api.version()
            except EngineFailed as error:
                self._members.report_failure(member, error)
                continue
            self._members.observe(member, Answered(served))
            if served != version:
                found = f"serves weights version {served}" if served != FOREIGN else FOREIGN_WEIGHTS
                raise RunFailed(
                    f"{member.name} {found} after version {version} was pushed to it; see {member.process.log}"
                )
        if not self._members.serving():
            raise self._members.none_left()

    def _check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        if self._closed:
            raise RuntimeError("the fleet was closed")
        if sampling.memory_mu is not None and self._settings.memory is None:
            raise UserError(
                f"sampling.memory_mu is {sampling.memory_mu}, but the engines hold no memory network; "
                "leave it out or give the memory network's folder"
            )
        # SGLang does not look: an index out of range ends its scheduler, and the engine with it.
        for request in requests:
            tokens = [*request.tokens, *(token for begun in request.begun for token in begun)]
            low, high = min(tokens, default=0), max(tokens, default=0)
            if low < 0 or (self._vocabulary is not None and high >= self._vocabulary):
                raise UserError(
                    f"a prompt holds token ids {low}..{high}, but the model's vocabulary has {self._vocabulary}; "
                    "check that the tokenizer belongs to the model"
                )

    def _obstacle(self, request: GenerateRequest) -> str | None:
        """Return the reason not to send a prompt at all, or None."""
        if not request.tokens:
            return "it is empty"
        length = len(request.tokens) + max(map(len, request.begun), default=0)
        if length >= self._prompt_limit:
            return f"it has {length} tokens, and the engines take fewer than {self._prompt_limit}"
        return None

    def _tell_of_failure(self, future: Future[list[Completion]]) -> None:
        error = future.exception()
        if isinstance(error, EnginesLost):
            self._tell(f"a prompt got no samples: {error}")
        elif isinstance(error, NotSampled):
            self._tell_of_refusal(str(error))

    def _tell_of_refusal(self, reason: str) -> None:
        # The first takes the lock for good: data may hold thousands of such prompts.
        if self._first_refusal.acquire(blocking=False):
            self._tell(f"a prompt got no samples: {reason}; rollout/unsampled counts such prompts in each step")


def start_fleet(
    settings: FleetSettings, options: FleetOptions | None = None, tell: Callable[[str], None] = _silent
) -> Fleet:
    """Start engines on this machine and make a fleet of them; call it, and push, from one thread that lives as long.

    Raises UserError or RunFailed when an engine does not start.
    """
    starter = LocalStarter(settings) if settings.rollout.restarts else None
    return Fleet(launch(settings), settings, options, tell, starter)
