"""Values that cross a process boundary. Depends on msgspec alone.

Modules: `identity` (ids), `block_hash` (hashes of blocks), `block_layout` (shape of a block), `sampling`, `media`
(images of a prompt), `vision` (number of tokens of an image), `pooling`, `instance` (the registry record of an instance
and its load), `messages` (between router and instance), `events` (changes of an instance's cache), `wire` (the one
codec), `beam_search` and `grammar_bounds` (rules that router and engine share). Import the modules, not this package.
"""
