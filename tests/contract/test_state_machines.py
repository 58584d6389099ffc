"""The state machines of the unit suite, tried with more examples than a suite of seconds has time for."""

from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

from tests.unit.engine.test_host_tier import TiersMachine
from tests.unit.engine.test_scheduling_machine import (
    AheadMachine,
    AwaitedImagesMachine,
    HostTierMachine,
    SchedulingMachine,
)
from tests.unit.kvtransfer.test_ladder import Fate
from tests.unit.kvtransfer.test_session_model import BothEnds
from tests.unit.router.test_block_index import IndexMachine

EXAMPLES = 60


def often(machine: type[RuleBasedStateMachine]) -> Any:
    few: Any = machine.TestCase
    return type(machine.__name__, (few,), {"settings": settings(few.settings, max_examples=EXAMPLES)})


TestTiers = often(TiersMachine)
TestScheduling = often(SchedulingMachine)
TestSchedulingAhead = often(AheadMachine)
TestSchedulingWithAwaitedImages = often(AwaitedImagesMachine)
TestSchedulingOverHostTier = often(HostTierMachine)
TestFate = often(Fate)
TestBothEnds = often(BothEnds)
TestIndex = often(IndexMachine)
