"""Types of the numbers in requests. Each has bounds, so that messages and tensors can carry every accepted value.

Integers fit in 32 bits, seeds in 64; no number is infinite or NaN. Bounds are wider than what a model or an instance
allows: that is checked where it is known. `tests/structure` refuses a field of a schema without bounds.
"""

from typing import Annotated

from pydantic import Field

MOST = 2**31 - 1

AnyInt = Annotated[int, Field(ge=-MOST - 1, le=MOST)]
"""Token ids too: a negative one is refused with the vocabulary's size."""
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
OrAll = Annotated[int, Field(ge=-1, le=MOST)]
"""-1 means as many as there are."""
Priority = AnyInt
"""As in vLLM: smaller runs first."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""What fits in 64 bits, signed or not."""

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
"""Larger ones are infinite in half precision, and what is excluded would become NaN."""
RepetitionPenalty = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]
LengthPenalty = Annotated[float, Field(ge=-10.0, le=10.0, allow_inf_nan=False)]
"""The exponent of a length: a million tokens to the power of larger ones is no floating point number."""
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
"""Of a logit, as in OpenAI's API."""
