"""Tensor maths on logits and on runs of tokens: log-prob, entropy, top-N, and reductions per sequence.

Pure functions: they take tensors and, where the vocabulary is split over ranks, a process group or None. They know no
model, no method and no configuration.
"""
