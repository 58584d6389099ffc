"""Tokens with blocks that were evicted to the host tier and came back equal those of transformers.generate."""

import threading
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.engine import Engine
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.kv.host_slots import SlotChecksums
from baton_serve.engine.kv.kv_cache import KVMemoryKind
from tests.devices import DEVICE
from tests.engine.conftest import Reference, References
from tests.engine.driving import hand_over, make_engine, make_work, place_kv_caches, run
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 120, "block_size": 8, "host_kv_bytes": 4 << 20}
FAMILIES = ["llama", "gemma2", "deepseek_v3", "gemma4"]


def ask_in_turn(engine: Engine, reference: Reference) -> list[list[int]]:
    answers = []
    for number, prompt in enumerate(reference.prompts[:4]):
        engine.add(make_work(engine, str(number), prompt))
        answers.append(run(engine)[str(number), 0])
    return answers


def evict(engine: Engine, seed: int = 9) -> None:
    """Fills the device's cache with something else."""
    prompt = [seed + (5 * i * i) % 180 for i in range(115)]
    engine.add(make_work(engine, "filler", prompt, max_tokens=2, ignore_eos=True))
    run(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_reloaded_blocks_change_no_token(family: str, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, **SMALL) as engine:
        for _ in range(3):
            assert ask_in_turn(engine, reference) == reference.answers[:4]
            evict(engine)
        stats = engine.stats()
        assert stats.host_hit_tokens > 100
        assert 0 < stats.host_used_blocks <= stats.host_total_blocks


def test_in_one_batch_with_preemption(references: References) -> None:
    """The blocks of a preempted sequence are found in the host tier."""
    reference = references("llama")
    with make_engine(reference.folder, **SMALL) as engine:
        for _ in range(2):
            for number, prompt in enumerate(reference.prompts[:3] * 2):
                engine.add(make_work(engine, str(number), prompt))
            answers = run(engine)
            assert [answers[str(n), 0] for n in range(6)] == reference.answers[:3] * 2
        assert engine.stats().host_loaded_blocks > 0


def test_steps_launched_ahead(references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, async_scheduling=True, **SMALL) as engine:
        for _ in range(2):
            for number, prompt in enumerate(reference.prompts[:4]):
                engine.add(make_work(engine, str(number), prompt, sequences=2))
            answers = run(engine)
            for number in range(4):
                assert answers[str(number), 0] == answers[str(number), 1] == reference.answers[number]
            evict(engine)
        assert engine.stats().host_hit_tokens > 0


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_quantized_blocks(kv_cache_dtype: str, references: References) -> None:
    reference, settings = references("llama"), {**SMALL, "kv_cache_dtype": kv_cache_dtype}
    with make_engine(reference.folder, **settings | {"host_kv_bytes": 0}) as plain:
        expected = ask_in_turn(plain, reference)
    with make_engine(reference.folder, **settings) as engine:
        assert ask_in_turn(engine, reference) == expected
        evict(engine)
        assert ask_in_turn(engine, reference) == expected
        assert engine.stats().host_hit_tokens > 0


def test_several_ranks(references: References) -> None:
    """On hosts, where all ranks' parts of a block lie in one memory."""
    reference = references("llama")
    with make_engine(reference.folder, tensor_parallel_size=2, **SMALL) as engine:
        for _ in range(2):
            assert ask_in_turn(engine, reference) == reference.answers[:4]
            evict(engine)
        assert engine.stats().host_hit_tokens > 0


def test_both_ends_of_a_handoff_find_blocks_in_their_host_tiers(references: References) -> None:
    reference = references("llama")
    prompt, answer = reference.prompts[3], reference.answers[3]
    with make_engine(reference.folder, **SMALL) as source, make_engine(reference.folder, **SMALL) as sink:
        for _ in range(2):
            work = make_work(source, "over", prompt)
            assert hand_over(source, sink, work)["over", 0] == answer
            evict(source)
            evict(sink)
        assert source.stats().host_hit_tokens > 0
        assert sink.stats().host_loaded_blocks > 0


def test_a_pin_brings_blocks_back_from_the_host_tier(references: References) -> None:
    reference = references("llama")
    prompt = reference.prompts[3]
    with make_engine(reference.folder, **SMALL) as engine:
        work = make_work(engine, "w", prompt)
        engine.add(work)
        run(engine)
        names = hash_blocks(work.root, prompt, 8)[: len(prompt) // 8]
        before = [_bytes(engine, block) for _, block in engine.pin(RequestId("pin"), names)]
        engine.unpin(RequestId("pin"))
        evict(engine)
        assert len(set(names) - set(engine.cached_block_hashes())) > 3
        pinned = engine.pin(RequestId("pin"), names)
        assert [name for name, _ in pinned] == names
        assert [_bytes(engine, block) for _, block in pinned] == before
        engine.check_invariants()
        engine.unpin(RequestId("pin"))


def test_a_device_whose_memory_the_host_cannot_address(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    place_kv_caches(monkeypatch, "device")
    reference = references("llama")
    with make_engine(reference.folder, **SMALL) as engine:
        for _ in range(2):
            assert ask_in_turn(engine, reference) == reference.answers[:4]
            evict(engine)
        assert engine.stats().host_hit_tokens > 0


def damage(engine: Engine) -> int:
    """Flip one byte of each block in the host tier, at another place in each. Return the number of blocks."""
    memory = engine._host
    assert memory.tier is not None
    names = memory.tier.names()
    # Wait until blocks of a device have arrived in the host memory, and threads have computed their checksums.
    memory.slots.find_damaged([memory.tier._slots[name] for name in names])
    for number, name in enumerate(names):
        slot = memory.slots.slot(memory.tier._slots[name])
        slot[(997 * number) % len(slot)] ^= 0x40
    return len(names)


# KV in shared memory is the CPU's: a device computes in its own.
@pytest.mark.parametrize("place", ["shared", "device"] if DEVICE == "cpu" else ["device"])
def test_a_block_that_was_damaged_in_the_host_tier_is_computed_again(
    place: KVMemoryKind, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dynamo#14416`: a tier returned other bytes than were stored, and the answers were wrong without an error."""
    place_kv_caches(monkeypatch, place)
    reference = references("llama")
    with make_engine(reference.folder, **SMALL) as engine:
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        evict(engine)
        damaged, before = damage(engine), engine.stats()
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        evict(engine)
        after = engine.stats()
        assert 3 < after.host_damaged_blocks <= damaged
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        assert engine.stats().host_damaged_blocks == after.host_damaged_blocks
        assert engine.stats().host_hit_tokens > before.host_hit_tokens, "blocks that were stored again are not used"


class LateCopy:
    """An event of a device, after a copy that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        assert self.ended.wait(10)


def test_checksums_beside_a_device_are_those_of_the_bytes_that_its_copies_brought() -> None:
    slots = {slot: bytearray(b"old bytes") for slot in range(3)}
    checksums, copying = SlotChecksums(slots.__getitem__, has_threads=True), LateCopy()
    checksums.record([0, 1, 2], copying)
    for slot in slots.values():
        slot[:] = b"new bytes"
    copying.ended.set()
    assert checksums.find_damaged([0, 1, 2]) == set()
    slots[1][4] ^= 1
    assert checksums.find_damaged([0, 1, 2]) == {1}
    checksums.record([1], copying)  # another block, in the same slot
    assert checksums.find_damaged([2, 1]) == set()
    checksums.close()


def test_a_decode_instance_fetches_blocks_that_were_damaged_in_its_host_tier(references: References) -> None:
    reference = references("llama")
    prompt, answer = reference.prompts[3], reference.answers[3]
    with make_engine(reference.folder, **SMALL) as source, make_engine(reference.folder, **SMALL) as sink:
        assert hand_over(source, sink, make_work(source, "first", prompt))["first", 0] == answer
        evict(sink)
        damage(sink)
        assert hand_over(source, sink, make_work(source, "again", prompt))["again", 0] == answer
        assert sink.stats().host_damaged_blocks > 0


def test_blocks_that_were_damaged_in_the_host_tier_are_neither_pinned_nor_kept_for_an_import(
    references: References,
) -> None:
    reference = references("llama")
    prompt = reference.prompts[3]
    with make_engine(reference.folder, **SMALL | {"num_gpu_blocks_override": 32}) as engine:
        work = make_work(engine, "w", prompt)
        names = hash_blocks(work.root, prompt, 8)[: len(prompt) // 8]
        for call in ("pin", "import"):
            engine.add(work)
            run(engine)
            evict(engine, 9)
            evict(engine, 10)
            damage(engine)
            on_device = len(engine._pool.match(names))
            assert on_device < len(engine._pool.find(names))
            if call == "pin":
                assert len(engine.pin(RequestId("pin"), names)) == on_device
                engine.unpin(RequestId("pin"))
            else:
                wanted = [*names, BlockHash(bytes(16))]
                missing = engine.begin_import(RequestId("import"), wanted)
                assert [name for name, _ in missing][:2] == wanted[on_device : on_device + 2]
                engine.end_import(RequestId("import"), [])
            engine.check_invariants()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="less than one block"):
        make_engine(folder, host_kv_bytes=10)
    with pytest.raises(ConfigError, match="prefix"):
        make_engine(folder, host_kv_bytes=1 << 20, enable_prefix_caching=False)


def _bytes(engine: Engine, block: int) -> list[int]:
    return list(engine.kv.whole_blocks[block].tolist())
