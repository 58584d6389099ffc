"""What a flight is given: a prompt with all that decides its answer, rules, and the names of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from baton_serve.contracts.block_hash import hash_blocks, root_hash
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.sampling import SamplingParams
from baton_serve.services.router.placement.policy import PlacementPolicy
from baton_serve.services.router.protocol.caller import ANONYMOUS, NO_SLO, Caller, Slo


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How an API call came to its prompts. Moments of the router's monotonic clock; equal ones: nothing was text."""

    at: float
    tokenizing_at: float
    tokenized_at: float
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    continues: bool = False
    """A later part of a call that was admitted: it is neither counted nor refused nor made to wait again."""

    @property
    def tokenize_s(self) -> float:
        return self.tokenized_at - self.tokenizing_at

    def ttft_budget_s(self, now: float) -> float | None:
        """Of the time to the first token that was promised; None: nothing was."""
        return None if self.slo.ttft_s is None else self.slo.ttft_s - (now - self.at)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`request_id` is unique in the cluster. `sampling.max_tokens` has been checked against the context."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    num_sequences: int = 1
    priority: int = 0
    cache_salt: str = ""
    model: frozenset[str] | None = None
    """Names of the model, where the router serves several."""
    lora: str = ""
    """Fingerprint of the adapter; empty: none."""
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()
    """The files of the prompt's images, each once; `media` says where they are."""
    first_choice: int = 0
    """Index in the API call's answer of this prompt's first sequence."""
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Where the spans of instances belong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPolicy:
    policy: PlacementPolicy
    request_timeout_s: float
    handoff_timeout_s: float
    max_replays: int
    instance_wait_s: float
    expected_blocks_ttl_s: float
    first_token_hold: float = 0.0
    """In promised times between tokens: so long a first token is held back at most. 0: never."""


class PromptBlockHashes(msgspec.Struct):
    """Names of the full blocks of some tokens, per layout, computed once."""

    token_ids: list[int]
    cache_salt: str
    lora: str = ""
    media: Sequence[MediaSpan] = ()
    _hashes: dict[KVLayout, list[BlockHash]] = {}

    def extended(self, token_ids: list[int]) -> "PromptBlockHashes":
        """Of these tokens, which begin with its own."""
        return PromptBlockHashes(token_ids, self.cache_salt, self.lora, self.media)

    def root(self, layout: KVLayout) -> BlockHash:
        return _root(layout, self.cache_salt, self.lora)

    def hashes(self, layout: KVLayout) -> list[BlockHash]:
        known = self._hashes.get(layout)
        if known is None:
            full = len(self.token_ids) // layout.block_tokens * layout.block_tokens
            root, tokens = self.root(layout), self.token_ids[:full]
            known = hash_blocks(root, tokens, layout.block_tokens, media=self.media) if full else []
            self._hashes[layout] = known
        return known


@lru_cache(maxsize=1024)
def _root(layout: KVLayout, cache_salt: str, lora: str) -> BlockHash:
    return root_hash(
        fingerprint=layout.fingerprint,
        kv_dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        cache_salt=cache_salt,
        lora=lora,
    )
