"""A prompt whose first part another engine computes meanwhile, layer by layer ahead: the same tokens."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contracts.identity import BlockName, RequestId
from contracts.messages import Work
from engine import CompletedPart, Engine, NamedBlock, StepResult
from engine.errors import UsageError
from engine.front import Gate, behind
from tests.devices import DEVICE
from tests.engine.conftest import ANSWER_TOKENS, greedy_answer
from tests.engine.driving import copy_block, make_engine, make_work, run
from tests.tiny_models import load_reference, write_tiny_model

LAYERS = 4
BLOCK = 16
NUM_TOKENS = 5 * BLOCK + 7
FRONT = 3 * BLOCK
ID = RequestId("w")
SETTINGS: dict[str, Any] = {"tail_parts": LAYERS, "enforce_eager": True}


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fused layers, transformers' own, and a mixture of experts."""
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    draw = random.Random(3)
    return [draw.randrange(256) for _ in range(NUM_TOKENS)]


def copy_part(part: CompletedPart, front: Engine, back: Engine, where: dict[BlockName, int]) -> None:
    source, sink = front.kv.device_tensor, back.kv.device_tensor
    layers = slice(part.parts.start * source.shape[1] // LAYERS, part.parts.stop * source.shape[1] // LAYERS)
    for name, block in part.blocks[0].blocks:
        if name in where:
            sink[where[name], layers] = source[block, layers]


@dataclass
class Pair:
    """`front` computes in a thread of its own and fills the blocks of `back`, as a transfer would."""

    front: Engine
    back: Engine
    work: Work
    gate: Gate = field(default_factory=lambda: Gate(LAYERS))
    where: dict[BlockName, int] = field(default_factory=dict)
    on_part: Callable[[range], None] = lambda parts: None
    told: list[range] = field(default_factory=list)

    def reserve(self) -> None:
        reservation = self.back.reserve(self.work, mode="prefill")
        assert reservation is not None
        num_blocks = FRONT // BLOCK - reservation.reused
        self.where = {name: block for name, block in reservation.missing[:num_blocks]}

    def part(self, part: CompletedPart) -> None:
        copy_part(part, self.front, self.back, self.where)
        self.told.append(part.parts)
        self.on_part(part.parts)
        self.gate.reached(part.parts.stop, LAYERS)

    def read_front(self) -> None:
        tokens = self.work.token_ids[:FRONT]
        self.front.add(make_work(self.front, "w^", tokens, max_tokens=1), mode="prefill")
        completed: list[NamedBlock] = []
        run(self.front, lambda result: completed.extend(b for done in result.completed for b in done.blocks))
        for name, block in self._wanted(completed):
            copy_block(self.front, block, self.back, self.where[name])
        self.gate.reached(LAYERS, LAYERS)
        self.front.release(RequestId("w^"))

    def begin(self) -> threading.Thread:
        self.front.on_tail(self.part)
        thread = threading.Thread(target=self.read_front)
        thread.start()
        return thread

    def _wanted(self, blocks: list[NamedBlock]) -> list[NamedBlock]:
        return [named for named in blocks if named.name in self.where]


def written_on(source: Engine, sink: Engine, work: Work) -> list[int]:
    """The answer to what `source` reads, from the second token on by `sink`."""
    completed: list[NamedBlock] = []

    def see(result: StepResult) -> None:
        completed.extend(b for done in result.completed if done.request_id == ID for b in done.blocks)

    first = run(source, see)
    reservation = sink.reserve(work)
    assert reservation is not None
    where = dict(completed)
    assert list(where) == reservation.names
    for name, block in reservation.missing:
        copy_block(source, where[name], sink, block)
    sink.mark_received(ID, [name for name, _ in reservation.missing])
    sink.admit(ID, {0: first["w", 0][0]})
    return first["w", 0] + run(sink)["w", 0]


@pytest.mark.parametrize(("chunk", "is_async"), [(512, False), (24, False), (512, True)])
def test_tokens_are_those_of_a_prompt_that_one_engine_reads(
    folder: Path, prompt: list[int], chunk: int, is_async: bool
) -> None:
    expected = greedy_answer(load_reference(folder), prompt)
    settings = {**SETTINGS, "max_num_batched_tokens": chunk, "async_scheduling": is_async}
    with make_engine(folder, **SETTINGS) as front, make_engine(folder, **settings) as back, make_engine(folder) as sink:
        work = make_work(back, "w", prompt, max_tokens=ANSWER_TOKENS)
        other = make_work(back, "other", prompt[7:40], max_tokens=ANSWER_TOKENS)
        pair = Pair(front, back, work)
        pair.reserve()
        back.add(other, mode="prefill")
        thread = pair.begin()
        back.follow(ID, FRONT, pair.gate)
        assert written_on(back, sink, work) == expected
        thread.join()
        assert [parts.stop for parts in pair.told] == list(range(1, LAYERS + 1))
        assert len(pair.where) == FRONT // BLOCK
        back.mark_received(ID, list(pair.where))
        back.release(ID)
        back.release(RequestId("other"))
        back.check_invariants()
        assert set(pair.where) <= set(back.cached_names())


@pytest.mark.skipif(DEVICE != "cpu", reason="it is one call on hosts alone")
def test_a_model_that_is_one_call_waits_within_it(tmp_path: Path, prompt: list[int]) -> None:
    """In bf16 on most CPUs."""
    folder = write_tiny_model(tmp_path, num_hidden_layers=LAYERS, intermediate_size=64)
    settings = {**SETTINGS, "dtype": "bfloat16"}
    with make_engine(folder, **settings) as front, make_engine(folder, **settings) as back:
        pair = Pair(front, back, make_work(back, "w", prompt, max_tokens=1))
        pair.reserve()
        pair.on_part = lambda parts: time.sleep(0.01)  # the one behind is quicker
        thread = pair.begin()
        back.follow(ID, FRONT, pair.gate)
        answer = run(back)["w", 0]
        thread.join()
        assert [parts.stop for parts in pair.told] == list(range(1, LAYERS + 1))
        with make_engine(folder, **settings, max_num_batched_tokens=FRONT) as alone:
            alone.add(make_work(alone, "w", prompt, max_tokens=1), mode="prefill")
            assert run(alone)["w", 0] == answer
        lost = Pair(front, back, make_work(back, "again", [*reversed(prompt)], max_tokens=1))
        reservation = back.reserve(lost.work, mode="prefill")
        assert reservation is not None
        lost.gate.reached(1, 2)
        lost.gate.lost("the front ended")
        back.follow(RequestId("again"), FRONT, lost.gate)
        assert len(run(back)["again", 0]) == 1


def test_what_is_cached_need_not_come(folder: Path, prompt: list[int]) -> None:
    with make_engine(folder, **SETTINGS) as front, make_engine(folder, **SETTINGS) as back:
        back.add(make_work(back, "before", prompt[: BLOCK + 3], max_tokens=1), mode="prefill")
        first = run(back)["before", 0]
        back.release(RequestId("before"))
        assert first
        pair = Pair(front, back, make_work(back, "w", prompt, max_tokens=1))
        pair.reserve()
        assert len(pair.where) == FRONT // BLOCK - 1
        thread = pair.begin()
        back.follow(ID, FRONT, pair.gate)
        told = []
        answer = run(back, lambda result: told.extend(result.first))["w", 0]
        thread.join()
        assert answer == greedy_answer(load_reference(folder), prompt, 1)
        assert [(info.cached_tokens, info.front_tokens) for info in told] == [(BLOCK, FRONT - BLOCK)]


@pytest.mark.parametrize("lost_after", range(LAYERS))
def test_a_front_that_is_lost_leaves_the_whole_prompt_to_this_engine(
    folder: Path, prompt: list[int], lost_after: int
) -> None:
    with make_engine(folder, **SETTINGS) as front, make_engine(folder, **SETTINGS) as back:
        work = make_work(back, "w", prompt, max_tokens=1)
        other = make_work(back, "other", prompt[7:40], max_tokens=1)
        pair = Pair(front, back, work)
        pair.reserve()
        pair.gate.reached(lost_after, LAYERS)  # of bytes that never came: what was computed behind them is void
        back.follow(ID, FRONT, pair.gate)
        back.add(other, mode="prefill")
        threading.Timer(0.02, lambda: pair.gate.lost("the front ended")).start()
        told = []
        answers = run(back, lambda result: told.extend(result.first))
        model = load_reference(folder)
        assert answers["w", 0] == greedy_answer(model, prompt, 1)
        assert answers["other", 0] == greedy_answer(model, prompt[7:40], 1)
        assert {info.request_id: info.front_tokens for info in told} == {"w": 0, "other": 0}
        for request_id in ("w", "other"):
            back.release(RequestId(request_id))
        assert back.stats().held_blocks == 0
        assert back.stats().preemptions == 0


def test_one_that_follows_can_be_cancelled_before_its_step(folder: Path, prompt: list[int]) -> None:
    with make_engine(folder, **SETTINGS) as back:
        work = make_work(back, "w", prompt, max_tokens=1)
        pair = Pair(back, back, work)
        free = back.stats().free_blocks
        pair.reserve()
        back.follow(ID, FRONT, pair.gate)
        back.cancel(ID)
        assert run(back) == {}
        assert back.stats().free_blocks == free


@pytest.mark.parametrize("is_async", [False, True])
def test_two_engines_take_turns_at_a_prompt(folder: Path, prompt: list[int], is_async: bool) -> None:
    """Two blocks, two blocks by the other engine, and the rest; each is told to the next layer by layer."""
    settings = {**SETTINGS, "async_scheduling": is_async}
    with make_engine(folder, **settings) as one, make_engine(folder, **settings) as other:
        works = [make_work(one, f"p{end}", prompt[:end], max_tokens=1) for end in (2 * BLOCK, 4 * BLOCK, NUM_TOKENS)]
        first, second, third = (work.request_id for work in works)
        one.add(works[0], mode="prefill")
        theirs, ours = other.reserve(works[1], mode="prefill"), one.reserve(works[2], mode="prefill", after=first)
        assert theirs is not None and ours is not None
        assert [name for name, _ in ours.missing] == ours.names[2:]
        gates = Gate(LAYERS), Gate(LAYERS)

        def hand_on(gate: Gate, front: Engine, back: Engine, where: dict[BlockName, int], part: CompletedPart) -> None:
            copy_part(part, front, back, where)
            gate.reached(part.parts.stop, LAYERS)

        one.on_tail(partial(hand_on, gates[0], one, other, dict(theirs.missing[:2])))
        other.on_tail(partial(hand_on, gates[1], other, one, dict(ours.missing[:2])))
        assert not one.follow(third, 4 * BLOCK, gates[1]), "its first blocks are not computed yet"
        assert other.follow(second, 2 * BLOCK, gates[0])
        thread = threading.Thread(target=run, args=(other,))
        thread.start()
        told: list[StepResult] = []
        answers = run(one, told.append)
        thread.join()
        assert answers["p87", 0] == greedy_answer(load_reference(folder), prompt, 1)
        shared = [done.blocks for result in told for done in result.completed if done.request_id == third]
        assert [[name for name, _ in blocks] for blocks in shared] == [ours.names[:2], ours.names[2:]]
        infos = {info.request_id: info for result in told for info in result.first}
        assert (infos[third].cached_tokens, infos[third].front_tokens) == (0, 2 * BLOCK)
        one.mark_received(third, ours.names[2:4])
        for engine, ids in ((one, (first, third)), (other, (second,))):
            for request_id in ids:
                engine.release(request_id)
            engine.check_invariants()
            assert engine.stats().held_blocks == 0


@pytest.mark.parametrize("num_tokens", [0, BLOCK + 1, NUM_TOKENS, NUM_TOKENS + 9])
def test_a_front_is_of_whole_blocks_and_leaves_something(folder: Path, prompt: list[int], num_tokens: int) -> None:
    with make_engine(folder, **SETTINGS) as back:
        pair = Pair(back, back, make_work(back, "w", prompt))
        pair.reserve()
        with pytest.raises(UsageError, match="no front"):
            back.follow(ID, num_tokens, pair.gate)
        back.cancel(ID)


def test_no_layer_is_computed_before_its_part_is_here() -> None:
    gates, seen = [Gate(8), Gate(8)], list[int]()
    gates[0].reached(4, 4)
    ended = threading.Event()

    def compute() -> None:
        after_layer = behind(gates, 8, seen.append)
        for layer in range(8):
            after_layer(layer)
        ended.set()

    threading.Thread(target=compute).start()
    for group in range(4):
        assert not ended.wait(0.02)
        # Layers 0 to 2 x group - 1 may be computed; the call after the last of them waits.
        assert len(seen) == 2 * group
        gates[1].reached(group + 1, 4)
    assert ended.wait(5)
    assert seen == list(range(8))


def test_an_open_gate_cannot_be_lost() -> None:
    gate = Gate(4)
    gate.reached(1, 1)
    gate.lost("too late to matter")
    gate.wait(3)
    assert gate.is_open
    assert not gate.is_lost


def test_a_step_that_waited_for_its_front_says_nothing_of_this_engine_s_speed(
    prompt: list[int], tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=LAYERS)
    with make_engine(folder, **SETTINGS) as front, make_engine(folder, **SETTINGS) as back:
        slow = Pair(front, back, make_work(back, "w", prompt, max_tokens=1))
        slow.reserve()
        slow.on_part = lambda parts: time.sleep(0.05)
        before = back.stats()
        thread = slow.begin()
        back.follow(ID, FRONT, slow.gate)
        run(back)
        thread.join()
        assert slow.gate.waited_s > 0.05
        assert back.stats().prompt_tokens > before.prompt_tokens
        assert back.stats().prefill_tokens_per_s == before.prefill_tokens_per_s
        back.mark_received(ID, list(slow.where))
        back.release(ID)
        back.add(make_work(back, "alone", prompt[::-1], max_tokens=1))
        run(back)
        assert back.stats().prefill_tokens_per_s != before.prefill_tokens_per_s
