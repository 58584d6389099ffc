"""Every number that a client may send has bounds: what is accepted can be encoded, counted and put into tensors."""

import importlib
import pkgutil
import types
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import baton_serve.services.router


def schemas() -> list[type[BaseModel]]:
    """Return every request model that the router declares."""
    for module in pkgutil.walk_packages(baton_serve.services.router.__path__, "baton_serve.services.router."):
        importlib.import_module(module.name)
    found, left = set(), [BaseModel]
    while left:
        for model in left.pop().__subclasses__():
            if model not in found:
                found.add(model)
                left.append(model)
    return sorted(
        (m for m in found if m.__module__.startswith("baton_serve.services.router")), key=lambda m: m.__qualname__
    )


def unbounded(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    """The integers and floats within an annotation that lack a smallest or a largest value."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from unbounded(inner, (*metadata, *more))
    elif annotation in (int, float):
        stated = [one for info in metadata for one in (info.metadata if isinstance(info, FieldInfo) else [info])]
        has_low = any(isinstance(one, annotated_types.Ge | annotated_types.Gt) for one in stated)
        has_high = any(isinstance(one, annotated_types.Le | annotated_types.Lt) for one in stated)
        if not (has_low and has_high):
            yield annotation.__name__
    elif isinstance(annotation, types.UnionType) or get_origin(annotation) is not None:
        for inner in get_args(annotation):
            if not isinstance(inner, str):  # of a Literal
                yield from unbounded(inner, metadata if isinstance(annotation, types.UnionType) else ())


def of_model(model: type[BaseModel]) -> list[str]:
    return [
        f"{model.__qualname__}.{name}: {kind}"
        for name, field in model.model_fields.items()
        for kind in unbounded(field.annotation, tuple(field.metadata))
    ]


def test_every_number_of_every_schema_has_bounds() -> None:
    models = schemas()
    assert {"CompletionRequest", "MessagesRequest", "ResponsesRequest", "RerankRequest"} <= {m.__name__ for m in models}
    assert [lack for model in models for lack in of_model(model)] == []


@pytest.mark.parametrize("annotation", [int, int | None, list[list[int]], dict[str, float], Annotated[int, "a text"]])
def test_a_number_without_bounds_is_found_wherever_it_stands(annotation: Any) -> None:
    assert list(unbounded(annotation))


def test_a_number_with_one_bound_lacks_the_other() -> None:
    assert list(unbounded(Annotated[int, annotated_types.Ge(0)])) == ["int"]
    assert list(unbounded(Annotated[int, annotated_types.Ge(0), annotated_types.Lt(5)])) == []
