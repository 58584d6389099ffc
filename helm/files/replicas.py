"""Set the number of pods of new Deployments, and later only if the number in the values has changed.

A hook of the chart runs this. The Deployments are rendered without `replicas`, so that neither an upgrade nor a
rollback competes with `kubectl scale` or an autoscaler for that field. The number from the values that was applied last
stands in an annotation. Both are written by server-side apply under a field manager of their own.

Environment: API, CREDENTIALS (folder of the account's token), NAMESPACE, BEFORE ("1" in a hook before the upgrade) and
WANTED, JSON: {NAME: {"replicas": N, "autoscaled": BOOL}}.
"""

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANNOTATION = "baton.dev/replicas"
MANAGER = "baton-replicas"
TIMEOUT_S = 20.0

Send = Callable[[str, str, dict[str, Any] | None], dict[str, Any] | None]
"""Sends method, query or "" and body for a Deployment's URL; returns None if the Deployment does not exist."""


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


def apply_replicas(name: str, scale: dict[str, Any], send: Send, *, before_upgrade: bool) -> int | None:
    """Apply the number of one Deployment. Return it, or None if nothing had to change."""
    deployment = send("GET", name, None)
    if deployment is None:
        return None
    number = replicas_to_apply(
        live=deployment["spec"].get("replicas", 1),
        recorded=deployment["metadata"].get("annotations", {}).get(ANNOTATION),
        wanted=scale["replicas"],
        autoscaled=scale["autoscaled"],
        before_upgrade=before_upgrade,
    )
    if number is not None:
        applied = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "annotations": {ANNOTATION: str(scale["replicas"])}},
            "spec": {"replicas": number},
        }
        send("PATCH", name, applied)
    return number


def sender(api: str, credentials: Path, namespace: str) -> Send:
    """Return a function that sends requests for Deployments to the API server."""
    token = (credentials / "token").read_text()
    authority = credentials / "ca.crt"
    context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None

    def send(method: str, name: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        url = f"{api}/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
        if method == "PATCH":
            url += f"?fieldManager={MANAGER}&force=true"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/apply-patch+yaml"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as exc:
            if exc.code == 404 and method == "GET":
                return None
            raise

    return send


def main() -> None:
    send = sender(os.environ["API"], Path(os.environ["CREDENTIALS"]), os.environ["NAMESPACE"])
    for name, scale in json.loads(os.environ["WANTED"]).items():
        apply_replicas(name, scale, send, before_upgrade=os.environ["BEFORE"] == "1")


if __name__ == "__main__":
    main()
