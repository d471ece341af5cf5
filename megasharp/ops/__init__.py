"""Tensor maths on logits and on runs of tokens: log-prob, entropy, top-N, and reductions per sequence.

The room is pure: it takes tensors and, where the vocabulary is split over ranks, a process group or None. It
knows no model, no method and no configuration.
"""
