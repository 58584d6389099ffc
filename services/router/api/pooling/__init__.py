"""Endpoints of pooling models, which compute vectors: embeddings, pooling, scores, ranks and classes.

Modules: `schema` (requests), `responses` (answers), `inputs` (texts to token ids), `endpoint` (the part that all
endpoints share), and one module for each kind of endpoint. Import the modules, not this package.
"""
