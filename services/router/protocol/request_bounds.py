"""Define the largest number, length and range that the fields of requests may have. Each type has bounds, so that
messages and tensors can hold every accepted value.

Integers fit into 32 bits and seeds into 64 bits; infinity and NaN are rejected. The bounds are wider than the limits of
a model or an instance, which are checked where they are known. `tests/structure` fails for a number field without
bounds.

Limits of the number and the length of values in one request. They are far above what normal clients send.

The limits are checked before any work is done. They keep two bounds for every body shorter than `--max-request-bytes`:
no step of parsing holds the interpreter's lock, and thereby delays all streams, for more than 50 ms; and parsing uses
less memory than 20 times the size of the body. Measured on one slow core: a number costs 0.04 us and up to 40 bytes, a
string 0.1 us and 60 bytes, an object that becomes a message or a content part 2 us and a kilobyte.
`tools/fuzz_bodies.py` searches for bodies that break the bounds.
"""

from typing import Annotated

from pydantic import Field

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
"""Token ids in `stop_token_ids` or `logprob_token_ids`."""

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

MAX_LOGPROBS = 524_288
"""Logprobs of the prompts of one request in all its answers together, or of the tokens of an answer that is not
streamed. Each takes 500 bytes until the answer is sent."""

MAX_QUEUED_TOKENS = 131_072
"""Generated tokens and logprobs of one API call that wait until its client reads. Each takes 130 bytes. A stream of 100
tokens per second with 20 alternatives reaches this after a minute."""

MAX_REPEATED_LOGPROBS = 65_536
"""Logprobs of an answer of the Responses API. The last events of a stream repeat all of them four times."""

MAX_TOKENISED = 65_536
"""Tokens in an answer of /tokenize or /detokenize, unless the model's context is longer."""


MAX_INT32 = 2**31 - 1

AnyInt = Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)]
"""An integer of 32 bits. It is also used for token ids: the error for a negative id then names the vocabulary's size.
"""
NonNegative = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""A count that may be 0."""
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
"""A count of at least 1."""
OrAll = Annotated[int, Field(ge=-1, le=MAX_INT32)]
"""A count, where -1 means all (`top_k`, logprobs), or as many as the context allows (`truncate_prompt_tokens`)."""
Priority = AnyInt
"""The priority of a request. As in vLLM, a smaller value runs first."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""A seed of 64 bits, signed or unsigned."""

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
"""A presence or frequency penalty, with OpenAI's bounds."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A ratio between 0 and 1."""
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
"""The probability mass of nucleus sampling; 0 would exclude every token."""
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
"""A sampling temperature, with OpenAI's bounds."""
RepetitionPenalty = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]
"""A factor that divides or multiplies logits, so it must not be 0."""
LengthPenalty = Annotated[float, Field(ge=-10.0, le=10.0, allow_inf_nan=False)]
"""The exponent of a beam's length in tokens. With larger values, the power of a million tokens overflows a float."""
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
"""A value that is added to a logit, with OpenAI's bounds."""
