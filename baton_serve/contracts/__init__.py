"""Values that cross a process boundary. Depends on msgspec alone.

Modules: `identity` (ids), `naming` (names of blocks), `layout` (shape of a block), `sampling`,
`media` (images of a prompt), `vision` (how many tokens an image is),
`instance` (what an instance tells about itself), `messages` (router <-> instance), `events`
(which blocks an instance caches), `wire` (the one codec), `beam_search` (a rule that router and engine share).
Import the modules, not this package.
"""
