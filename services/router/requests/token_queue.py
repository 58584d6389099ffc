"""What the instances produced for one API call and its task has not yet taken. One reader."""

import asyncio
from collections.abc import Callable

from baton_serve.services.router.text.token_sequence import TokenUpdate

TokenCallback = Callable[[int, TokenUpdate, float], bool]
"""Takes new tokens of a choice in the call that brings them, with the moment when they came; False: not these."""


class QueuedTokens:
    """New tokens of one choice of the answer."""

    __slots__ = ("at", "choice", "tokens")

    def __init__(self, choice: int, tokens: TokenUpdate, at: float) -> None:
        self.choice = choice
        self.tokens = tokens
        self.at = at


class TokenQueue:
    __slots__ = ("_callback", "_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[QueuedTokens] = []
        self._waiter: asyncio.Future[None] | None = None
        self._callback: TokenCallback | None = None
        self._error: Exception | None = None

    def put(self, choice: int, tokens: TokenUpdate, at: float) -> None:
        """`at`: when they came. Never raises: what goes wrong with these tokens is their reader's to hear."""
        if self._callback is not None and not self._items:
            try:
                if self._callback(choice, tokens, at):
                    return
            except Exception as exc:  # noqa: BLE001 - one request's, in the middle of many requests' tokens
                self.fail(exc)
                return
        self._items.append(QueuedTokens(choice, tokens, at))
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """What was put before is still taken first. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self, callback: TokenCallback | None = None) -> list[QueuedTokens]:
        """Everything there is, at least one item; what `callback` took while this waited is not among it. Raises what
        `fail` was given, or `callback` raised."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter, self._callback = asyncio.get_running_loop().create_future(), callback
            try:
                await self._waiter
            finally:
                self._waiter = self._callback = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
