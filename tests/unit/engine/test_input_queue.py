"""Which inputs share a forward pass."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.engine.pooling.input_queue import PoolingInputQueue

EMBED = PoolingSpec(task="embed")


def waiting(*lengths: int, priority: int = 0) -> PoolingInputQueue:
    queue = PoolingInputQueue()
    for number, length in enumerate(lengths):
        queue.add(RequestId(f"r{number}"), [PoolingInput([1] * length)], EMBED, priority)
    return queue


def lengths(queue: PoolingInputQueue, *, max_tokens: int = 1000, max_inputs: int = 100) -> list[int]:
    return [item.length for item in queue.take(max_tokens=max_tokens, max_inputs=max_inputs)]


def test_inputs_of_like_lengths_go_together_whoever_asked() -> None:
    queue = waiting(100, 300, 90, 310, 110)
    assert lengths(queue) == [90, 100, 110]
    assert lengths(queue) == [300, 310]
    assert lengths(queue) == []


def test_padding_counts() -> None:
    queue = waiting(100, 100, 100, 110)
    assert lengths(queue, max_tokens=320) == [100, 100, 100]
    assert lengths(queue, max_tokens=320) == [110]


def test_an_input_longer_than_a_pass_goes_alone() -> None:
    assert lengths(waiting(5000), max_tokens=100) == [5000]


def test_the_first_to_come_is_never_overtaken_by_a_fuller_pass() -> None:
    queue = waiting(500, *[10] * 50)
    assert lengths(queue) == [500]


def test_smaller_priorities_run_first() -> None:
    queue = waiting(500)
    queue.add(RequestId("urgent"), [PoolingInput([1] * 20)], EMBED, -1)
    assert lengths(queue) == [20]


def test_what_a_client_gave_up_is_not_computed() -> None:
    queue = waiting(100, 100, 400)
    queue.discard(RequestId("r0"))
    assert lengths(queue) == [100]
    queue.discard(RequestId("r2"))
    assert len(queue) == queue.num_tokens == 0
    assert lengths(queue) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 600), max_size=40), st.integers(1, 2000), st.integers(1, 16))
def test_every_input_runs_once_in_passes_that_are_not_too_large(sizes: list[int], tokens: int, inputs: int) -> None:
    queue = waiting(*sizes)
    seen: list[int] = []
    while len(queue):
        oldest = min(queue._items)
        taken = queue.take(max_tokens=tokens, max_inputs=inputs)
        queue.check_invariants()
        assert oldest in {item.number for item in taken}
        assert len(taken) <= inputs
        assert len(taken) == 1 or len(taken) * taken[-1].length <= tokens
        assert taken[-1].length - taken[0].length <= max(16, 0.4 * taken[-1].length)
        seen += [item.length for item in taken]
    assert sorted(seen) == sorted(sizes)
