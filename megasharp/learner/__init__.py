"""The policy in Megatron-core: the only room that imports megatron.

`learner` is the entry: one rank's learner. `model` builds a GPTModel from a Hugging Face folder, `weights` moves
weights in and out under any TP x PP, `state` saves and loads through Megatron's distributed checkpointing, `cpu` lets
all of that run without CUDA.
"""

import logging
import warnings

from megasharp.learner.lean_import import lean

# Megatron says at import what is not installed (Transformer Engine, apex) and keeps names that torch has deprecated; on
# a machine without them that is some twenty lines that a user can do nothing about.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\..*")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core\..*")
warnings.filterwarnings("ignore", message=r"Please use DTensor instead")
# The checkpoint writer logs an error that it raises as well, which reaches the user as one line.
logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").setLevel(logging.CRITICAL)

with lean():
    # Before any module of this room imports a part of it.
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
