"""What SGLang's child processes must know of us; it travels in the environment, which they inherit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

_VARIABLE = "MEGASHARP_ENGINE"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`memory` is the memory network's folder; `max_rows` the most requests that can be in one batch.

    `deterministic`: each token is drawn with a number hashed from the request's seed and the token's place, as
    `megasharp.rollout.inprocess.sampling` does it. `shared` is the folder in shared memory whose name all that the
    engine's processes share there must carry, so that it can be removed.
    """

    memory: str | None
    max_rows: int
    deterministic: bool
    shared: str | None = None

    def publish(self) -> None:
        """Put them where this process and all children that start from now on find them."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))


def published() -> EngineSettings:
    """What `publish` wrote. Raises KeyError in a process that no engine of ours started."""
    return EngineSettings(**json.loads(os.environ[_VARIABLE]))
