"""Blocks between ends whose layouts differ: other block sizes, other dtypes.

`plan` says which tokens of which block go where, `staging_buffers` keeps that for running fetches; both are pure.
`tensors` carries it out, `inlets` and `outlets` do so on the way of the bytes: those three load torch.
"""
