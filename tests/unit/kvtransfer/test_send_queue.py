"""Order and time of the messages on one connection."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_serve.contracts.identity import TicketId
from baton_serve.kvtransfer.producer.send_queue import SAMPLE, SendQueue, is_checked

A, B = TicketId("a"), TicketId("b")


def queue(window_bytes: int | None = None, batch_bytes: int = 20) -> SendQueue:
    return SendQueue(block_bytes=10, batch_bytes=batch_bytes, window_bytes=window_bytes)


def test_tickets_take_turns() -> None:
    one = queue()
    one.add(A, 1, [(i, i) for i in range(4)])
    one.add(B, 1, [(9, 9)])
    taken = [parcel for parcel in (one.take(), one.take(), one.take(), one.take()) if parcel is not None]
    assert [(parcel.ticket, len(parcel.blocks)) for parcel in taken] == [(A, 2), (B, 1), (A, 2)]


def test_the_window_holds_back_until_credit_comes() -> None:
    one = queue(window_bytes=30)
    one.add(A, 1, [(i, i) for i in range(5)])
    assert one.take() is not None and one.take() is not None
    assert one.travelling_bytes == 30
    assert one.take() is None
    one.credit(20)
    parcel = one.take()
    assert parcel is not None and len(parcel.blocks) == 2


def test_credit_is_gathered_until_a_parcel_is_worth_sending() -> None:
    one = queue(window_bytes=80, batch_bytes=80)
    one.add(A, 1, [(i, i) for i in range(12)])
    assert one.take() is not None
    one.credit(20)
    assert one.take() is None
    one.credit(20)
    parcel = one.take()
    assert parcel is not None and len(parcel.blocks) == 4


def test_a_block_larger_than_the_window_travels_alone() -> None:
    one = queue(window_bytes=5)
    one.add(A, 1, [(0, 0), (1, 1)])
    assert one.take() is not None
    assert one.take() is None
    one.credit(10)
    assert one.take() is not None


def test_dropped_tickets_leave_nothing() -> None:
    one = queue()
    one.add(A, 1, [(0, 0)])
    one.drop(A)
    assert one.take() is None


def test_attempts_do_not_share_a_parcel() -> None:
    one = queue()
    one.add(A, 1, [(0, 0)])
    one.add(A, 2, [(0, 0)])
    parcel = one.take()
    assert parcel is not None and (parcel.attempt, len(parcel.blocks)) == (1, 1)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 5)), max_size=8), st.integers(1, 60))
@settings(max_examples=50)
def test_everything_leaves_once_and_never_more_than_the_window_travels(
    adds: list[tuple[TicketId, int]], window: int
) -> None:
    one = queue(window_bytes=window, batch_bytes=30)
    expected: list[tuple[TicketId, int]] = []
    for ticket, count in adds:
        first = len(expected)
        one.add(ticket, 1, [(first + i, 0) for i in range(count)])
        expected += [(ticket, first + i) for i in range(count)]
    left: list[tuple[TicketId, int]] = []
    while True:
        parcel = one.take()
        if parcel is None:
            if not one.travelling_bytes:
                break
            one.credit(10)
            continue
        left += [(parcel.ticket, index) for index, _ in parcel.blocks]
        assert one.travelling_bytes <= max(window, 10)
    assert sorted(left) == sorted(expected)


def test_tapered_parcels_begin_and_end_small() -> None:
    one = SendQueue(block_bytes=10, batch_bytes=80, window_bytes=10_000, taper_bytes=20)
    one.add(A, 1, [(i, i) for i in range(30)])
    sizes: list[int] = []
    while (parcel := one.take()) is not None:
        sizes.append(len(parcel.blocks))
    assert sizes == [2, 8, 8, 6, 3, 2, 1]


def test_without_a_window_parcels_grow_and_shrink_too() -> None:
    one = SendQueue(block_bytes=10, batch_bytes=80, window_bytes=None, taper_bytes=20)
    one.add(A, 1, [(i, i) for i in range(40)])
    sizes: list[int] = []
    while (parcel := one.take()) is not None:
        sizes.append(len(parcel.blocks))
    assert sizes == [2, 2, 4, 8, 8, 8, 4, 2, 2]
    one.add(A, 1, [(i, i) for i in range(9)])
    parcel = one.take()
    assert parcel is not None and len(parcel.blocks) == 2


def test_parts_take_room_for_their_bytes_and_never_share_a_parcel_with_blocks() -> None:
    one = queue(window_bytes=40)
    one.add(A, 1, [(0, 0), (1, 1), (2, 2)])
    one.add(A, 1, [(i, i) for i in range(6, 10)], parts=2)
    taken = [one.take() for _ in range(4)]
    assert [(len(p.blocks), p.parts) for p in taken if p is not None] == [(2, 1), (1, 1), (2, 2)]
    assert one.travelling_bytes == 40
    one.credit(one.window_bytes_of(2, 1))
    parcel = one.take()
    assert parcel is not None and (parcel.blocks, parcel.parts) == ([(8, 8), (9, 9)], 2)


def test_where_parts_are_staged_they_take_places_for_whole_blocks() -> None:
    one = SendQueue(block_bytes=10, batch_bytes=20, window_bytes=30, in_blocks=True)
    one.add(A, 1, [(i, i) for i in range(7)], parts=5)
    parcel = one.take()
    assert parcel is not None and (len(parcel.blocks), one.travelling_bytes) == (7, 20)
    one.add(A, 1, [(i, i) for i in range(7)], parts=5)
    parcel = one.take()
    assert parcel is not None and (len(parcel.blocks), one.travelling_bytes) == (5, 30)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 16])
def test_a_sample_is_one_piece_in_eight_and_leaves_no_part_out(parts: int) -> None:
    blocks = 64
    sample = [divmod(index, parts) for index in range(blocks * parts) if is_checked("sampled", index, parts)]
    assert len(sample) == blocks * parts // SAMPLE
    assert {part for _, part in sample} == set(range(parts))
    if parts >= SAMPLE:
        assert {block for block, _ in sample} == set(range(blocks))


def test_full_checks_all_pieces_and_off_none() -> None:
    assert all(is_checked("full", index, 3) for index in range(20))
    assert not any(is_checked("off", index, 3) for index in range(20))
