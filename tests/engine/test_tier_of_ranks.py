"""The host tier of engines whose ranks each hold a part of every block, as on devices: tokens, damage and copies."""

from typing import Any

import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.kv.host_slots import HostSlots
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.parallel import tp_worker
from tests.devices import DEVICE
from tests.engine.driving import hand_over, make_engine, make_work, place_kv_caches, run
from tests.engine.test_host_tier import ask_in_turn, damage, evict
from tests.references import Reference, References

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("threaded_ranks"),
    pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads of one process"),
]

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    place_kv_caches(monkeypatch, "mirrored")


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[HostSlots]:
    """The slots of the ranks beside rank 0, of engines that the test makes."""
    found: list[HostSlots] = []

    def make(cache: KVCache, num_slots: int) -> HostSlots:
        found.append(HostSlots(cache, num_slots))
        return found[-1]

    monkeypatch.setattr(tp_worker, "HostSlots", make)
    return found


def small(reference: Reference, **settings: Any) -> dict[str, Any]:
    """Return settings with room for 16 blocks of KV on the device, and for checkpoints if there are states."""
    with make_engine(reference.folder, block_size=8) as one:
        layout = one.layout
    return {
        "num_gpu_blocks_override": 16 + 3 * layout.state_blocks,
        "max_model_len": 120,
        "block_size": 8,
        "host_kv_bytes": 4 << 20,
        **settings,
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", TWO),
        ("llama", STAGES),
        ("llama", TWO | STAGES),
        ("deepseek_v3", TWO),  # every rank holds all of the latent KV
        ("gemma4", TWO),
        ("qwen3_5", TWO),
        ("qwen3_5", STAGES),
        # The first stage has recurrent states alone, so no part of any block.
        ("qwen3_5", {"pipeline_parallel_size": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{key[0]}{n}" for key, n in value.items()),
)
def test_reloaded_parts_change_no_token(
    family: str, settings: dict[str, Any], references: References, slots: list[HostSlots]
) -> None:
    reference = references(family)
    with make_engine(reference.folder, **small(reference, **settings)) as engine:
        for _ in range(3):
            assert ask_in_turn(engine, reference) == reference.answers[:4]
            evict(engine)
        stats = engine.stats()
        assert stats.host_hit_tokens > 100
        assert stats.host_damaged_blocks == 0
        # All ranks together keep what the setting allows.
        every = [engine._host.slots, *slots]
        assert len(every) == settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
        kept = sum(len(one.slot(0)) for one in every) * stats.host_total_blocks
        assert (4 << 20) / 2 < kept <= 4 << 20
    assert not any(one._slabs for one in every), "close leaves host memory to a rank"


@pytest.mark.parametrize("settings", [TWO, TWO | {"async_scheduling": True}, STAGES], ids=["ranks", "ahead", "stages"])
def test_in_one_batch_with_preemption(settings: dict[str, Any], references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, **small(reference, **settings)) as engine:
        for _ in range(2):
            for number, prompt in enumerate(reference.prompts[:3] * 2):
                engine.add(make_work(engine, str(number), prompt, sequences=1 + number % 2))
            answers = run(engine)
            assert [answers[str(n), 0] for n in range(6)] == reference.answers[:3] * 2
        assert engine.stats().host_loaded_blocks > 0


@pytest.mark.parametrize("settings", [TWO, STAGES], ids=["ranks", "stages"])
def test_a_part_that_was_damaged_on_another_rank_is_computed_again(
    settings: dict[str, Any], references: References, slots: list[HostSlots]
) -> None:
    reference = references("llama")
    with make_engine(reference.folder, **small(reference, **settings)) as engine:
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        evict(engine)
        tier, (other,) = engine._host.tier, slots
        assert tier is not None
        for number in tier._slots.values():
            other.slot(number)[3] ^= 0x40
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        evict(engine)
        damaged = engine.stats().host_damaged_blocks
        assert damaged > 3
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        assert engine.stats().host_damaged_blocks == damaged
        # Rank 0's own part is checked too.
        evict(engine)
        damage(engine)
        assert ask_in_turn(engine, reference) == reference.answers[:4]
        assert engine.stats().host_damaged_blocks > damaged


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_both_ends_of_a_handoff_find_blocks_in_their_host_tiers(family: str, references: References) -> None:
    """Through the mirror, in which reloaded blocks are put together."""
    reference = references(family)
    prompt, answer = reference.prompts[3], reference.answers[3]
    settings = small(reference)
    ranks, stages = settings | TWO, settings | STAGES
    with make_engine(reference.folder, **ranks) as source, make_engine(reference.folder, **stages) as sink:
        for _ in range(2):
            assert hand_over(source, sink, make_work(source, "over", prompt))["over", 0] == answer
            evict(source)
            evict(sink)
        assert source.stats().host_hit_tokens > 0
        assert sink.stats().host_loaded_blocks > 0


def test_a_pin_brings_whole_blocks_back_from_the_host_tier(references: References) -> None:
    reference = references("llama")
    prompt = reference.prompts[3]
    with make_engine(reference.folder, **small(reference, **TWO)) as engine:
        work = make_work(engine, "w", prompt)
        engine.add(work)
        run(engine)
        names = hash_blocks(work.root, prompt, 8)[: len(prompt) // 8]
        before = pinned_bytes(engine, names)
        evict(engine)
        assert len(set(names) - set(engine.cached_block_hashes())) > 3
        assert pinned_bytes(engine, names) == before
        engine.check_invariants()


def pinned_bytes(engine: Engine, names: list[Any]) -> list[list[int]]:
    """Return the bytes of blocks in the mirror, while they are pinned."""
    pinned = engine.pin(RequestId("pin"), names)
    assert [name for name, _ in pinned] == names
    found = [engine.kv.whole_blocks[block].tolist() for _, block in pinned]
    engine.unpin(RequestId("pin"))
    return found


def test_less_memory_than_one_block_of_all_ranks_is_refused(references: References) -> None:
    with pytest.raises(ConfigError, match="less than one block"):
        make_engine(references("llama").folder, host_kv_bytes=10, **TWO)
