"""Soft overlong punishment: a penalty that grows over the last tokens before the limit (DAPO, arXiv 2503.14476).

    r_i' = r_i + factor * clip( (max_tokens - cache_tokens - length_i) / cache_tokens, -1, 0 )

0 up to max_tokens - cache_tokens response tokens (the end token counts), -factor from max_tokens on. It changes rewards
only. Printed: the formula, and for the paper's run limits of 20480 and 4096 tokens, a factor of 1, and rewards +1 / -1.
The factor stands relative to the rewards. Verdicts here are usually 1 / 0, half that range: there 0.5 gives the same
normalised advantages as the paper's 1, and is what the bundle `dapo` sets; with a factor of 1 a correct response at the
limit earns what a wrong short one does.
The tokens of an environment count too, as they do for the run's response limit.
Ours: `max_tokens` defaults to the run's response limit, `cache_tokens` to a fifth of it, the paper's proportion.
Degenerate cases: a group that is all correct or all wrong gains advantages where lengths differ near the limit.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.common.errors import UserError
from megasharp.common.records import Group

CACHE_SHARE = 5


class SoftOverlongParams(MethodParams):
    """In tokens: the length of the full penalty (None: the run's response limit), and of its ramp (None: a fifth)."""

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Length in tokens from which the full penalty is due. null: the response limit of the run, or of "
        "the stage.",
    )
    cache_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens before max_tokens over which the penalty grows from 0. null: a fifth of "
        "max_tokens, DAPO's proportion.",
    )
    factor: float = Field(
        default=1.0,
        ge=0.0,
        description="Full penalty, subtracted from the reward. DAPO's 1.0 is meant for rewards of +1 and -1; with "
        "rewards of 1 and 0 set 0.5, as the bundle dapo does.",
    )


class SoftOverlong(Method[SoftOverlongParams]):
    """Less reward for responses that come close to the length limit."""

    paper = "2503.14476"
    options = "a penalty for responses that come close to the length limit."
    Params = SoftOverlongParams

    def within(self, response_limit: int) -> Self:
        """Settle `max_tokens` and `cache_tokens`, in tokens. Raises UserError where the second exceeds the first."""
        limit = self.params.max_tokens or response_limit
        cache = self.params.cache_tokens or max(limit // CACHE_SHARE, 1)
        if cache > limit:
            raise UserError(
                f"recipe.soft_overlong: cache_tokens {cache} exceeds max_tokens {limit}: "
                "a response would be punished from its first token on; lower cache_tokens"
            )
        return type(self)(self.params.model_copy(update={"max_tokens": limit, "cache_tokens": cache}))

    def rewards(self, group: Group, rewards_G: Tensor) -> Tensor:
        """Add factor clip((max_tokens - cache_tokens - length_i) / cache_tokens, -1, 0), float64 [G] (2503.14476)."""
        limit, cache = self.params.max_tokens, self.params.cache_tokens
        assert limit is not None and cache is not None, "recipes settle both in `within`"
        length_G = rewards_G.new_tensor([response.length for response in group.responses])
        return rewards_G + self.params.factor * ((limit - cache - length_G) / cache).clamp(-1.0, 0.0)
