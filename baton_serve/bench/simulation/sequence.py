"""What a simulated engine knows of one request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton_serve.bench.simulation.cache import Holding
from baton_serve.contracts.identity import BlockHash, RequestId, TicketId


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One request here. `prefill` ends with its first token, `decode` begins with the second, `generate` does both."""

    request_id: RequestId
    mode: Literal["prefill", "decode", "generate"]
    num_tokens: int
    """To have in the cache before the next token."""
    remaining: int
    """Tokens still to write here."""
    names: Sequence[BlockHash]
    """Of its full blocks."""
    arrived_at: float
    due: int = 0
    """When it is its turn, in tokens of prompts computed here."""
    itl_s: float | None = None
    """What was promised to it."""
    ticket: TicketId | None = None
    holding: Holding = field(default_factory=Holding)
    computed: int = 0
    cached: int = 0
    written: int = 0
    """Tokens after `num_tokens`, the one from prefill included."""
    told: int = 1
    """Of the tokens of this request that its instances write; the first is told of by who computes the prompt."""
    started_at: float | None = None
    last_token_at: float | None = None
    is_fresh: bool = True
    """The gap before its next token also holds what went before it joined the batch."""

    @property
    def kv_tokens(self) -> int:
        """The newest token has no KV yet."""
        return self.num_tokens + max(0, self.written - 1)
