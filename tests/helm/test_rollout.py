"""An upgrade rolls the pools of a model one after the other, by the field ownership of an API server."""

import json

import pytest

from tests.helm.chart import Manifest, objects, of_kind
from tests.helm.releases import SCRIPT, Release, container_environment

PREFILL, DECODE, UNIFIED = "test-baton-prefill", "test-baton-decode", "test-baton-unified"
CHANGED: Manifest = {"image": {"tag": "2"}}


@pytest.fixture(params=[True, False], ids=["server-side apply", "three-way merge"])
def release(request: pytest.FixtureRequest) -> Release:
    return Release(is_server_side=request.param)


def rollouts(release: Release) -> list[str]:
    """Return the events of the pools, without routers, which have a pod on top and so no gap."""
    found = [event.removeprefix("test-baton-") for event in release.events if "router" not in event]
    release.events.clear()
    return found


def install(release: Release, values: Manifest) -> None:
    release.install(values)
    release.events.clear()


def test_an_upgrade_on_defaults_rolls_decode_after_prefill(release: Release) -> None:
    install(release, {})
    release.upgrade(CHANGED)
    release.control()
    assert (release.pods[PREFILL].ready, release.pods[DECODE].ready) == (0, 1)
    release.run_rollout()
    assert rollouts(release) == ["prefill begins", "prefill ends", "decode begins", "decode ends"]
    assert (release.pods[PREFILL].new, release.pods[DECODE].new) == (1, 1)


def test_a_rollback_rolls_in_the_same_order(release: Release) -> None:
    install(release, {})
    release.upgrade(CHANGED)
    release.run_rollout()
    rollouts(release)
    release.rollback(1)
    release.run_rollout()
    assert rollouts(release) == ["prefill begins", "prefill ends", "decode begins", "decode ends"]


def test_unified_instances_come_last(release: Release) -> None:
    values: Manifest = {"unified": {"replicas": 2}, "prefill": {"replicas": 2}}
    install(release, values)
    release.upgrade({**values, **CHANGED})
    release.run_rollout()
    assert [event for event in rollouts(release) if event.endswith("begins")] == [
        "prefill begins",
        "decode begins",
        "unified begins",
    ]


def test_if_prefill_does_not_become_ready_decode_keeps_its_pods_until_a_rollback(release: Release) -> None:
    install(release, {"decode": {"replicas": 2}})
    release.broken.add(PREFILL)
    release.upgrade({"decode": {"replicas": 2}, **CHANGED})
    with pytest.raises(TimeoutError):
        release.run_rollout()
    assert rollouts(release) == ["prefill begins"] and release.pods[DECODE].ready == 2
    release.broken.clear()
    release.rollback(1)
    release.run_rollout()
    assert not release.live[DECODE].fields["spec", "paused"]
    assert release.pods[DECODE].ready == 2 and "decode begins" not in rollouts(release)


def test_an_upgrade_during_a_rollout_takes_over_and_the_older_job_ends(release: Release) -> None:
    install(release, {})
    release.upgrade(CHANGED)
    older = release.jobs
    release.upgrade({"image": {"tag": "3"}})
    newer, release.jobs = release.jobs, older
    release.settle()
    release.run_rollout()
    assert release.live[DECODE].fields["spec", "paused"]
    release.jobs = newer
    release.run_rollout()
    assert rollouts(release)[-2:] == ["decode begins", "decode ends"]


def test_an_upgrade_that_changes_no_pool_leaves_none_paused(release: Release) -> None:
    install(release, {})
    release.upgrade({})
    release.run_rollout()
    assert not release.live[DECODE].fields["spec", "paused"] and not rollouts(release)


def test_numbers_set_by_hand_and_by_keda_survive_the_rollouts(release: Release) -> None:
    """No pool shrinks: by hand, upgrade, rollback, KEDA on, KEDA off."""
    install(release, {})
    release.scale(DECODE, 6)
    release.settle()
    release.upgrade(CHANGED)
    release.run_rollout()
    release.settle()
    assert release.replicas(DECODE) == 6 and release.pods[DECODE].new == 6
    release.rollback(1)
    release.run_rollout()
    release.settle()
    assert release.replicas(DECODE) == 6
    release.upgrade({"decode": {"autoscaling": {"kind": "keda"}}})
    release.run_rollout()
    release.settle()
    release.scale(DECODE, 4, by="horizontal-pod-autoscaler")
    release.settle()
    release.upgrade({})
    release.run_rollout()
    release.settle()
    assert release.replicas(DECODE) == 4 and release.pods[DECODE].ready == 4


def test_a_pod_that_finds_no_card_does_not_keep_the_next_pool_from_rolling() -> None:
    def deployment(*, replicas: int, available: int, total: int | None = None) -> Manifest:
        status = {"observedGeneration": 1, "updatedReplicas": replicas, "availableReplicas": available}
        status["replicas"] = replicas if total is None else total
        return {"metadata": {"generation": 1}, "spec": {"replicas": replicas}, "status": status}

    is_rolled = SCRIPT["is_rolled"]
    assert is_rolled(deployment(replicas=2, available=1))
    assert not is_rolled(deployment(replicas=1, available=0)) and not is_rolled(deployment(replicas=3, available=1))
    assert is_rolled(deployment(replicas=0, available=0))
    assert not is_rolled(deployment(replicas=2, available=2, total=3)), "an old pod still runs"
    assert not is_rolled({**deployment(replicas=1, available=1), "metadata": {"generation": 2}}), "not seen yet"


def test_each_state_of_a_release_has_a_job_of_its_own() -> None:
    """A Job cannot be changed; and a rollback must run again what an upgrade has replaced."""

    def name(values: Manifest, revision: int) -> str:
        jobs = [
            job for job in of_kind(objects(values, revision=revision), "Job") if "-rollout-" in str(job["metadata"])
        ]
        (job,) = jobs
        environ = container_environment(job)
        assert job["metadata"]["name"].endswith(environ["ROLLOUT"])
        assert json.loads(environ["POOLS"]) == [[PREFILL, DECODE]]
        return str(job["metadata"]["name"])

    assert len({name({}, 1), name({}, 2), name(CHANGED, 1)}) == 3
    assert name({}, 1) == name({}, 1)
