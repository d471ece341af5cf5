"""The in-process engine: batched sampling from Hugging Face weights inside the trainer's own process."""

from megasharp.rollout.inprocess.engine import InProcessEngine

__all__ = ["InProcessEngine"]
