"""A stand-in for NVIDIA's Transformer Engine, for tests on machines where the real one cannot be installed.

It has what megatron-core's own extension imports and calls of it, in plain torch: names of parameters, marks on them,
communication under tensor and sequence parallelism, and extra state are the real one's; kernels and FP8 are not. No
program of megasharp imports it: tests put this folder on the path of processes of their own.
"""

from . import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.3.0"
