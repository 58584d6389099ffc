#!/usr/bin/env python3
"""Writes helm/values.schema.json from helm/values.yaml: every key that stands there is allowed, nothing else is.

Types come from the defaults; what a default cannot say (choices, ranges, what may be null, free Kubernetes objects) is
listed here. `--check` only says whether the file is current.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "helm"

FREE_OBJECTS = {"resources", "nodeSelector", "affinity", "annotations", "podAnnotations", "labels"}
FREE_OBJECTS |= {"podSecurityContext", "securityContext"}
OBJECT_LISTS = {"tolerations", "topologySpreadConstraints", "extraEnv", "extraVolumes", "extraVolumeMounts"}
OBJECT_LISTS |= {"parentRefs", "routerFrom", "pullSecrets"}
CHOICES: dict[str, list[str]] = {
    "pullPolicy": ["Always", "IfNotPresent", "Never"],
    "model.source.kind": ["pvc", "hostPath", "download"],
    "gpu.device": ["xpu", "cuda", "cpu"],
    "engine.dtype": ["auto", "float16", "bfloat16", "float32"],
    "kvTransfer.transport": ["auto", "usm", "zeromq", "oneccl"],
    "router.logLevel": ["debug", "info", "warning", "error"],
    "router.service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "autoscaling.kind": ["none", "hpa", "keda"],
}
NULLABLE_INTEGERS = {"maxModelLen", "maxNumBatchedTokens", "blockSize"}
FRACTIONS = {"gpuMemoryUtilization"}
POOLS = ("prefill", "decode", "unified")


def schema_of(value: Any, path: str, root: dict[str, Any]) -> dict[str, Any]:
    if path.endswith(".engine"):
        # A pool's own engine settings: the same keys, none of them required.
        return schema_of(root["engine"], "engine", root)
    listed = listed_schema(path)
    if listed is not None:
        return listed
    if isinstance(value, dict):
        properties = {name: schema_of(item, f"{path}.{name}".lstrip("."), root) for name, item in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer", "minimum": 0} if isinstance(value, int) else {"type": "string"}


def listed_schema(path: str) -> dict[str, Any] | None:
    """What is said above of the key at `path`, if anything."""
    key = path.rsplit(".", 1)[-1]
    for suffix, allowed in CHOICES.items():
        if path == suffix or path.endswith("." + suffix):
            return {"enum": allowed}
    by_key: list[tuple[set[str], dict[str, Any]]] = [
        (NULLABLE_INTEGERS, {"type": ["integer", "null"], "minimum": 1}),
        (FRACTIONS, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        (FREE_OBJECTS, {"type": "object"}),
        (OBJECT_LISTS, {"type": "array", "items": {"type": "object"}}),
    ]
    return next((schema for keys, schema in by_key if key in keys), None)


def build() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema_of(values, "", values)
    schema["properties"]["global"] = {"type": "object"}
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    target = CHART / "values.schema.json"
    if "--check" in sys.argv:
        return int(target.read_text() != build())
    target.write_text(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
