"""Decides how much of a shared limit (places for requests, memory) one API key's owner may have. Pure."""

from collections import Counter
from collections.abc import Callable


class OwnerShares:
    """Counts what each owner of API keys holds of one limit, and decides whether it may have more.

    While there are several owners, each may hold at most as much as stays free: one that asks alone gets half, two get
    a third each, and n get 1/(n + 1) each. So an owner finds room whatever the others ask for, and an owner that held
    more before others came gets nothing new until it holds as little as they do (the dynamic thresholds of Choudhury
    and Hahne, 1998).
    """

    def __init__(
        self, limit: int, *, smallest_share: int = 1, has_several_owners: Callable[[], bool] = lambda: False
    ) -> None:
        """Create the shares of `limit`, of which nothing is held. An owner may hold up to `smallest_share` however
        little stays free. `has_several_owners` returns whether API keys of more than one owner are accepted now.
        """
        self.limit = limit
        self.total = 0
        """How much all owners hold together."""
        self._smallest_share = smallest_share
        self._has_several_owners = has_several_owners
        self._held: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """How much of the limit nobody holds."""
        return self.limit - self.total

    @property
    def largest(self) -> int:
        """The largest amount that one owner can get while nobody holds anything."""
        return max(self._smallest_share, self.limit // 2) if self._has_several_owners() else self.limit

    def held(self, owner: str) -> int:
        """Return how much `owner` holds."""
        return self._held.get(owner, 0)

    def permits(self, owner: str, amount: int) -> bool:
        """Return whether the share of `owner` has room for `amount` more. Whether so much is free at all is not
        checked.
        """
        if not self._has_several_owners():
            return True
        return self.held(owner) + amount <= max(self.free - amount, self._smallest_share)

    def add(self, owner: str, amount: int) -> None:
        """Count that `owner` holds `amount` more."""
        self._held[owner] += amount
        self.total += amount

    def remove(self, owner: str, amount: int) -> None:
        """Count that `owner` has given `amount` back."""
        left = self._held[owner] - amount
        assert left >= 0, "more was released than granted"
        self.total -= amount
        if left:
            self._held[owner] = left
        else:
            # A zero left behind for every owner that ever sent a request would be a leak.
            del self._held[owner]
