"""Models that answer with vectors: one forward pass over whole inputs, no KV cache, no sampling.

Modules: `kind` (is it such a model), `recipe` (how its vectors are made), `loader`, `network` (inputs to what is
pooled), `heads` (pooling itself), `waiting` (which inputs share a pass), `engine`. Import them, not this package.
"""
