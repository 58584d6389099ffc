"""Types of the numbers in requests. Each type has bounds, so that messages and tensors can hold every accepted value.

Integers fit into 32 bits and seeds into 64 bits; infinity and NaN are rejected. The bounds are wider than the limits of
a model or an instance, which are checked where they are known. `tests/structure` fails for a number field without
bounds.
"""

from typing import Annotated

from pydantic import Field

MAX_INT32 = 2**31 - 1

AnyInt = Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)]
"""An integer of 32 bits. It is also used for token ids: the error for a negative id then names the vocabulary's size.
"""
NonNegative = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""A count that may be 0."""
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
"""A count of at least 1."""
OrAll = Annotated[int, Field(ge=-1, le=MAX_INT32)]
"""A count, where -1 means all (`top_k`), or as many as the context allows (`truncate_prompt_tokens`)."""
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
Temperature = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
"""A sampling temperature. Larger values overflow in half precision, and masked logits would become NaN."""
RepetitionPenalty = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]
"""A factor that divides or multiplies logits, so it must not be 0."""
LengthPenalty = Annotated[float, Field(ge=-10.0, le=10.0, allow_inf_nan=False)]
"""The exponent of a beam's length in tokens. With larger values, the power of a million tokens overflows a float."""
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
"""A value that is added to a logit, with OpenAI's bounds."""
