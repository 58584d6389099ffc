"""Puts the tokens of one sequence into order, and drops duplicates after a handoff or replay.

Around a handoff and after a replay, tokens may arrive twice or too early: duplicates are dropped, and early tokens wait
for those before them. This module is pure.
"""

import logging
from collections.abc import Sequence

import msgspec

from baton_serve.contracts.messages import FinishReason, TokenLogprobs, Tokens

logger = logging.getLogger(__name__)


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens of a sequence that directly follow those received before. `finish_reason` is set only with the last
    tokens.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_token_id: int | None


TokenUpdate = Tokens | NewTokens
"""New tokens in order. A message whose tokens are all new is passed on without a copy."""


class TokenSequence(msgspec.Struct):
    """Puts the generated tokens of one sequence in order: with two instances or after a replay, messages may arrive
    early or twice. The request's `RequestLifecycle` owns it, on the event loop.
    """

    index: int
    token_ids: list[int] = []
    """The generated tokens received so far, in order. A replay continues after them."""
    is_finished: bool = False
    _early: dict[int, Tokens] = {}
    """Messages that arrived before the tokens that precede them, by position."""

    def accept(self, message: Tokens) -> Sequence[TokenUpdate]:
        """Store the tokens of a message from an instance. Return all tokens that now follow the ones returned before,
        in order; there may be none.
        """
        if self.is_finished:
            return ()
        token_ids = self.token_ids
        # The fast path for nearly every message: its tokens directly follow the known ones.
        if message.position == len(token_ids) and message.token_ids and not self._early:
            token_ids += message.token_ids
            self.is_finished = message.finish_reason is not None
            return (message,)
        if message.position > len(self.token_ids):
            self._early[message.position] = message
            return ()
        first = self._take(message)
        updates: list[TokenUpdate] = [] if first is None else [first]
        while self._early and not self.is_finished and (position := self._next_early()) is not None:
            if (new := self._take(self._early.pop(position))) is not None:
                updates.append(new)
        return updates

    def drop_out_of_order(self) -> None:
        """Drop tokens that arrived before tokens that precede them. Call it when the instance that sent them is lost,
        because the preceding ones may never come.
        """
        self._early.clear()

    @property
    def has_gap(self) -> bool:
        """True if tokens were received whose preceding tokens are missing."""
        return bool(self._early)

    def _next_early(self) -> int | None:
        return min((position for position in self._early if position <= len(self.token_ids)), default=None)

    def _take(self, message: Tokens) -> NewTokens | None:
        known = len(self.token_ids) - message.position
        # Every attempt has the same seed and the same input, so instances should generate the same tokens. The client
        # already has the first ones, so these are kept.
        if known and self.token_ids[message.position :][: len(message.token_ids)] != message.token_ids[:known]:
            logger.error(
                "two instances generated different tokens at position %d of a sequence, keeping the first ones",
                message.position,
                extra={"request_id": message.request_id},
            )
        new = message.token_ids[known:] if known else message.token_ids
        if not new and message.finish_reason is None:
            return None
        self.token_ids += new
        self.is_finished = message.finish_reason is not None
        logprobs = message.logprobs[known:] if message.logprobs is not None and known else message.logprobs
        return NewTokens(new, logprobs, message.finish_reason, message.stop_token_id)
