"""Limits of the number and the length of values in one request. They are far above what normal clients send.

The limits are checked before any work is done. They keep two bounds for every body shorter than `--max-request-bytes`:
no step of parsing holds the interpreter's lock, and thereby delays all streams, for more than 50 ms; and parsing uses
less memory than 20 times the size of the body. Measured on one slow core: a number costs 0.04 us and up to 40 bytes, a
string 0.1 us and 60 bytes, an object that becomes a message or a content part 2 us and a kilobyte.
`tools/fuzz_bodies.py` searches for bodies that break the bounds.
"""

MAX_NUMBERS = 524_288
"""Values in a whole body. OpenAI accepts 300,000 tokens in one embedding request; send longer prompts as strings."""

MAX_OBJECTS = 16_384
"""Objects and lists in a whole body. OpenAI accepts at most 2,048 inputs, and 128 tools with some hundred objects each.
"""

MAX_TEXTS = 65_536
"""Strings in a whole body, including the names of fields."""

MAX_UNKNOWN = 256
"""Unknown parameters in one request. They are ignored, as in vLLM; a request with more of them is rejected."""

MAX_MESSAGES = 10_000
"""Messages in one chat request."""

MAX_TOOLS = 1_024
"""Tools in one request. OpenAI accepts 128."""

MAX_STOPS = 64
"""Stop strings in one request. OpenAI accepts 4."""

MAX_ALLOWED_TOKENS = 262_144
"""Token ids in `allowed_token_ids`. No vocabulary in use has more tokens."""

MAX_STOP_TOKENS = 4_096
"""Token ids in `stop_token_ids`."""

MAX_BAD_WORDS = 1_024
"""Words or phrases in `bad_words`."""

MAX_BAD_WORD_CHARS = 256
"""Characters of one entry of `bad_words`."""

MAX_LOGIT_BIAS = 10_000
"""Token ids with an entry in `logit_bias`."""

MAX_METADATA = 1_024
"""Entries of `metadata`. OpenAI accepts 16."""

MAX_CHOICES = 10_000
"""Alternative answers in `guided_choice`."""

MAX_FORM_CHARS = 512 * 1024
"""Characters of a regular expression, a grammar, all choices together, or a JSON schema that is sent as a string."""

MAX_INPUTS = 10_000
"""Strings, pairs, documents or lists of token ids in one request. OpenAI accepts 2,048."""

MAX_NAME_CHARS = 1_024
"""Characters of a model name, role, type, user or id. Error messages and logs quote such names."""

MAX_STOP_CHARS = 4_096
"""Characters of one stop string. The end of the generated text is compared with each stop string."""

MAX_TOKENS = 1_000_000
"""Tokens of all prompts, inputs or pairs of one request together, after tokenization."""

MAX_TOKEN_RULES = 262_144
"""Entries of token lists (`allowed_token_ids`, `logit_bias`, ...) times the number of prompts in the request.

The lists are sent to the instances once for each prompt."""

MAX_TOKENISED = 65_536
"""Tokens in an answer of /tokenize or /detokenize, unless the model's context is longer."""
