"""Requests that cannot go on: what they hold, and what was said of them in the step that failed them."""

from baton_serve.engine.core.outputs import FailedRequest, StepResult
from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.scheduler import RowFailure, Scheduler
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.step.mirror_refs import Travel

UNREADABLE = RowFailure(
    "blocks of its images are not here any more, and images are read by other instances: there was too little memory",
    "overloaded",
)


class Failures:
    def __init__(self, roster: Roster, scheduler: Scheduler, travel: Travel) -> None:
        self._roster = roster
        self._scheduler = scheduler
        self._travel = travel

    def fail(self, request: Request, why: RowFailure, result: StepResult) -> None:
        """What the step says of it is void."""
        request_id = request.work.request_id
        if all(failed.request_id != request_id for failed in result.failed):
            result.failed.append(FailedRequest(request_id, why.message, why.code))
        result.tokens = [output for output in result.tokens if output.request_id != request_id]
        result.held = [held for held in result.held if held != request_id]
        result.completed = [done for done in result.completed if done.request_id != request_id]
        self.end(request)

    def fail_unreadable(self, result: StepResult) -> None:
        """Whoever the scheduler found to lack images. Tokens that the step brought for it stay: they are right."""
        while self._scheduler.unreadable:
            request = self._scheduler.unreadable.pop()
            result.failed.append(FailedRequest(request.work.request_id, UNREADABLE.message, UNREADABLE.code))
            self.end(request)

    def end(self, request: Request) -> None:
        if self._roster.fail_request(request):
            self._travel.end(request.work.request_id)
