#!/usr/bin/env python3
"""Write helm/values.schema.json from helm/values.yaml: the keys in that file are allowed, and no others.

Types of settings come from the settings of the processes, so that the chart refuses the same values. Types of other
keys come from their defaults. Other rules (choices, ranges, free Kubernetes objects) are listed here. With `--check`,
only report whether the file is current.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm"
sys.path.insert(0, str(ROOT))

from baton_serve.services.common.settings.options import Option, options_of  # noqa: E402
from baton_serve.services.instance.settings import InstanceSettings  # noqa: E402
from baton_serve.services.router.service_builder import ModelSettings  # noqa: E402
from baton_serve.services.router.settings import RouterSettings  # noqa: E402

FREE_OBJECTS = {"resources", "nodeSelector", "affinity", "annotations", "podAnnotations", "podLabels", "labels"}
FREE_OBJECTS |= {"podSecurityContext", "securityContext", "startup", "readiness", "liveness"}
OBJECT_LISTS = {"tolerations", "topologySpreadConstraints", "extraEnv", "extraEnvFrom", "extraVolumes"}
OBJECT_LISTS |= {"extraVolumeMounts", "extraContainers", "extraInitContainers", "extraObjects", "extra"}
OBJECT_LISTS |= {"parentRefs", "routerFrom", "metricsFrom", "pullSecrets"}
CHOICES: dict[str, list[str]] = {
    "pullPolicy": ["Always", "IfNotPresent", "Never"],
    "model.source.kind": ["pvc", "hostPath", "download"],
    "cache.kind": ["pvc", "hostPath", "emptyDir"],
    "router.service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "autoscaling.kind": ["none", "hpa", "keda"],
    "slo.itlSeconds": ["0.01", "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5", "0.75", "1.0"],
    "slo.ttftSeconds": ["0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "7.5", "10.0"],
}
SAME_AS_SETTING = {
    "gpu.device": "device",
    "kvTransfer.transport": "kv_transport",
    "kvTransfer.checksum": "kv_checksum",
    "kvTransfer.rankTransfers": "kv_rank_transfers",
    "kvTransfer.tailParts": "kv_tail_parts",
    "kvTransfer.zeromqConnections": "kv_zeromq_connections",
    "kvTransfer.leaseSeconds": "kv_lease_s",
    "kvTransfer.handoffTimeoutSeconds": "handoff_timeout_s",
    "logging.level": "log_level",
    "logging.format": "log_format",
    "router.port": "port",
}
FRACTION = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
INTEGER = {"type": "integer", "minimum": 0}
SPECIAL: dict[str, dict[str, Any]] = {
    "gpu.device": {"enum": ["xpu", "cuda", "cpu"]},
    "kvTransfer.transport": {"enum": ["auto", "usm", "zeromq", "oneccl"]},  # `memory` is for one process
    "router.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "router.service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "kvCacheUsage": FRACTION,
    "slowLinkMinUtilization": FRACTION,
    "objective": FRACTION,
    "model.source.download.cache.accessModes": {
        "type": "array",
        "minItems": 1,
        "items": {"enum": ["ReadWriteOnce", "ReadWriteMany"]},
    },
    "model.source.download.cache.size": {"type": "string", "pattern": "^[0-9]+(Mi|Gi|Ti)$"},
    "maxUnavailable": {"type": ["integer", "string"]},
}
MODEL_BLOCKS = ["model", "gpu", "engine", "prefill", "decode", "unified", "encode"]
"""Blocks of the values that an entry of `models` may replace."""
RESERVED_NAMES = ["main", "router", "redis", "prefill", "decode", "unified", "encode"]
"""Not for an entry of `models`: labels and names of objects would be ambiguous."""
PER_MODEL = set(ModelSettings.__struct_fields__) - {"model", "served_model_name"}
TARGETS = {"waitSeconds", "interTokenSeconds", "kvCacheUsage"}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m)?$"}


def schema_of(value: Any, path: str, root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the value at `path`."""
    role, _, rest = path.partition(".")
    if role in ("prefill", "decode", "unified", "encode") and rest == "engine":
        # A pool's own engine settings: the same keys, none of them required.
        return schema_of(root["engine"], "engine", root)
    known = setting_schema(path) or listed_schema(path)
    if known is not None:
        return known
    if isinstance(value, dict):
        properties = {name: schema_of(item, f"{path}.{name}".lstrip("."), root) for name, item in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(value, bool):
        return {"type": "boolean"}
    return INTEGER if isinstance(value, int) else {"type": "string"}


def setting_schema(path: str) -> dict[str, Any] | None:
    """Return the schema of a key that sets an environment variable of a process, or None."""
    parent, _, key = path.rpartition(".")
    if path in SPECIAL:
        return SPECIAL[path]
    if parent == "engine":
        return option_schema(option_named(InstanceSettings, snake(key)))
    if parent == "router.settings":
        return option_schema(option_named(RouterSettings, snake(key)))
    if path in SAME_AS_SETTING:
        name = SAME_AS_SETTING[path]
        owner = RouterSettings if name in ("handoff_timeout_s", "port") else InstanceSettings
        return option_schema(option_named(owner, name))
    return None


def option_named(settings: type[Any], name: str) -> Option:
    found = [option for option in options_of(settings) if option.name == name]
    assert found, f"{settings.__name__} has no field {name}: remove the key from values.yaml"
    return found[0]


def option_schema(option: Option) -> dict[str, Any]:
    """Return the schema of a process setting."""
    if option.choices:
        return {"enum": [*option.choices, *([None] if option.is_optional else [])]}
    types = {int: ["integer"], float: ["number"], bool: ["boolean"], str: ["string"], dict: ["object"]}[option.kind]
    if option.name.endswith("_bytes"):
        types = [*types, "string"]
    schema: dict[str, Any] = {"type": [*types, *(["null"] if option.is_optional else [])]}
    if option.name.endswith("_bytes"):
        schema["pattern"] = "^[0-9.]+ ?([kmgtKMGT](iB)?)?$"
    if option.pattern is not None:
        schema["pattern"] = option.pattern
    keywords = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    keywords |= {"min_length": "minLength", "max_length": "maxLength"}
    schema |= {keyword: option.bounds[bound] for bound, keyword in keywords.items() if bound in option.bounds}
    return schema


def listed_schema(path: str) -> dict[str, Any] | None:
    """Return the schema that the tables above give for the key at `path`, or None."""
    parent, _, key = path.rpartition(".")
    if parent.endswith("autoscaling.targets") and key in TARGETS:
        return QUANTITY
    for suffix, allowed in CHOICES.items():
        if path == suffix or path.endswith("." + suffix):
            return {"enum": allowed}
    by_key: list[tuple[set[str], dict[str, Any]]] = [
        (set(SPECIAL), SPECIAL.get(key, {})),
        (FREE_OBJECTS, {"type": "object"}),
        (OBJECT_LISTS, {"type": "array", "items": {"type": "object"}}),
    ]
    return next((schema for keys, schema in by_key if key in keys), None)


def further_model_schema() -> dict[str, Any]:
    """Return the schema of an entry of `models`."""
    name = {"type": "string", "pattern": "^[a-z][a-z0-9]{0,11}$", "not": {"enum": RESERVED_NAMES}}
    own = {
        camel(option.name): option_schema(option) for option in options_of(RouterSettings) if option.name in PER_MODEL
    }
    router = {"type": "object", "additionalProperties": False, "properties": own}
    properties = {
        "name": name,
        **{block: {"$ref": f"#/properties/{block}"} for block in MODEL_BLOCKS},
        "router": router,
    }
    return {"type": "object", "additionalProperties": False, "required": ["name"], "properties": properties}


def camel(name: str) -> str:
    """Convert max_model_len to maxModelLen."""
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def snake(key: str) -> str:
    """Convert maxModelLen to max_model_len, as the templates do."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", key).lower()


def build() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema_of(values, "", values)
    schema["properties"]["global"] = {"type": "object"}
    schema["properties"]["models"] = {"type": "array", "items": further_model_schema()}
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    target = CHART / "values.schema.json"
    if "--check" in sys.argv:
        return int(target.read_text() != build())
    target.write_text(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
