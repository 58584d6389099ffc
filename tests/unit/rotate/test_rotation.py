import asyncio
from dataclasses import dataclass, field

import pytest

from baton_serve.contracts.instance import Role
from baton_serve.services.rotate.admin_client import AdminRequestError, InstanceInfo, InstanceState
from baton_serve.services.rotate.rotation import Rotation, RotationError


@dataclass
class FakePool:
    """Instances that restart under a new generation `restart_s` after they were drained. Sleeping moves the clock."""

    seen: dict[str, InstanceInfo]
    restart_s: float = 3.0
    now: float = 0.0
    drained: list[str] = field(default_factory=list)
    due: list[tuple[float, InstanceInfo]] = field(default_factory=list)
    smallest: int = 99
    is_away: bool = False

    async def instances(self) -> list[InstanceInfo]:
        if self.is_away:
            raise AdminRequestError("the router restarts")
        return sorted(self.seen.values(), key=lambda one: one.instance)

    async def drain(self, address: str, *, exit_afterwards: bool) -> None:
        assert exit_afterwards
        one = self.seen.pop(address)
        self.drained.append(one.instance)
        successor = InstanceInfo(
            instance=one.instance,
            generation=one.generation + 100,
            role=one.role,
            http_address=one.http_address,
            draining=False,
        )
        self.due.append((self.now + self.restart_s, successor))
        self.smallest = min(self.smallest, len(self.seen))

    async def state(self, address: str) -> InstanceState | None:
        one = self.seen.get(address)
        return None if one is None else InstanceState(status="ok", generation=one.generation, routers=1, requests=0)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.is_away = 1.0 < self.now < 2.0
        for at, successor in list(self.due):
            if at <= self.now:
                self.due.remove((at, successor))
                self.seen[successor.http_address] = successor


def pool(*instances: tuple[str, Role], restart_s: float = 3.0) -> FakePool:
    seen = {
        name: InstanceInfo(instance=name, generation=i + 1, role=role, http_address=name, draining=False)
        for i, (name, role) in enumerate(instances)
    }
    return FakePool(seen, restart_s=restart_s)


def rotate(fake: FakePool, *roles: Role) -> int:
    said: list[str] = []
    rotation = Rotation(fake, fake, timeout_s=10.0, say=said.append, sleep=fake.sleep, clock=lambda: fake.now)
    return asyncio.run(rotation.run(roles))


def test_a_pool_is_restarted_one_by_one() -> None:
    fake = pool(("decode-0", "decode"), ("decode-1", "decode"), ("decode-2", "decode"), ("prefill-0", "prefill"))
    assert rotate(fake, "decode") == 3
    assert fake.drained == ["decode-0", "decode-1", "decode-2"]
    assert fake.smallest == 3, "never more than one was away"
    assert fake.seen["prefill-0"].generation == 4, "other pools are left alone"
    assert all(one.generation > 100 for one in fake.seen.values() if one.role == "decode")


def test_one_that_does_not_come_back_stops_the_rotation() -> None:
    fake = pool(("decode-0", "decode"), ("decode-1", "decode"), restart_s=60.0)
    with pytest.raises(RotationError, match="decode-0 was drained"):
        rotate(fake, "decode")
    assert fake.drained == ["decode-0"]
