"""The order of copies to and from the host tier on a device with streams, when several ranks hold parts of blocks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine import device
from baton_serve.engine.core.checkpoints import StateCopy
from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.kv.host_blocks import HostTierMemory
from baton_serve.engine.kv.host_slots import HostSlots
from baton_serve.engine.kv.kv_cache import BlockPart, KVCache
from baton_serve.engine.step.cache_copies import CacheMemory
from baton_serve.engine.step.mirror_refs import MirrorRefs
from baton_serve.services.instance.rank_transfers.part_memory import PartMemory

LAYOUT = KVLayout(fingerprint="f", num_layers=2, num_kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")
CPU = torch.device("cpu")


class FakeDevice:
    """Stands in for the functions of a device with streams: it writes down in `waits` which stream waits for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[str] = []
        self._counts: dict[str, int] = {}
        streams = iter(["mirror", "in", "out"])
        monkeypatch.setattr(device, "is_host", lambda _: False)
        monkeypatch.setattr(device, "has_side_streams", bool)
        monkeypatch.setattr(device, "SideStream", lambda _: FakeStream(self, next(streams)))
        monkeypatch.setattr(device, "record", lambda _: self.event("main"))
        monkeypatch.setattr(device, "order_after", lambda _, event: self.waits.append(f"main: {event.name}"))
        monkeypatch.setattr(device, "synchronize", lambda _: None)
        monkeypatch.setattr(device, "pinned_memory", lambda _, size: torch.zeros(size, dtype=torch.uint8))

    def event(self, stream: str) -> "FakeEvent":
        self._counts[stream] = self._counts.get(stream, 0) + 1
        return FakeEvent(f"{stream} {self._counts[stream]}")

    def seen(self) -> list[str]:
        """Return the waits since the last call."""
        waits, self.waits = self.waits, []
        return waits


class FakeEvent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.has_ended = False

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.has_ended


class FakeStream:
    def __init__(self, owner: FakeDevice, name: str) -> None:
        self._owner, self._name = owner, name

    def wait(self, event: FakeEvent) -> None:
        self._owner.waits.append(f"{self._name}: {event.name}")

    def record(self) -> FakeEvent:
        return self._owner.event(self._name)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def make_cache() -> KVCache:
    part = BlockPart(None, (slice(1, 2), slice(1, 2)))
    cache = KVCache(LAYOUT, 8, CPU, part=part, place="mirrored")
    cache.device_tensor.copy_(torch.arange(8, dtype=torch.uint8)[:, None].expand_as(cache.device_tensor))
    return cache


def test_copies_of_a_part_wait_for_its_steps_and_other_copies_and_transports_for_them(fake: FakeDevice) -> None:
    cache = make_cache()
    slots = HostSlots(cache, 2)
    assert len(slots.slot(0)) == LAYOUT.block_bytes // 2
    for _ in range(3):
        cache.order.end_step()  # main 1 to 3
    slots.copy([3], [0], is_to_host=True, steps_after=1)
    assert fake.seen() == ["out: main 2"]
    assert slots.find_damaged([0]) == set()
    # Received bytes fill the block when it has been copied out.
    cache.from_host([3])  # main 4
    assert fake.seen() == ["main: out 1"]
    # The block goes out again: behind the copy that has filled it.
    slots.copy([3], [1], is_to_host=True, steps_after=0)
    assert fake.seen() == ["out: out 1", "out: main 3", "out: main 4"]
    # Another block comes in: behind the copy that has filled the slot.
    slots.copy([5], [0], is_to_host=False, steps_after=2)
    assert fake.seen() == ["in: out 1", "in: main 1"]
    assert cache.device_tensor[5].tolist() == [3] * slots.slot(0).numel()
    # The mirror gets it when it is there.
    cache.to_host([5], steps_after=0)
    assert fake.seen() == ["mirror: main 3", "mirror: in 1"]
    cache.read_part([5, 6], steps_after=1)
    assert fake.seen() == ["mirror: main 2", "mirror: in 1"]
    cache.write_part([5], cache.read_part([6]))
    assert fake.seen() == ["mirror: main 5", "main: in 1"]
    # So do transfers of the part alone.
    assert [event.name for event in PartMemory(cache).ready_after([3, 4, 5])] == ["out 2", "in 1"]
    slots.slot(0)[0] ^= 1
    assert slots.find_damaged([0]) == {0}
    for event in cache.copying.values():
        event.has_ended = True  # type: ignore[attr-defined]
    slots.forget_ended()
    assert not cache.copying
    slots.close()
    cache.close()


def test_a_source_of_a_fork_is_not_filled_before_it_is_copied(fake: FakeDevice) -> None:
    cache = make_cache()
    slots = HostSlots(cache, 1)
    cache.order.end_step()
    slots.copy([1], [0], is_to_host=True, steps_after=0)
    cache.copy_blocks([2], [3])  # main 2
    fake.seen()
    slots.copy([2], [0], is_to_host=False, steps_after=0)
    assert fake.seen() == ["in: out 1", "in: main 1", "in: main 2"]
    slots.close()
    cache.close()


class OtherRanks:
    """Stands in for the other ranks: keeps what rank 0 orders."""

    def __init__(self) -> None:
        self.copies: list[tuple[list[int], list[int], bool, int]] = []
        self.awaited: list[list[int]] = []

    def copy(self, blocks: Sequence[int], slots: Sequence[int], *, is_to_host: bool, steps_after: int) -> None:
        self.copies.append((list(blocks), list(slots), is_to_host, steps_after))

    def before(self, blocks: Sequence[int]) -> None:
        self.awaited.append(list(blocks))

    def find_damaged(self, slots: Sequence[int], find_here: Callable[[], set[int]]) -> set[int]:
        return find_here() | {slots[-1]}


def test_steps_of_other_ranks_wait_once_for_their_copies_although_those_of_rank_0_have_ended(fake: FakeDevice) -> None:
    cache, others, tier = make_cache(), OtherRanks(), HostTier(4)
    memory = HostTierMemory(cache, tier, others)
    names = [BlockHash(bytes([number]) * 16) for number in range(3)]
    for _ in range(4):
        cache.order.end_step()
    # The third of four steps has ended.
    memory.on_step_end(steps_after=1)
    for number, name in enumerate(names):
        tier.store(name, number + 1)
    cache.order.end_step()
    tier.load(names[:1], [7])
    memory.move()
    assert others.copies == [([1, 2, 3], [0, 1, 2], True, 2), ([7], [0], False, 2)]
    assert fake.seen() == ["out: main 3", "in: out 1", "in: main 3"]
    for event in cache.copying.values():
        event.has_ended = True  # type: ignore[attr-defined]
    memory.on_step_end(steps_after=1)
    for blocks in ([5, 6], [2, 6, 1], [2, 1]):
        memory.before(blocks)
    assert others.awaited == [[1, 2]]
    assert fake.seen() == []
    # A slot that is damaged on any rank counts.
    assert not tier.verify(names)
    assert names[2] not in tier and names[0] in tier
    memory.close()
    cache.close()


class PlannedStates:
    """Stands in for `RequestTable` with planned copies of recurrent states, and for what executes them."""

    def __init__(self, *copies: StateCopy) -> None:
        self.checkpoints: Any = self
        self._copies = copies

    def take_copies(self) -> Sequence[StateCopy]:
        return self._copies

    def execute(self, copies: Iterable[StateCopy]) -> None: ...


def test_copies_of_a_single_rank_wait_for_the_last_step_that_has_ended_and_for_checkpoints_behind_later_ones(
    fake: FakeDevice,
) -> None:
    device.SideStream(CPU)  # takes the name of a mirror's, which a single rank has not
    cache, tier = KVCache(LAYOUT, 8, CPU, place="device"), HostTier(4)
    cache.order.end_step()  # nothing is recorded without a host tier
    host = HostTierMemory(cache, tier)
    for _ in range(3):
        cache.order.end_step()  # main 1 to 3
    planned: Any = PlannedStates(StateCopy("save", 0, (5,)), StateCopy("clear", 1))
    memory = CacheMemory(cache, host, cache, MirrorRefs(cache), planned)
    memory.copy_states(planned)  # main 4
    # The second step has ended, and the third was launched ahead.
    host.on_step_end(steps_after=1)
    names = [BlockHash(bytes([number]) * 16) for number in range(2)]
    tier.store(names[0], 1)
    host.move()
    assert fake.seen() == ["out: main 2"]
    # The third step has computed the states of the checkpoint.
    tier.store(names[1], 5)
    host.move()
    assert fake.seen() == ["out: main 2", "out: main 4"]
    host.close()
    cache.close()


def test_a_part_of_no_bytes_has_slots_too() -> None:
    cache = KVCache(LAYOUT, 4, CPU, part=BlockPart(slice(0, 0)), place="mirrored")
    slots = HostSlots(cache, 3)
    slots.copy([1], [2], is_to_host=True, steps_after=0)
    slots.copy([3], [2], is_to_host=False, steps_after=0)
    assert slots.find_damaged([2]) == set()
    slots.close()
    cache.close()
