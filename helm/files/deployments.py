"""Keep the numbers of pods over upgrades, and roll the pools of a model one after the other.

The chart runs this in three Jobs; STEP says in which.

* `before` (hook before an upgrade or rollback) keeps the numbers of pods and pauses all pools but the first of each
  model. A paused Deployment keeps its pods, and still follows changes of its number.
* `after` (hook after it) applies numbers that changed in the values.
* `roll` (a Job of the release) resumes a paused pool as soon as all pods of the pool before it are new. If they never
  become ready, the later pools keep their old pods and serve.

The Deployments are rendered without `replicas` and `paused`, so that neither Helm nor `kubectl scale` nor an autoscaler
competes for these fields. Annotations record the number from the values that was applied last, and the rollout for
which a pool was paused. All is written by server-side apply, under two field managers of its own.

Environment: STEP, API, CREDENTIALS (folder of the account's token), NAMESPACE, ROLLOUT (a name for this state of the
release), POOLS (JSON: a list of Deployments for each model, in the order of their rollout) and WANTED (JSON:
{NAME: {"replicas": N, "autoscaled": BOOL}}).
"""

import json
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPLICAS, ROLLOUT = "baton.dev/replicas", "baton.dev/rollout"
REPLICAS_MANAGER, ROLLOUT_MANAGER = "baton-replicas", "baton-rollout"
TIMEOUT_S = 20.0
POLL_S = 5.0

Deployment = dict[str, Any]

logger = logging.getLogger("deployments")


class Deployments:
    """The Deployments of the release in the API server."""

    def __init__(self, api: str, credentials: Path, namespace: str) -> None:
        self._url = f"{api}/apis/apps/v1/namespaces/{namespace}/deployments/"
        self._token = (credentials / "token").read_text()
        authority = credentials / "ca.crt"
        self._context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None

    def get(self, name: str) -> Deployment | None:
        """Return a Deployment, or None if it does not exist."""
        try:
            return self._send("GET", name)
        except urllib.error.HTTPError as exc:
            if exc.code == 404:
                return None
            raise

    def apply(self, name: str, manager: str, *, annotations: dict[str, str], spec: Deployment) -> None:
        """Apply `annotations` and `spec`, and make `manager` the owner of these fields."""
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "annotations": annotations}}
        self._send("PATCH", name, f"?fieldManager={manager}&force=true", {**body, "spec": spec})

    def _send(self, method: str, name: str, query: str = "", body: Deployment | None = None) -> Deployment:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/apply-patch+yaml"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + name + query, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:
            found: Deployment = json.load(answer)
            return found


def annotation(deployment: Deployment, name: str) -> str | None:
    value: str | None = deployment["metadata"].get("annotations", {}).get(name)
    return value


def replicas_to_apply(
    *, live: int, recorded: str | None, wanted: int, autoscaled: bool, before_upgrade: bool
) -> int | None:
    """Return the number of pods to apply, or None if nothing has to change.

    `recorded` is the number of the values that was applied last. A Deployment without it that exists before an upgrade
    was made by a chart with `replicas` in its manifest, or by another hand: its live number is kept.
    """
    if recorded == str(wanted):
        return None
    if autoscaled or (recorded is None and before_upgrade):
        return live
    # Before an upgrade the Deployments are still those of the old release: new numbers come after it.
    return None if before_upgrade else wanted


def apply_replicas(deployments: Deployments, wanted: dict[str, Deployment], *, before_upgrade: bool) -> None:
    """Apply the numbers of `wanted` that have to change."""
    for name, scale in wanted.items():
        deployment = deployments.get(name)
        if deployment is None:
            continue
        number = replicas_to_apply(
            live=deployment["spec"].get("replicas", 1),
            recorded=annotation(deployment, REPLICAS),
            wanted=scale["replicas"],
            autoscaled=scale["autoscaled"],
            before_upgrade=before_upgrade,
        )
        if number is not None:
            recorded = {REPLICAS: str(scale["replicas"])}
            deployments.apply(name, REPLICAS_MANAGER, annotations=recorded, spec={"replicas": number})


def pause(deployments: Deployments, pools: Sequence[Sequence[str]], rollout: str) -> None:
    """Pause all pools but the first of each model for `rollout`, unless this was done before."""
    for name in (name for of_model in pools for name in of_model[1:]):
        deployment = deployments.get(name)
        if deployment is not None and annotation(deployment, ROLLOUT) != rollout:
            deployments.apply(name, ROLLOUT_MANAGER, annotations={ROLLOUT: rollout}, spec={"paused": True})


def is_rolled(deployment: Deployment) -> bool:
    """Return whether all pods are of the newest template and at most one of them, but not the only one, is not ready.

    The rollout of a pool takes one pod away at a time, so one that is not ready must not delay the next pool.
    """
    status, replicas = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    are_new = status.get("updatedReplicas", 0) == replicas == status.get("replicas", 0)
    return are_new and status.get("availableReplicas", 0) >= min(replicas, max(1, replicas - 1))


def advance(deployments: Deployments, pools: Sequence[str], rollout: str) -> str | None:
    """Resume the pools of one model that are paused for `rollout`, as far as those before them have rolled.

    Returns the pool that has not rolled yet, or None at the end.
    """
    for name in pools:
        deployment = deployments.get(name)
        if deployment is None:
            continue
        if deployment["spec"].get("paused"):
            if annotation(deployment, ROLLOUT) != rollout:
                return None  # a later upgrade has paused it, and has a Job of its own
            deployments.apply(name, ROLLOUT_MANAGER, annotations={ROLLOUT: rollout}, spec={"paused": False})
            return name
        if not is_rolled(deployment):
            return name
    return None


def roll(
    deployments: Deployments,
    pools: Sequence[Sequence[str]],
    rollout: str,
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Roll the pools of each model one after the other. The Job's `activeDeadlineSeconds` bounds the time."""
    last: list[str] = []
    while waits := [name for of_model in pools if (name := advance(deployments, of_model, rollout))]:
        if waits != last:
            logger.info("not all pods are new and ready yet: %s", " ".join(waits))
        last = waits
        sleep(POLL_S)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    deployments = Deployments(os.environ["API"], Path(os.environ["CREDENTIALS"]), os.environ["NAMESPACE"])
    step, rollout, pools = os.environ["STEP"], os.environ["ROLLOUT"], json.loads(os.environ["POOLS"])
    if step == "roll":
        roll(deployments, pools, rollout)
        return
    apply_replicas(deployments, json.loads(os.environ["WANTED"]), before_upgrade=step == "before")
    if step == "before":
        pause(deployments, pools, rollout)


if __name__ == "__main__":
    main()
