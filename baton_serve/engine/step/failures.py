"""Requests that cannot go on: what they hold, and what was said of them in the step that failed them."""

from baton_serve.engine.core.outputs import FailedRequest, StepResult
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import RowFailure, Scheduler
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.step.mirror_refs import MirrorRefs

IMAGES_MISSING = RowFailure(
    "blocks of its images are not here any more, and images are read by other instances: there was too little memory",
    "overloaded",
)


class RequestFailures:
    def __init__(self, table: RequestTable, scheduler: Scheduler, mirror_refs: MirrorRefs) -> None:
        self._table = table
        self._scheduler = scheduler
        self._mirror_refs = mirror_refs

    def fail(self, request: Request, why: RowFailure, result: StepResult) -> None:
        """What the step says of it is void."""
        request_id = request.work.request_id
        if all(failed.request_id != request_id for failed in result.failed):
            result.failed.append(FailedRequest(request_id, why.message, why.code))
        result.tokens = [output for output in result.tokens if output.request_id != request_id]
        result.held = [held for held in result.held if held != request_id]
        result.completed = [done for done in result.completed if done.request_id != request_id]
        self.end(request)

    def fail_requests_missing_images(self, result: StepResult) -> None:
        """Whoever the scheduler found to lack images. Tokens that the step brought for it stay: they are right."""
        while self._scheduler.requests_missing_images:
            request = self._scheduler.requests_missing_images.pop()
            result.failed.append(FailedRequest(request.work.request_id, IMAGES_MISSING.message, IMAGES_MISSING.code))
            self.end(request)

    def end(self, request: Request) -> None:
        if self._table.fail_request(request):
            self._mirror_refs.end(request.work.request_id)
