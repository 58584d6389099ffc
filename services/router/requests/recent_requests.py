"""The last requests that ended: where their time went, and nothing of what was said. In memory, newest first."""

from collections import deque
from collections.abc import Sequence

import msgspec

from baton_serve.services.router.protocol.explanation import Explanation
from baton_serve.services.router.requests.timeline import Timeline

_MAX_RECENT_REQUESTS = 50


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    generated_tokens: int
    finish_reasons: list[str]
    baton: Explanation


class RecentRequests:
    def __init__(self) -> None:
        self._requests: deque[tuple[str, int, int, Timeline]] = deque(maxlen=_MAX_RECENT_REQUESTS)

    def add(self, request_id: str, prompt_tokens: int, generated_tokens: int, timeline: Timeline) -> None:
        """`timeline` has ended; it is explained when somebody asks."""
        self._requests.appendleft((request_id, prompt_tokens, generated_tokens, timeline))

    def all(self) -> Sequence[tuple[float, RecentRequest]]:
        """Each with the moment of its end."""
        return [
            (
                timeline.ended_at or timeline.arrived_at,
                RecentRequest(
                    prompt_tokens=prompt_tokens,
                    generated_tokens=generated_tokens,
                    finish_reasons=[str(reason) for reason in timeline.finish_reasons],
                    baton=timeline.explain(request_id, timeline.ended_at or timeline.arrived_at),
                ),
            )
            for request_id, prompt_tokens, generated_tokens, timeline in self._requests
        ]
