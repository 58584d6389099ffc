"""Which adapter is in which slot, and the rows of a step sorted by slot."""

import random

import pytest

from baton_serve.engine.kernels import GROUP_ROWS
from baton_serve.engine.model.lora.slots import NUM_ROW_ARRAYS, SlotTable, max_groups, sorted_rows


def test_the_least_recently_used_adapter_gives_way() -> None:
    table = SlotTable(2)
    assert table.assign(["a", "b", "a"]) == {"a": 0, "b": 1}
    assert table.assign(["a"]) == {}
    assert table.assign(["c"]) == {"c": 1}
    assert table.assign(["a", "c"]) == {}
    assert table.assign(["b"]) == {"b": 0}


def test_an_adapter_of_the_step_never_gives_way() -> None:
    table = SlotTable(3)
    table.assign(["a", "b", "c"])
    assert table.assign(["d", "a", "b"]) == {"d": 2}
    assert [table.slot_of(one) for one in "abd"] == [0, 1, 2]


def test_each_adapter_of_a_step_has_a_slot_of_its_own_after_any_history() -> None:
    draw, table, content = random.Random(0), SlotTable(4), dict[int, str]()
    for _ in range(500):
        step = draw.sample("abcdefgh", draw.randint(0, 4))
        for adapter, slot in table.assign(step).items():
            assert content.get(slot) != adapter
            content[slot] = adapter
        assert [content[table.slot_of(adapter)] for adapter in step] == step


@pytest.mark.parametrize(
    "slots", [[], [-1], [0], [2, -1, 0, 2, 1, -1, 0], [-1] * 5, [2] * 33, [0, 1, 2] * 17 + [-1]], ids=len
)
def test_rows_are_grouped_by_slot(slots: list[int]) -> None:
    array = sorted_rows(slots, 3)
    assert array.shape == (NUM_ROW_ARRAYS, len(slots)) and array[0].tolist() == slots
    count = max_groups(len(slots), 3)
    assert (array[2, count:] == -1).all()
    found: dict[int, list[int]] = {}
    for slot, first, end in array[2:, :count].T.tolist():
        if slot >= 0:
            assert 0 < end - first <= GROUP_ROWS
            found.setdefault(slot, []).extend(array[1, first:end].tolist())
    assert found == {
        slot: [row for row, used in enumerate(slots) if used == slot] for slot in sorted(set(slots)) if slot >= 0
    }


def test_no_step_has_more_groups_than_graphs_read() -> None:
    draw = random.Random(1)
    for _ in range(200):
        num_slots, num_rows = draw.randint(1, 20), draw.randint(1, 150)
        slots = [draw.randint(-1, draw.randint(0, num_slots - 1)) for _ in range(num_rows)]
        assert (sorted_rows(slots, num_slots)[2] >= 0).sum() <= max_groups(num_rows, num_slots)
