"""The tokens of one sequence in order, whoever sends them: what came twice is dropped, what came early waits. Pure."""

import logging
from collections.abc import Sequence

import msgspec

from baton_serve.contracts.messages import FinishReason, TokenLogprobs, Tokens

logger = logging.getLogger(__name__)


class NewTokens(msgspec.Struct, frozen=True):
    """Never seen before, and next in order. `finish_reason` comes with the last ones."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_token_id: int | None


TokenUpdate = Tokens | NewTokens
"""A message of which all is new is handed on as it is."""


class TokenSequence(msgspec.Struct):
    index: int
    token_ids: list[int] = []
    """All that was received so far: what a replay goes on from."""
    is_finished: bool = False
    _early: dict[int, Tokens] = {}

    def accept(self, message: Tokens) -> Sequence[TokenUpdate]:
        """What can be handed on now."""
        if self.is_finished:
            return ()
        token_ids = self.token_ids
        if message.position == len(token_ids) and message.token_ids and not self._early:  # nearly always
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
        """Whoever sent them will not send what is missing before them."""
        self._early.clear()

    @property
    def has_gap(self) -> bool:
        return bool(self._early)

    def _next_early(self) -> int | None:
        return min((position for position in self._early if position <= len(self.token_ids)), default=None)

    def _take(self, message: Tokens) -> NewTokens | None:
        known = len(self.token_ids) - message.position
        if known and self.token_ids[message.position :][: len(message.token_ids)] != message.token_ids[:known]:
            logger.error("two instances disagree about a token", extra={"request_id": message.request_id})
        new = message.token_ids[known:] if known else message.token_ids
        if not new and message.finish_reason is None:
            return None
        self.token_ids += new
        self.is_finished = message.finish_reason is not None
        logprobs = message.logprobs[known:] if message.logprobs is not None and known else message.logprobs
        return NewTokens(new, logprobs, message.finish_reason, message.stop_token_id)
