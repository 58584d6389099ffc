"""Move blocks between instances whose layouts differ in block size or dtype.

`plan` computes which tokens of which block go where, and `staging_buffers` keeps that for running fetches; both are
pure. `tensors` converts the bytes; `receivers` and `senders` connect it to the transports. These three import torch.
"""
