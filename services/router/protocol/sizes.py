"""How many of each thing a request may have, far above what honest clients send. Counted before any work is done.

The limits keep two bounds for every body below `--max-request-bytes`: no step of reading it holds the interpreter's
lock, and with it all streams, for more than 50 ms; and it uses less than 20 times its size in memory. Measured on one
slow core: a number costs 0.04 us and up to 40 bytes, a text 0.1 us and 60 bytes, an object that becomes a message or a
part of one 2 us and a kilobyte. `tools/fuzz_bodies.py` searches for bodies that break the bounds.
"""

MAX_NUMBERS = 524_288
"""Of a whole body. OpenAI takes 300,000 tokens in one request for embeddings. Longer prompts go as texts."""

MAX_OBJECTS = 16_384
"""Of a whole body, lists included. OpenAI takes 2,048 inputs and 128 tools with some hundred objects each at most."""

MAX_TEXTS = 65_536
"""Of a whole body, names of fields included."""

MAX_UNKNOWN = 256
"""Names of parameters that nobody knows. They are ignored, as in vLLM; a request that has more is no request."""

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_024
"""OpenAI takes 128."""

MAX_STOPS = 64
"""OpenAI takes 4."""

MAX_ALLOWED_TOKENS = 262_144
"""No vocabulary in use has more tokens."""

MAX_STOP_TOKENS = 4_096
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 10_000
MAX_METADATA = 1_024
"""OpenAI takes 16 pairs."""

MAX_CHOICES = 10_000
"""Answers that `guided_choice` allows."""

MAX_FORM_CHARS = 512 * 1024
"""Of a regular expression, a grammar, all choices, or a JSON schema that is given as a text."""

MAX_INPUTS = 10_000
"""Texts, pairs, documents or lists of token ids. OpenAI takes 2,048."""

MAX_NAME_CHARS = 1_024
"""Of a model, a role, a type, a user, an id: whatever error messages and logs quote."""

MAX_STOP_CHARS = 4_096
"""Of a stop string: the end of the answer is compared with each."""

MAX_TOKENS = 1_000_000
"""Of all prompts, inputs or pairs of one request together, once texts have become tokens."""

MAX_TOKEN_RULES = 262_144
"""Tokens in lists (`allowed_token_ids`, `logit_bias`, ...) times the prompts that each of them is sent along with."""

MAX_TOKENISED = 65_536
"""Tokens that /tokenize and /detokenize answer with, unless the model's context is greater."""
