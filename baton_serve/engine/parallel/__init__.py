"""Tensor and pipeline parallelism: one engine over several devices, with one process for each rank.

Rank 0 is the engine itself: it schedules, samples and communicates. The other ranks hold their shard of the weights and
the KV cache and execute rank 0's commands. In each layer two sums are exchanged between the ranks, and after the last
layer the columns of the logits.
"""
