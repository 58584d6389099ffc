"""Tensor parallelism: one engine over several devices of a host, a process each.

Rank 0 is the engine itself: it plans, samples and speaks with the outside. The others hold their shard of weights and
KV cache and do what rank 0's commands say. Each layer's two sums cross the ranks, and so do the logits' columns.
"""
