"""Call the C++ attention behind `AttentionBackend`: convert tensors to pointers and strides. Nothing is computed here.

Inputs that the library does not support (float64, rows that are not contiguous, rows that see later ones) go to the
plain-torch twin.
"""

import ctypes

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.layers import DTYPE_CODES, KV_CODES, KvStore, reads_cache
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, NewHeads
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _AttendArguments(ctypes.Structure):
    """Mirrors the C struct `AttendArguments` of src/attention.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "cache", "output")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables", "alibi", "sinks")),
        *((name, _LONG) for name in ("query_token_stride", "query_head_stride")),
        *((name, _LONG) for name in ("cache_block_stride", "cache_value_offset")),
        *((name, _LONG) for name in ("cache_head_stride", "cache_token_stride", "table_stride")),
        *((name, _INT) for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "value_dim", "block_tokens")),
        *((name, _INT) for name in ("sliding_window", "dtype", "num_threads", "codes")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


class CpuAttention:
    """Implements `AttentionBackend` by C++ kernels. `library` is the result of `load_kernels`. Plain torch computes
    what the library does not support.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.baton_attend
        self._attend.argtypes = [ctypes.POINTER(_AttendArguments)]
        self._attend.restype = ctypes.c_int
        self._store = KvStore(library)
        self._twin = ReferenceAttention()

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        if not self._store(key, value, cache, meta.slots):
            self._twin.store(key, value, cache, meta)

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        dtype = DTYPE_CODES.get(query.dtype)
        if dtype is None or meta.seen_ends is not None or query.stride(2) != 1 or not reads_cache(cache, query.dtype):
            return self._twin.attend(query, cache, meta, spec)
        assert meta.block_tables.dtype == torch.int32 and meta.block_tables.stride(1) == 1
        assert meta.query_starts.dtype == torch.int32 and meta.context_lens.dtype == torch.int32
        num_tokens, num_heads, head_dim = query.shape
        value_dim = spec.value_dim or head_dim
        output = torch.empty((num_tokens, num_heads, value_dim), dtype=query.dtype)
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        # The library adds slopes before it multiplies a score by `scale`.
        alibi = None if spec.alibi is None else (spec.alibi.float() / spec.scale).contiguous()
        strides = cache.stride()
        arguments = _AttendArguments(
            query=query.data_ptr(),
            cache=cache.data_ptr(),
            output=output.data_ptr(),
            query_starts=meta.query_starts.data_ptr(),
            context_lens=meta.context_lens.data_ptr(),
            block_tables=meta.block_tables.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            alibi=None if alibi is None else alibi.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            cache_block_stride=strides[0],
            cache_value_offset=strides[1],
            cache_head_stride=strides[2],
            cache_token_stride=strides[3],
            table_stride=meta.block_tables.stride(0),
            num_seqs=meta.context_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=cache.shape[2],
            head_dim=head_dim,
            value_dim=value_dim,
            block_tokens=cache.shape[3],
            sliding_window=spec.sliding_window or 0,
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            codes=KV_CODES.get(cache.dtype, 0),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )
        status = self._attend(arguments)
        if status == 1:  # this compiler has no float16
            return self._twin.attend(query, cache, meta, spec)
        if status == 2:
            raise MemoryError("attention ran out of memory for its scratch space")
        return output

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        return None
