"""The last requests that ended: where their time went, and nothing of what was said. In memory, newest first."""

from collections import deque
from collections.abc import Sequence

import msgspec

from services.router.timeline import Explanation

_KEPT = 50


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    generated_tokens: int
    finish_reasons: list[str]
    baton: Explanation


class RecentRequests:
    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=_KEPT)

    def add(self, request: RecentRequest) -> None:
        self._requests.appendleft(request)

    def all(self) -> Sequence[RecentRequest]:
        return list(self._requests)
