"""docs/reference/protocol.md shows the states that the code has."""

from baton_serve.kvtransfer.session.states import CONSUMER, PRODUCER, ConsumerState, ProducerState
from tools.draw_protocol import DOCUMENT, with_drawing


def test_the_drawing_is_the_table() -> None:
    text = DOCUMENT.read_text()
    assert with_drawing(text) == text


def test_every_state_can_be_reached_and_left() -> None:
    for states, table, starts in (
        (ConsumerState, CONSUMER, {"linking"}),
        (ProducerState, PRODUCER, {"parked", "open"}),
    ):
        reached = {str(following) for transitions in table.values() for following in transitions.values()}
        assert reached | starts == {str(state) for state in states}
        assert [state for state, transitions in table.items() if not transitions] == ["ended"]
