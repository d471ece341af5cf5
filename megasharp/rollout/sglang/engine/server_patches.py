"""Changes of an engine to SGLang's server process alone.

Sleep and wake at the wrong moment become answers. A prompt's cache is shared only by requests that came to the same
weights: an engine that keeps what is in flight at a push keeps what it has cached too.

`TokenizerManager` is where every call passes on its way to the scheduler. Requests are stopped at the last point before
it, so that one which waited, for a pause to end or for its tokens, is stopped as well.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from megasharp.common.group_environment import as_set
from megasharp.rollout.sglang.engine import sglang_internals
from megasharp.rollout.sglang.engine.sleeping import Sleep
from megasharp.rollout.sglang.identity import FIELD, VARIABLES

_IDLE_LIMIT_S = 5.0
_POLL_S = 0.05
_UPDATES = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk")
# SGLang's name of the label that the last part of a push sets.
_SERVED = "weight_version"
_READS = ("begin_weight_update", "check_weights")

Call = Callable[..., Awaitable[Any]]


def apply(sleep: Sleep, said: Mapping[str, Any]) -> None:
    """Make the changes, once per process; `said` is the engine's identity, a part of /server_info from now on."""
    manager = sglang_internals.TokenizerManager
    _tell_identity(manager, said)
    _stop_requests(manager, sleep)
    _judge_sleep(manager, sleep)
    for name in _UPDATES:
        setattr(manager, name, _watched_update(getattr(manager, name), sleep))
    for name in _READS:
        setattr(manager, name, _while_weights_are_there(getattr(manager, name), sleep))


def _tell_identity(manager: Any, said: Mapping[str, Any]) -> None:
    states: Call = manager.get_internal_state

    async def with_identity(self: Any) -> Any:
        first, *others = await states(self)
        # SGLang has set its own by now.
        return [{**first, FIELD: {**said, VARIABLES: as_set(os.environ)}}, *others]

    manager.get_internal_state = with_identity


def _stop_requests(manager: Any, sleep: Sleep) -> None:
    send_one: Call = manager._send_one_request
    send_batch: Call = manager._send_batch_request
    proceed: Call = manager.continue_generation

    async def one(self: Any, request: Any) -> None:
        if sleep.why_closed() is None:
            request.extra_key = self.config_value(_SERVED)
            await send_one(self, request)
        elif str(request.rid).startswith(sglang_internals.HEALTH_CHECK_RID_PREFIX):
            # Any answer of the scheduler's is a sign of life; a forward pass would need what sleeps.
            await self.get_internal_state()
        else:
            raise _unavailable(sleep)

    async def batch(self: Any, requests: Any) -> None:
        if sleep.why_closed() is not None:
            raise _unavailable(sleep)
        for request in requests:
            request.extra_key = self.config_value(_SERVED)
        await send_batch(self, requests)

    async def unpause(self: Any, request: Any) -> None:
        if sleep.why_closed() is not None:
            raise _unavailable(sleep)
        await proceed(self, request)

    manager._send_one_request = one
    manager._send_batch_request = batch
    manager.continue_generation = unpause


def _judge_sleep(manager: Any, sleep: Sleep) -> None:
    release: Call = manager.release_memory_occupation
    resume: Call = manager.resume_memory_occupation

    async def give_back(self: Any, call: Any, request: Any = None) -> None:
        call.tags = sleep.to_release(call.tags)
        # Closed first and emptied then, so that no request comes in between.
        sleep.released(call.tags)
        try:
            await _forget_prefixes(self)
        except BaseException:
            sleep.not_released(call.tags)
            raise
        await release(self, call, request)

    async def bring_back(self: Any, call: Any, request: Any = None) -> None:
        call.tags = sleep.to_resume(call.tags)
        await resume(self, call, request)
        sleep.resumed(call.tags)

    manager.release_memory_occupation = give_back
    manager.resume_memory_occupation = bring_back


async def _forget_prefixes(manager: Any) -> None:
    """Flush the cache, whichever part sleeps: prefixes belong to weights that will change.

    Raises ValueError where requests are in flight.

    It succeeds only when nothing runs, which SGLang's scheduler asserts of a release; nothing can come in any more.
    """
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while not (await manager.flush_cache()).success:
        if time.monotonic() > deadline:
            raise ValueError("requests are in flight; pause generation first (retract), or let them end")
        await asyncio.sleep(_POLL_S)


def _watched_update(update: Call, sleep: Sleep) -> Call:
    async def answer(self: Any, call: Any, request: Any = None) -> Any:
        result = await _while_weights_are_there(update, sleep)(self, call, request)
        # The last part of a version, and only that, carries its label.
        if result[0] and call.weight_version is not None:
            sleep.updated()
        return result

    return answer


def _while_weights_are_there(act: Call, sleep: Sleep) -> Call:
    async def answer(self: Any, call: Any, request: Any = None) -> Any:
        reason = sleep.why_fixed()
        if reason is not None:
            raise sglang_internals.HTTPException(HTTPStatus.BAD_REQUEST, reason)
        return await act(self, call, request)

    return answer


def _unavailable(sleep: Sleep) -> Exception:
    refusal: Exception = sglang_internals.HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, sleep.why_closed())
    return refusal
