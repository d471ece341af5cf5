"""Three levels of reward in place of a task's own."""

from __future__ import annotations

from pydantic import Field

from megasharp.common.section import Section


class RewardLevels(Section):
    """Rewards of a right answer, of a wrong one in the form that the task asks for, and of everything else.

    Right is what the verifier says, whatever it earns here: pass@k does not change.
    """

    correct: float = Field(default=1.0, description="Reward of a right answer.")
    well_formed: float = Field(
        default=0.0,
        description="Reward of a wrong answer in the form that the task asks for, such as a number in a box. For "
        "countdown_3 and countdown_3to4 anything in answer tags is in that form. A score between 0 and 1, as "
        "reasoning_gym gives, counts as this.",
    )
    other: float = Field(
        default=0.0,
        description="Reward of all other responses: without an answer in that form, or whose verifier failed or took "
        "too long.",
    )
