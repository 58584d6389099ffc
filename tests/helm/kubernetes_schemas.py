"""`kubernetes_validate.validate(…, strict=True)` that reads the schemas of a version once, not once per object."""

import re
from functools import cache
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource


def validate_strictly(manifest: dict[str, Any], version: str) -> None:
    """Check a manifest against Kubernetes' schema, without unknown fields. Raises `jsonschema.ValidationError`."""
    _validator(manifest["kind"], manifest["apiVersion"], version).validate(manifest)


@cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = utils.schema_contents(f"{_folder(version)}/{kind.lower()}-{group}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Registry[Any]:
    registry: Registry[Any] = Registry()
    return Resource.from_contents(utils.schema_contents(f"{_folder(version)}/_definitions.json", version)) @ registry


def _folder(version: str) -> str:
    newest = [known for known in utils.all_versions() if utils.major_minor(known) == utils.major_minor(version)][-1]
    return f"kubernetes-json-schema/v{newest}-local-strict"
