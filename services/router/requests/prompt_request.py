"""Defines what a request's lifecycle starts with: prompt, timing, the router's policy (timeouts, replays), and block
hashes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from baton_serve.contracts.block_hash import cross_hashes, embedding_hashes, hash_blocks, prompt_root, root_hash
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.services.router.placement.policy import PlacementPolicy
from baton_serve.services.router.protocol.caller import ANONYMOUS, NO_SLO, Caller, Slo


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """When an API call arrived and was tokenized, and who made it. Times are those of the router's monotonic clock, in
    seconds.
    """

    at: float
    """Arrival of the API call."""
    tokenizing_at: float
    tokenized_at: float
    """Begin and end of the tokenization; they are equal if the prompts came as token ids."""
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    continues: bool = False
    """A later part of an API call that was admitted before, such as a step of a beam search.

    It is not counted against limits, rejected or queued again.
    """

    @property
    def tokenize_s(self) -> float:
        """The duration of the tokenization in seconds."""
        return self.tokenized_at - self.tokenizing_at

    def ttft_budget_s(self, now: float) -> float | None:
        """Return how many seconds of the TTFT SLO are left at `now`, or None if the request has no such SLO."""
        return None if self.slo.ttft_s is None else self.slo.ttft_s - (now - self.at)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One tokenized prompt of an API call, with everything that decides its answer: sampling parameters, images,
    adapter, salt.
    """

    request_id: str
    """Unique in the cluster."""
    token_ids: list[int]
    sampling: SamplingSpec
    """Its `max_tokens` has been checked against the model's context length."""
    num_sequences: int = 1
    """Number of sequences to generate (`n` or `best_of`)."""
    num_choices: int = 1
    """Number of sequences to return (`n`)."""
    priority: int = 0
    """As in vLLM: smaller numbers go first."""
    cache_salt: str = ""
    """Mixed into the block hashes, so that only requests with the same salt share cached blocks."""
    model: frozenset[str] | None = None
    """Names of the model; None if the router serves only one."""
    lora: str = ""
    """Fingerprint of the LoRA adapter, or empty."""
    media: Sequence[MediaSpan] = ()
    """Positions and digests of the prompt's images."""
    images: Sequence[bytes] = ()
    """Files of the prompt's images, each of them once."""
    files: Sequence[tuple[bytes, ...]] = ()
    """For each file of `images`, the digests of its spans in `media`; empty for one that no encode instance reads."""
    source_tokens: int = 0
    """Positions of the prompt's source, which an encoder reads; 0 without one."""
    num_bidirectional_tokens: int = 0
    """As in `Work`: less than the whole prompt in a beam search; 0: all of it."""
    first_choice: int = 0
    """Index of this prompt's first sequence among the choices of the API call's answer."""
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of the request's span, the parent of the instances' spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPolicy:
    """The router's settings for a single request: timeouts, limits of replays, and placement."""

    policy: PlacementPolicy
    request_timeout_s: float
    """Seconds after its arrival when a request fails with status 504."""
    handoff_timeout_s: float
    """Seconds after which a KV handoff fails."""
    max_replays: int
    """Number of replays of a sequence, not counting those away from draining instances."""
    instance_wait_s: float
    """Seconds that a request waits for an instance if none can take it."""
    expected_blocks_ttl_s: float
    """Seconds for which blocks of a new request count as cached before the worker's cache events arrive."""
    encode_timeout_s: float = 10.0
    """Seconds after which embeddings are not awaited any more, and the images are encoded with the prompt."""
    first_token_hold: float = 0.0
    """Longest time for which a first token is held back, as a multiple of the ITL SLO; 0 disables it."""
    logs_requests: bool = False
    """Whether the end of each request is logged at level info, in place of debug."""


class PromptBlockHashes(msgspec.Struct):
    """The block hashes of a token sequence, for any KV layout. They are computed once for each layout that is asked
    for.

    They depend on the layout (block size, dtype, weights), and on the salt, the LoRA adapter and the images. If the
    tokens of a prompt see each other in both directions, they depend on all of the prompt, too.
    """

    token_ids: list[int]
    cache_salt: str
    lora: str = ""
    media: Sequence[MediaSpan] = ()
    num_prompt_tokens: int = 0
    """Number of leading tokens of the prompt, without generated ones; 0: all tokens."""
    _hashes: dict[KVLayout, list[BlockHash]] = {}
    _roots: dict[KVLayout, BlockHash] = {}

    def extended(self, token_ids: list[int]) -> "PromptBlockHashes":
        """Return the block hashes of a longer sequence. `token_ids` is the whole sequence, which begins with the tokens
        of this one.
        """
        num_prompt = self.num_prompt_tokens or len(self.token_ids)
        return PromptBlockHashes(token_ids, self.cache_salt, self.lora, self.media, num_prompt)

    def root(self, layout: KVLayout) -> BlockHash:
        """Return the root hash in a KV layout: the parent of the first block's hash."""
        if layout.has_bidirectional_prompts is not True:
            return self.tenant_root(layout)
        if (known := self._roots.get(layout)) is None:
            prompt = self.token_ids[: self.num_prompt_tokens or None]
            known = self._roots[layout] = prompt_root(self.tenant_root(layout), prompt, self.media)
        return known

    def tenant_root(self, layout: KVLayout) -> BlockHash:
        """Return the root hash that all prompts with this salt and adapter have, in a KV layout."""
        return _root(layout, self.cache_salt, self.lora)

    def hashes(self, layout: KVLayout) -> list[BlockHash]:
        """Return the hashes of all full blocks in a KV layout. A last block that is partly filled has no hash.

        For a model with recurrent states the last token's block is left out too: the states after it cannot be cut
        back, so they are of no use.
        """
        # Placement asks for each layout of the cluster at every attempt, and hashing a long prompt is expensive.
        known = self._hashes.get(layout)
        if known is None:
            usable = len(self.token_ids) - bool(layout.state_bytes)
            full = usable // layout.block_tokens * layout.block_tokens
            root, tokens = self.root(layout), self.token_ids[:full]
            known = hash_blocks(root, tokens, layout.block_tokens, media=self.media) if full else []
            if layout.source_blocks and self.media:
                # The blocks of the source come first: an instance that has them needs no encoder.
                known = [*cross_hashes(root, self.media[0].digest, layout.source_blocks), *known]
            self._hashes[layout] = known
        return known

    def embedding_root(self, layout: KVLayout) -> BlockHash:
        """Return the root of the embeddings of images in their layout. Adapters change the decoder only."""
        return _root(layout, self.cache_salt, "")

    def embeddings(self, layout: KVLayout) -> dict[bytes, BlockHash]:
        """Return the hash of the first block of each image's embeddings, by the image's digest."""
        root = self.embedding_root(layout)
        return {span.digest: embedding_hashes(root, span.digest, 1)[0] for span in self.media}


# Most requests have no salt and no adapter, and so the same root in each layout.
@lru_cache(maxsize=1024)
def _root(layout: KVLayout, cache_salt: str, lora: str) -> BlockHash:
    return root_hash(
        fingerprint=layout.fingerprint,
        kv_dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        cache_salt=cache_salt,
        lora=lora,
    )
