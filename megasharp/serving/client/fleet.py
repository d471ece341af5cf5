"""A fleet of SGLang engines that answer as one engine; satisfies `megasharp.protocols.AsyncEngine`."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from megasharp.errors import EnginesLost, NotSampled, RunFailed, UserError
from megasharp.serving.client.api import EngineFailed
from megasharp.serving.client.handle import EngineHandle
from megasharp.serving.client.health import Answered
from megasharp.serving.client.launch import FleetSettings, launch, stop, vocabulary
from megasharp.serving.client.local_start import LocalStarter
from megasharp.serving.client.members import Members, WatchSettings
from megasharp.serving.client.restart import Restarts, RestartSettings, Starter
from megasharp.serving.client.router import LeastLoaded, RouterSettings
from megasharp.signals import SaveAsked, held
from megasharp.types import Completion, GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How a fleet is watched and fed, and whether engines that are lost begin anew."""

    watch: WatchSettings = field(default_factory=WatchSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    restarts: RestartSettings = field(default_factory=RestartSettings)


def _silent(_: str) -> None:
    pass


class Fleet:
    """Engines of one model that answer as one engine.

    A prompt that no engine takes (empty, too long) gets aborted completions; `tell` gets a line about the first. An
    engine that is lost is left out from then on, and its unfinished prompts go to the others; `tell` gets a line about
    each. With a `starter` it begins anew, and is let in by a push. `engines` have started, and the fleet ends them.
    Raises RunFailed when one of them fails meanwhile.
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
        self._router = LeastLoaded(self._members, options.router)
        self._restarts = Restarts(self._members, starter, options.restarts, tell) if starter is not None else None
        try:
            self._prompt_limit = min(engine.api.prompt_limit() for engine in engines)
            self._members.start_watching()
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
        """What the engines were started with."""
        return self._settings

    @property
    def prompt_limit(self) -> int:
        """Prompts of so many tokens, with what is begun of a response, and longer ones get no samples."""
        return self._prompt_limit

    @property
    def members(self) -> Members:
        """The engines, with their health."""
        return self._members

    def healthy(self) -> bool:
        """Whether at least one engine can serve the current weights."""
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
        sent = [request for request in requests if self._obstacle(request) is None]
        futures: list[Future[list[Completion]]] = []
        try:
            with held():
                futures.extend(self.submit(request, sampling) for request in requests)
            outcomes = [_outcome(future) for future in futures]
        except SaveAsked:
            # The run goes on for a while, and engines that share the learners' devices must be idle then.
            self._router.abort(futures)
            raise
        except BaseException:
            self._router.drop(futures)
            raise
        refused = [outcome for outcome in outcomes if isinstance(outcome, NotSampled)]
        # One prompt may be at fault; where every one is turned down, something else is.
        if refused and len(refused) == len(sent):
            raise UserError(f"the engines sampled none of {len(refused)} prompts; the first: {refused[0]}")
        return [
            _unsampled(request, sampling) if isinstance(outcome, NotSampled) else outcome
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    @property
    def retried(self) -> int:
        """How many requests were sent again because an engine failed over them."""
        return self._router.retried

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Sample one request; returns at once. What `generate` says of errors holds for the future.

        The future raises NotSampled where the engine refuses the request, EnginesLost where several failed over it.
        """
        self._check([request], sampling)
        obstacle = self._obstacle(request)
        if obstacle is not None:
            self._tell_of_refusal(obstacle)
            future: Future[list[Completion]] = Future()
            future.set_result(_unsampled(request, sampling))
            return future
        sent = self._router.submit(request, sampling)
        sent.add_done_callback(self._tell_of_failure)
        return sent

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """End these requests and wait until they are done: unfinished completions keep their tokens, and say ABORT."""
        self._router.abort(futures)

    @contextmanager
    def updating(self, version: int, *, whole: bool = True) -> Iterator[None]:
        """Bring all weights of policy version `version` to the engines inside; they serve them from the end on.

        `whole`: of every network that the engines hold, so that one which came back can take part.

        Nothing is sampled inside. An engine that fails is left out. Raises RunFailed when none is left, or when one
        says that it serves another version afterwards. After any error no engine serves until an update succeeds.
        """
        if self._closed:
            raise RuntimeError("the fleet was closed")
        if whole and self._restarts is not None:
            self._restarts.look()
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
                raise RunFailed(
                    f"{member.name} serves weights version {served} after version {version} was pushed to it; "
                    f"see {member.process.log}"
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
        """Why a prompt is not even sent, or None."""
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
    starter = LocalStarter(settings) if options is not None and options.restarts.most else None
    return Fleet(launch(settings), settings, options, tell, starter)


def _unsampled(request: GenerateRequest, sampling: SamplingParams) -> list[Completion]:
    return [Completion.unsampled(seed, sampling) for seed in request.seeds]


def _outcome(future: Future[list[Completion]]) -> list[Completion] | NotSampled:
    try:
        return future.result()
    except NotSampled as error:
        return error
