"""Requests that take too long, by one timer for all of them."""

import asyncio
import time

from baton_serve.services.router.requests.deadlines import Deadlines
from baton_serve.services.router.requests.lifecycle import Flight


class Flying(Flight):
    """A flight that only remembers when it was given up; then it is no more among `flights`."""

    def __init__(self, name: str, deadline: float, flights: "dict[Flight, None]", late: dict[str, float]) -> None:
        self.name = name
        self.deadline = deadline
        self._flights = flights
        self._late = late

    def expire(self) -> None:
        self._late[self.name] = time.monotonic() - self.deadline
        del self._flights[self]


async def none_left(flights: "dict[Flight, None]") -> None:
    while flights:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


def test_each_flight_ends_at_its_own_deadline_in_whatever_order_they_began() -> None:
    late: dict[str, float] = {}

    async def scenario() -> None:
        flights: dict[Flight, None] = {}
        deadlines = Deadlines(flights, clock=time.monotonic)
        now = time.monotonic()
        made = {name: Flying(name, now + s, flights, late) for name, s in (("b", 0.02), ("c", 0.04), ("a", 0.01))}
        for flight in made.values():
            flights[flight] = None
            deadlines.watch(flight)
        landed = Flying("landed", now + 0.005, flights, late)
        deadlines.watch(landed)  # it was over before its deadline came
        await none_left(flights)
        again = Flying("again", time.monotonic() + 0.01, flights, late)
        flights[again] = None
        deadlines.watch(again)
        await none_left(flights)
        deadlines.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert set(late) == {"a", "b", "c", "again"}
    assert min(late.values()) >= 0


def test_nothing_is_given_up_after_the_router_has_stopped() -> None:
    late: dict[str, float] = {}

    async def scenario() -> None:
        flights: dict[Flight, None] = {}
        deadlines = Deadlines(flights, clock=time.monotonic)
        flight = Flying("a", time.monotonic(), flights, late)
        flights[flight] = None
        deadlines.watch(flight)
        deadlines.close()
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert not late
