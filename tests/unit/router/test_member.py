"""What the router remembers of an instance."""

import pytest

from contracts.identity import RequestId
from services.router.block_index import Match
from services.router.member import RECENT_S, Member, Share
from tests.unit.router.fakes import record


def test_the_tokens_computed_of_late_fade() -> None:
    member = Member(record("p0", "prefill"))
    assert member.candidate(Match(), now=5.0).turnover == 0
    member.assign(RequestId("a"), Share(assignment=None, prefill_tokens=200, sequences=1, blocks=50))  # type: ignore[arg-type]
    # The cache holds 100 blocks of 4 tokens.
    assert member.candidate(Match(), now=5.0).turnover == pytest.approx(0.5)
    member.release(RequestId("a"))
    assert member.candidate(Match(), now=5.0 + RECENT_S).turnover == pytest.approx(0.5 / 2.71828, rel=1e-3)
