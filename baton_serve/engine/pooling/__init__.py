"""Pooling models (embeddings, classification, scores): one forward pass over whole inputs, no KV cache, no sampling.

Modules: `model_kind` (whether a folder holds such a model), `pooling_config` (how hidden states become a vector),
`loader`, `pooled_forward` (forward pass and pooling), `input_queue` (which inputs share a pass), `engine`.
"""
