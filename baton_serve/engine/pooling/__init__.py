"""Pooling models (embeddings, classification, scores): one forward pass over whole inputs, no KV cache, no sampling.

Modules: `kind` (whether a folder holds such a model), `recipe` (how hidden states become a vector), `loader`, `network`
(forward pass and pooling), `input_queue` (which inputs share a pass), `engine`. Import the modules, not this package.
"""
