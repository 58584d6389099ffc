"""Endpoints of models that answer with vectors: embeddings, pooling, scores, ranks and classes.

Modules: `schema` (what clients send), `responses` (what they get), `inputs` (texts to token ids), `calls` (inputs to
vectors, through the instances), and one module for each kind of endpoint. Import the modules, not this package.
"""
