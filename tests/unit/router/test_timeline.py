"""Where a flight's time went."""

from contracts.identity import RequestId
from contracts.messages import PrefillReport
from services.router.timeline import Timeline


def report(front_tokens: int, queue_s: float) -> PrefillReport:
    return PrefillReport(request_id=RequestId("r"), queue_s=queue_s, prefill_s=9.0, front_tokens=front_tokens)


def test_a_first_token_that_is_held_back_does_not_make_the_reading_of_two_longer() -> None:
    timeline = Timeline(arrived_at=0.0, placed_at=1.0, front_report=report(0, 0.5))
    timeline.read(report(16, 0.7), 3.0)
    timeline.first_token_at, timeline.held_s = 4.0, 1.0
    assert timeline.prefill_s == 3.0 - 1.0 - 0.5
    assert timeline.queue_s == 0.5
