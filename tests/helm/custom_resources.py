"""Strict schemas of the custom resources the chart makes, written down from their projects' API references.

Only the fields that the chart uses are listed, so a field that is misspelt, or used without being looked up, fails.
"""

from typing import Any

import jsonschema

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER_AS_TEXT: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}


def record(required: Schema, optional: Schema | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def array(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


EXPRESSION = record(
    {"key": TEXT, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}}, {"values": array(TEXT)}
)
SELECTOR = record({}, {"matchLabels": LABELS, "matchExpressions": array(EXPRESSION)})
ENDPOINT = record(
    {"port": TEXT, "path": TEXT, "interval": DURATION},
    {
        "scheme": {"enum": ["http", "https"]},
        "tlsConfig": record(
            {},
            {
                "insecureSkipVerify": {"type": "boolean"},
                "serverName": TEXT,
                "ca": record({"secret": record({"name": TEXT, "key": TEXT})}),
            },
        ),
    },
)
ALERT = record(
    {"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS},
    {"for": DURATION, "keep_firing_for": DURATION},
)
RECORDING = record(
    {"record": {"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"}, "expr": TEXT}, {"labels": LABELS}
)
SCALING_RULES = record(
    {"stabilizationWindowSeconds": {**COUNT, "maximum": 3600}},
    {
        "policies": array(
            record({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": {**COUNT, "maximum": 1800}})
        ),
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
    },
)
TRIGGER = record(
    {
        "type": {"const": "prometheus"},
        "metadata": record({"serverAddress": TEXT, "threshold": NUMBER_AS_TEXT, "query": TEXT}),
    },
    {"metricType": {"enum": ["AverageValue", "Value", "Utilization"]}},
)

CUSTOM: dict[str, tuple[str, Schema]] = {
    "ScaledObject": (
        "keda.sh/v1alpha1",
        record(
            {
                "scaleTargetRef": record({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT}),
                "triggers": array(TRIGGER),
            },
            {
                "minReplicaCount": COUNT,
                "maxReplicaCount": COUNT,
                "pollingInterval": COUNT,
                "cooldownPeriod": COUNT,
                "advanced": record(
                    {
                        "horizontalPodAutoscalerConfig": record(
                            {"behavior": record({}, {"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES})}
                        )
                    }
                ),
            },
        ),
    ),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        record(
            {
                "leaderWorkerTemplate": record(
                    # Templates of pods: test_hosts.py checks them as Kubernetes does.
                    {"workerTemplate": {"type": "object"}},
                    {
                        "leaderTemplate": {"type": "object"},
                        "size": COUNT,
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    },
                )
            },
            {
                "replicas": COUNT,
                "rolloutStrategy": record(
                    {"type": {"const": "RollingUpdate"}},
                    {"rollingUpdateConfiguration": record({}, {"maxSurge": COUNT, "maxUnavailable": COUNT})},
                ),
            },
        ),
    ),
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        record({"selector": SELECTOR, "podMetricsEndpoints": array(ENDPOINT)}),
    ),
    "ServiceMonitor": (
        "monitoring.coreos.com/v1",
        record({"selector": SELECTOR, "endpoints": array(ENDPOINT)}),
    ),
    "PrometheusRule": (
        "monitoring.coreos.com/v1",
        record({"groups": array(record({"name": TEXT, "rules": array({"oneOf": [ALERT, RECORDING]})}))}),
    ),
    "HTTPRoute": (
        "gateway.networking.k8s.io/v1",
        record(
            {
                "parentRefs": array(record({"name": TEXT}, {"namespace": TEXT, "sectionName": TEXT, "port": COUNT})),
                "rules": array(record({"backendRefs": array(record({"name": TEXT, "port": COUNT}))})),
            },
            {"hostnames": array(TEXT)},
        ),
    ),
}
METADATA = record({"name": TEXT, "labels": LABELS}, {"annotations": LABELS})


def validate_custom(manifest: dict[str, Any]) -> None:
    """Check a custom resource against its schema. Raises `ValueError` with the name of the wrong field."""
    version, spec = CUSTOM[manifest["kind"]]
    schema = record(
        {"apiVersion": {"const": version}, "kind": {"const": manifest["kind"]}, "metadata": METADATA, "spec": spec}
    )
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(manifest), key=lambda error: list(error.path))
    if errors:
        raise ValueError(f"{manifest['kind']} {manifest['metadata']['name']}: {errors[0].message}")
