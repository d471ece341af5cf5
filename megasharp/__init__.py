"""megasharp: reinforcement learning with verifiable rewards that keeps a model's answers diverse."""

__version__ = "0.2.0"
