"""What the instances produced for one API call and its task has not yet taken. One reader."""

import asyncio

from services.router.errors import RouterError
from services.router.sequence import NewTokens


class Output:
    """New tokens of one choice of the answer."""

    __slots__ = ("choice", "tokens")

    def __init__(self, choice: int, tokens: NewTokens) -> None:
        self.choice = choice
        self.tokens = tokens


class Outbox:
    def __init__(self) -> None:
        self._items: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: RouterError | None = None

    def put(self, choice: int, tokens: NewTokens) -> None:
        self._items.append(Output(choice, tokens))
        if self._waiter is not None:
            self._wake()

    def fail(self, error: RouterError) -> None:
        """What was put before is still taken first. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[Output]:
        """Everything there is, at least one item. Raises what `fail` was given."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
