"""Requests that take too long, by one timer for all of them."""

import asyncio
import time

from baton_serve.services.router.requests.dispatcher import Deadlines
from baton_serve.services.router.requests.lifecycle import RequestLifecycle


class RecordingLifecycle(RequestLifecycle):
    """A lifecycle that only records when it was given up; it then leaves `lifecycles`."""

    def __init__(
        self, name: str, deadline: float, lifecycles: "dict[RequestLifecycle, None]", late: dict[str, float]
    ) -> None:
        self.name = name
        self.deadline = deadline
        self._lifecycles = lifecycles
        self._late = late

    def expire(self) -> None:
        self._late[self.name] = time.monotonic() - self.deadline
        del self._lifecycles[self]


async def none_left(lifecycles: "dict[RequestLifecycle, None]") -> None:
    while lifecycles:  # noqa: ASYNC110 - there is nothing to wait on
        await asyncio.sleep(0.001)


def test_each_request_ends_at_its_own_deadline_in_whatever_order_they_began() -> None:
    late: dict[str, float] = {}

    async def scenario() -> None:
        lifecycles: dict[RequestLifecycle, None] = {}
        deadlines = Deadlines(lifecycles, clock=time.monotonic)
        now = time.monotonic()
        made = {
            name: RecordingLifecycle(name, now + s, lifecycles, late)
            for name, s in (("b", 0.02), ("c", 0.04), ("a", 0.01))
        }
        for lifecycle in made.values():
            lifecycles[lifecycle] = None
            deadlines.watch(lifecycle)
        landed = RecordingLifecycle("landed", now + 0.005, lifecycles, late)
        deadlines.watch(landed)  # it was over before its deadline came
        await none_left(lifecycles)
        again = RecordingLifecycle("again", time.monotonic() + 0.01, lifecycles, late)
        lifecycles[again] = None
        deadlines.watch(again)
        await none_left(lifecycles)
        deadlines.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert set(late) == {"a", "b", "c", "again"}
    assert min(late.values()) >= 0


def test_nothing_is_given_up_after_the_router_has_stopped() -> None:
    late: dict[str, float] = {}

    async def scenario() -> None:
        lifecycles: dict[RequestLifecycle, None] = {}
        deadlines = Deadlines(lifecycles, clock=time.monotonic)
        lifecycle = RecordingLifecycle("a", time.monotonic(), lifecycles, late)
        lifecycles[lifecycle] = None
        deadlines.watch(lifecycle)
        deadlines.close()
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert not late
