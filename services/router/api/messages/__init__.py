"""Other APIs' words for a chat: OpenAI's Responses and Anthropic's Messages, on the same generation.

Modules: `blocks` (an answer as a row of blocks), `serving` (streams or sends it), and for each API its schema, what its
request asks as a chat, its answer with its events, and its endpoint. Import the modules, not this package.
"""
