"""Makes the attention metadata of layers with chunked attention (Llama 4): a token sees only its own chunk of the
sequence.

For such a layer every chunk of a sequence is a sequence of its own: its context begins with the chunk, so its block
table begins with the chunk's first block. Kernels compute it as any other batch. New keys and values have the same
places in the cache as for all layers.
"""

from dataclasses import replace

import numpy as np
import torch

from baton_serve.engine.kernels import AttentionMetadata
from baton_serve.engine.model.batch_inputs import StepInputs


def chunked_batch(inputs: StepInputs, chunk: int, block_tokens: int) -> AttentionMetadata:
    """Return the attention metadata of a step for layers with chunked attention (Llama 4): each chunk of `chunk` tokens
    of a sequence becomes a sequence of its own, so that no token sees an earlier chunk. `chunk` is a multiple of
    `block_tokens`.
    """
    meta = inputs.meta
    # No sequence has left its first chunk, so the layer computes the same as all others.
    if meta.max_context_len <= chunk:
        return meta
    # Without lengths in host memory this waits for the device.
    starts, contexts = inputs.lengths or (meta.query_starts.cpu().numpy(), meta.context_lens.cpu().numpy())
    ends = contexts.astype(np.int64)
    begins = ends - np.diff(starts)
    # Both divisions give numbers of chunks: that of the last new token and that of the first one.
    counts = (ends - 1) // chunk - begins // chunk + 1
    # One row for each chunk in which a sequence has new tokens, in the order of the tokens.
    sequence = np.repeat(np.arange(len(ends)), counts)
    # `cumsum - counts` is the first row of each sequence, so the difference counts a sequence's rows from 0.
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[sequence] // chunk
    first, end = number * chunk, np.minimum(ends[sequence], (number + 1) * chunk)
    lengths, contexts = end - np.maximum(begins[sequence], first), end - first
    width = -(-int(contexts.max()) // block_tokens)
    columns = first[:, None] // block_tokens + np.arange(width)
    device = meta.block_tables.device
    # Columns beyond the context are never read; they only have to exist.
    where = torch.from_numpy(np.minimum(columns, meta.block_tables.shape[1] - 1)).to(device)
    rows = torch.from_numpy(sequence).to(device)
    return replace(
        meta,
        query_starts=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device),
        context_lens=torch.from_numpy(contexts.astype(np.int32)).to(device),
        block_tables=meta.block_tables[rows[:, None], where].contiguous(),
        max_query_len=int(lengths.max()),
        max_context_len=int(contexts.max()),
    )
