from baton_serve.engine.core.outputs import FirstTokenInfo, StepResult
from baton_serve.services.instance.attempt_table import AttemptTable
from tests.unit.instance.fakes import OTHER_ROUTER, ROUTER, output, work


def test_the_results_of_a_step_are_grouped_by_router() -> None:
    table = AttemptTable()
    mine, yours = table.add(ROUTER, work("a")), table.add(OTHER_ROUTER, work("b"))
    result = StepResult(tokens=[output(mine.work.request_id, 5), output(yours.work.request_id, 6)])
    answers = table.apply(result, at=0.0)
    assert [answer.request_id for answer in answers[ROUTER]] == ["a"]
    assert [answer.request_id for answer in answers[OTHER_ROUTER]] == ["b"]
    table.check_invariants()


def test_two_routers_may_use_the_same_request_id() -> None:
    table = AttemptTable()
    one, other = table.add(ROUTER, work("same")), table.add(OTHER_ROUTER, work("same"))
    assert one.work.request_id != other.work.request_id
    assert table.find(ROUTER, one.request_id) is one
    assert table.find(OTHER_ROUTER, one.request_id) is other


def test_a_sequence_that_was_given_up_sends_nothing_more() -> None:
    table = AttemptTable()
    request = table.add(ROUTER, work(sequences=(0, 1)))
    request.live.discard(1)
    inner = request.work.request_id
    answers = table.apply(StepResult(tokens=[output(inner, 5), output(inner, 6, sequence=1)]), at=0.0)
    assert [answer.sequence for answer in answers[ROUTER]] == [0]  # type: ignore[union-attr]


def test_an_id_can_be_used_again_while_the_old_attempt_still_ends() -> None:
    table = AttemptTable()
    old = table.add(ROUTER, work("a"))
    table.detach(old)
    new = table.add(ROUTER, work("a"))
    assert table.find(ROUTER, new.request_id) is new
    assert not table.apply(StepResult(tokens=[output(old.work.request_id, 5)]), at=0.0)
    table.remove(old)
    assert table.find(ROUTER, new.request_id) is new
    table.check_invariants()


def test_the_report_of_a_first_token_names_the_router_s_request() -> None:
    table = AttemptTable()
    request = table.add(ROUTER, work("a"))
    info = FirstTokenInfo(request.work.request_id, queue_s=0.1, prefill_s=0.2, cached_tokens=16)
    (report,) = table.apply(StepResult(first=[info]), at=0.0)[ROUTER]
    assert report.request_id == "a"
    assert report.cached_tokens == {"device": 16}  # type: ignore[union-attr]


def test_results_for_unknown_requests_are_ignored() -> None:
    assert not AttemptTable().apply(StepResult(tokens=[output(work().request_id, 1)], held=[work().request_id]), at=0.0)
