"""The instances of a model sleep, wake up and load new weights together, or none does."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import Generation
from baton_serve.contracts.messages import EngineCommand, EngineCommandDone, ModelAction, WeightsSource
from baton_serve.services.router.cluster import sleep_and_reload
from baton_serve.services.router.cluster.cache_reset_and_profile import EngineActions
from baton_serve.services.router.cluster.sleep_and_reload import ModelActions
from baton_serve.services.router.http.admin_endpoints import allowed_weights
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    ConflictError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
)
from tests.unit.router.conftest import Router, Serve, settle

ON: dict[str, Any] = {"enable_admin_endpoints": True, "update_weights_folder": "/weights"}
NEW = WeightsSource(model="/weights/new", load_format="auto", version="v1")


class FakeModel:
    """The model of one fake instance: it pauses, sleeps and loads as a real one, and registers each change."""

    def __init__(self, router: Router, instance: str) -> None:
        self.fakes = router.fakes
        self.instance = router.fakes[instance]
        self.instance.on_command = self.execute
        self.log: list[ModelAction | str] = []
        self.refuses: dict[str, str] = {}
        """Errors with which actions are refused, by action."""
        self.crashes_at = ""
        """The action instead of which the process ends and starts again with the weights of its start."""
        self.loses_answers = False
        self.is_silent = False
        self.original = self.instance.record.layout.fingerprint

    @property
    def fingerprint(self) -> str:
        return self.instance.record.layout.fingerprint

    def execute(self, command: EngineCommand) -> None:
        self.log.append(command.action)
        if self.is_silent:
            return
        if command.action == self.crashes_at:
            self.register(draining=False, sleeping=False, fingerprint=self.original)
            return
        error = self.refuses.get(command.action)
        done = EngineCommandDone(
            request_id=command.request_id,
            error=error,
            is_conflict=command.action == "pause",
            result=f"did {command.action}",
        )
        if command.action in ("pause", "resume") and error is None:
            self.instance.draining = command.action == "pause"
            self.instance.report()
        if not (self.loses_answers and command.action == "update_weights"):
            self.instance.send(done)
        if error is None:
            self.change(command)

    def change(self, command: EngineCommand) -> None:
        match command.action:
            case "sleep":
                self.register(draining=True, sleeping=True)
            case "wake_up":
                self.register(draining=False, sleeping=False)
            case "update_weights":
                assert command.weights is not None
                self.register(draining=True, fingerprint=command.weights.version)
            case "restore_weights":
                self.register(draining=True, fingerprint=self.original)

    def register(self, *, draining: bool, sleeping: bool = False, fingerprint: str | None = None) -> None:
        """Register under a new generation."""
        old = self.instance.record
        self.instance.draining = draining
        self.instance.record = msgspec.structs.replace(
            old,
            generation=Generation(old.generation + 1),
            draining=sleeping,
            sleeping=sleeping,
            layout=msgspec.structs.replace(old.layout, fingerprint=fingerprint or old.layout.fingerprint),
        )
        self.fakes.registered[old.instance] = self.instance.record
        self.fakes.on_change()


def models_of(router: Router) -> Mapping[str, FakeModel]:
    return {name: FakeModel(router, name) for name in ("prefill-0", "decode-0")}


def actions_of(router: Router) -> ModelActions:
    return ModelActions(router.cluster, EngineActions(router.cluster), settle_timeout_s=0.2)


async def update(router: Router) -> ApiError | None:
    try:
        await actions_of(router).update_weights(router.cluster.workers(), NEW, drain_s=1.0)
    except ApiError as exc:
        return exc
    return None


def test_requests_are_refused_at_once_while_the_model_sleeps(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        for _ in range(2):
            asleep = await router.http.post("/sleep", params={"level": 2})
            assert asleep.status_code == 200, asleep.text
        assert asleep.json() == {"instances": {}}
        assert [model.log for model in models.values()] == [["pause", "sleep"]] * 2
        assert (await router.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        health = await router.http.get("/health")
        assert health.status_code == 200 and "sleep" in health.json()["warning"]
        assert not router.cluster.expects_instances(within_s=0.0)
        refused = await router.http.post("/v1/completions", json={"prompt": "a b c"})
        assert refused.status_code == 503 and "/wake_up" in refused.text and refused.headers["retry-after"]
        awake = await router.http.post("/wake_up", params={"tags": ["kv_cache", "weights"]})
        assert awake.json() == {"instances": dict.fromkeys(models, "did wake_up")}
        assert (await router.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        await router.complete(prompt="a b c", max_tokens=2)

    serve(scenario, instance_wait_s=5.0, **ON)


def test_arguments_that_cannot_be_served_are_refused(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        for path in ("sleep?level=3", "sleep?mode=keep", "sleep?drain_timeout_s=-1", "wake_up?tags=weights"):
            answer = await router.http.post(f"/{path}")
            assert answer.status_code in (400, 422), answer.text
        bodies: list[dict[str, Any]] = [{}, {"model_path": "/weights/new", "load_format": "unknown"}]
        bodies += [{"model_path": "/weights/new", "abort_all_requests": True}, {"model_path": "new"}]
        for body in bodies:
            assert (await router.http.post("/update_weights_from_disk", json=body)).status_code == 400, body
        outside = await router.http.post("/update_weights_from_disk", json={"model_path": "/etc"})
        assert outside.status_code == 403
        assert not any(model.log for model in models.values())

    serve(scenario, **ON)


def test_weights_come_only_from_the_folder_of_the_operator() -> None:
    assert allowed_weights("/weights/a/../b//c", "/weights/") == "/weights/b/c"
    for path in ("/weights", "/weights/..", "/weights/../etc", "/weightsandmore/a"):
        with pytest.raises(PermissionDeniedError):
            allowed_weights(path, "/weights")
    for path in ("a", "", "/weights/a\0b"):
        with pytest.raises(BadRequestError):
            allowed_weights(path, "/weights")
    with pytest.raises(PermissionDeniedError, match="--update-weights-folder"):
        allowed_weights("/weights/a", None)


def test_no_instance_sleeps_if_one_still_has_requests(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        models["decode-0"].refuses["pause"] = "1 requests still run after 60 s"
        answer = await router.http.post("/sleep")
        assert answer.status_code == 409 and "decode-0: 1 requests still run" in answer.text
        assert models["prefill-0"].log == ["pause", "resume"]
        await router.complete(prompt="a b c", max_tokens=2)

    serve(scenario, **ON)


@pytest.mark.parametrize("loses_answers", [False, True])
def test_all_instances_load_new_weights_before_any_accepts_requests(serve: Serve, loses_answers: bool) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        models["decode-0"].loses_answers = loses_answers
        answer = await router.http.post("/update_weights_from_disk", json={"model_path": "/weights/new"})
        assert answer.status_code == 200 and answer.json()["success"], answer.text
        for model in models.values():
            assert model.log == ["check_weights", "pause", "update_weights", "resume"]
        # Equal versions: the two can hand blocks to each other.
        assert models["prefill-0"].fingerprint == models["decode-0"].fingerprint != models["decode-0"].original
        await router.complete(prompt="a b c", max_tokens=2)

    serve(scenario, **ON)


def test_a_request_that_comes_during_an_update_waits_for_its_end(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        for model in models.values():
            model.execute(EngineCommand(request_id="p", action="pause"))  # type: ignore[arg-type]
        waiting = asyncio.create_task(router.complete(prompt="a b c", max_tokens=2))
        await settle()
        assert not waiting.done()
        for model in models.values():
            model.execute(EngineCommand(request_id="r", action="resume"))  # type: ignore[arg-type]
        assert (await waiting)["choices"]

    serve(scenario, instance_wait_s=5.0, **ON)


def test_a_misfit_is_found_before_any_instance_pauses(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        models["decode-0"].refuses["check_weights"] = "hidden_size is 8 instead of 4"
        error = await update(router)
        assert isinstance(error, BadRequestError) and "decode-0: hidden_size" in error.message
        assert all(model.log == ["check_weights"] for model in models.values())

    serve(scenario, **ON)


def test_if_one_instance_cannot_load_the_weights_the_others_load_their_old_ones(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        models["decode-0"].refuses["update_weights"] = "out of memory"
        error = await update(router)
        assert isinstance(error, BadRequestError) and "decode-0: out of memory" in error.message
        assert models["prefill-0"].log[-3:] == ["update_weights", "restore_weights", "resume"]
        assert models["decode-0"].log[-2:] == ["update_weights", "resume"]
        assert all(model.fingerprint == model.original for model in models.values())
        await router.complete(prompt="a b c", max_tokens=2)

    serve(scenario, **ON)


def test_an_instance_that_restarts_instead_of_loading_is_a_failure(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        models["decode-0"].crashes_at = "update_weights"
        error = await update(router)
        assert isinstance(error, UnavailableError) and "decode-0 has restarted" in error.message
        assert all(model.fingerprint == model.original for model in models.values())

    serve(scenario, **ON)


def test_an_instance_that_does_not_come_back_is_reported(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router) -> None:
        models = models_of(router)
        monkeypatch.setattr(sleep_and_reload, "LOAD_TIMEOUT_S", 0.1)
        models["decode-0"].is_silent = True
        models["prefill-0"].register(draining=True, sleeping=True)
        await settle()
        with pytest.raises(ConflictError, match="prefill-0 sleeps"):
            await actions_of(router).update_weights(router.cluster.workers(), NEW, drain_s=0.0)
        models["decode-0"].is_silent = False
        models["decode-0"].change = lambda command: None  # type: ignore[method-assign]
        awake = [worker for worker in router.cluster.workers() if not worker.record.sleeping]
        with pytest.raises(DeadlineError, match="decode-0 is not ready after sleep"):
            await actions_of(router).sleep(awake, drain_s=0.0)

    serve(scenario, **ON)
