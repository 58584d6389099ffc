"""State of one request in a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton_serve.bench.simulation.cache import Holding
from baton_serve.contracts.identity import BlockHash, RequestId, TicketId


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One request on one instance. A `prefill` sequence ends with its first token, `decode` begins with the second,
    and `generate` does both."""

    request_id: RequestId
    mode: Literal["prefill", "decode", "generate"]
    num_tokens: int
    """Tokens that must be in the cache before the next token can be computed."""
    remaining: int
    """Tokens still to generate on this instance."""
    names: Sequence[BlockHash]
    """Hashes of its full blocks."""
    arrived_at: float
    due: int = 0
    """Position in the queue, counted in prompt tokens computed on this instance."""
    itl_s: float | None = None
    """Its ITL SLO; None without one."""
    ticket: TicketId | None = None
    holding: Holding = field(default_factory=Holding)
    computed: int = 0
    cached: int = 0
    written: int = 0
    """Tokens generated after the first `num_tokens`, including the one from prefill."""
    num_reported: int = 1
    """Tokens of this request that have been reported to the router. The first one is reported where the prompt is
    computed."""
    started_at: float | None = None
    last_token_at: float | None = None
    is_fresh: bool = True
    """True until its first token in this batch: the gap before that token includes the time before it joined."""

    @property
    def kv_tokens(self) -> int:
        """Return the tokens with KV in the cache. The newest token has none yet."""
        return self.num_tokens + max(0, self.written - 1)
