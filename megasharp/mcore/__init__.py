"""The policy in Megatron-core: the only room that imports megatron.

`learner` is the entry: one rank's learner. `model` builds a GPTModel from a Hugging Face folder, `weights` moves
weights in and out under any TP x PP, `state` saves and loads through Megatron's distributed checkpointing, `cpu` lets
all of that run without CUDA.
"""
