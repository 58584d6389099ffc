"""Queues the new tokens of an API call until its task writes them; decides when a client reads too slowly."""

import asyncio
from collections.abc import Callable

from baton_serve.services.router.protocol.errors import ClientGoneError
from baton_serve.services.router.protocol.request_bounds import MAX_QUEUED_TOKENS
from baton_serve.services.router.text.token_sequence import TokenUpdate

TokenCallback = Callable[[int, TokenUpdate, float], bool]
"""Takes new tokens of a choice immediately, without a turn of the event loop.

The arguments are the index of the choice, the tokens, and the moment of their arrival. It returns False if it cannot
take these tokens; then they go into the queue.
"""


_MIN_ITEMS = 32
"""Number of updates that are queued whatever their size: one token may have as many logprobs as the vocabulary has
tokens."""


class QueuedTokens:
    """New tokens of the choice with index `choice` in the answer. They arrived at `at` (the router's monotonic clock,
    in seconds).
    """

    __slots__ = ("at", "choice", "tokens")

    def __init__(self, choice: int, tokens: TokenUpdate, at: float) -> None:
        self.choice = choice
        self.tokens = tokens
        self.at = at


class TokenQueue:
    """Carries the tokens of all prompts of an API call to the asyncio task that writes the answer. Use it on the event
    loop only; one task may take tokens at a time.

    The task does not take tokens while its client does not read. If more than `MAX_QUEUED_TOKENS` then wait, the call
    fails.
    """

    __slots__ = ("_callback", "_error", "_items", "_num_queued", "_waiter", "on_overflow")

    def __init__(self) -> None:
        self.on_overflow: Callable[[], None] | None = None
        """Called once, in a later turn of the event loop, if more tokens were put than the queue may hold."""
        self._num_queued = 0
        self._items: list[QueuedTokens] = []
        self._waiter: asyncio.Future[None] | None = None
        self._callback: TokenCallback | None = None
        self._error: Exception | None = None

    def put(self, choice: int, tokens: TokenUpdate, at: float) -> None:
        """Add new tokens of a choice, received at `at`, or pass them to the callback of a `take` that waits.

        Never raises: an exception of the callback is stored and raised by `take`, so that it fails this API call only
        and not the requests whose tokens came in the same message.
        """
        # Tokens that are queued must go first: the callback may take new ones only when the queue is empty.
        if self._callback is not None and not self._items:
            try:
                if self._callback(choice, tokens, at):
                    return
            except Exception as exc:  # noqa: BLE001 - the caller has tokens of other requests to deliver
                self.fail(exc)
                return
        if self._error is not None:
            return  # `take` raises the error before these tokens would be returned
        self._num_queued += size_of(tokens)
        # A task that waits takes all of them in the next turn of the event loop, however many there are.
        is_behind = self._waiter is None and len(self._items) >= _MIN_ITEMS
        if is_behind and self._num_queued > MAX_QUEUED_TOKENS:
            self._overflow()
            return
        self._items.append(QueuedTokens(choice, tokens, at))
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Make `take` raise `error` once the tokens that were added before are taken. Later errors are ignored."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self, callback: TokenCallback | None = None) -> list[QueuedTokens]:
        """Wait until tokens are queued, and return all of them, at least one item.

        While it waits, `callback` (if given) gets new tokens first; the tokens that it accepts are not returned. Raises
        the error that was passed to `fail` or raised by `callback`.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter, self._callback = asyncio.get_running_loop().create_future(), callback
            try:
                await self._waiter
            finally:
                self._waiter = self._callback = None
        items, self._items, self._num_queued = self._items, [], 0
        return items

    def _overflow(self) -> None:
        self.fail(ClientGoneError(f"the client is more than {MAX_QUEUED_TOKENS} tokens and logprobs behind its answer"))
        if self.on_overflow is not None:
            # Later, because `put` is called while the sender of these tokens is still at work on its request.
            asyncio.get_running_loop().call_soon(self.on_overflow)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def size_of(tokens: TokenUpdate) -> int:
    """Return the number of tokens and logprobs in an update, by which the length of the queue is limited."""
    num_tokens = len(tokens.token_ids)
    if tokens.logprobs is None:
        return num_tokens
    return num_tokens + sum([1 + len(step.top) for step in tokens.logprobs])
