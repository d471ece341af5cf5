"""The policy in Megatron-core: the only package that imports megatron.

`ranks/` is how the training loop talks to all ranks. `learner` is one rank's part: it annotates a batch and takes
optimizer steps. `model` builds a GPTModel from a Hugging Face folder, `forward` and `output_head` compute log-probs,
`weights` loads and exports weights under any layout, `sharded_state` saves and loads through Megatron's distributed
checkpointing, `cpu_backend` lets all of that run without CUDA.
"""

import logging
import warnings

from megasharp.learner.lean_import import lean

# At import Megatron warns of what is not installed (Transformer Engine, apex) and of names that torch has deprecated:
# some twenty lines that a user can do nothing about.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\..*")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core\..*")
warnings.filterwarnings("ignore", message=r"Please use DTensor instead")
# The checkpoint writer logs an error that it raises as well, which reaches the user as one line.
logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").setLevel(logging.CRITICAL)

with lean():
    # Before any module of this package imports a part of it.
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
