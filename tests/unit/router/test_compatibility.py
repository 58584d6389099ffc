"""docs/reference/api.md is right: its tests exist, and fields that it calls refused are refused by name."""

import re
from pathlib import Path

from baton_serve.services.router.protocol.request_parsing import UNSUPPORTED
from tests.unit.router.conftest import Router, Serve

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
DOCUMENT = (TESTS.parent / "docs" / "reference" / "api.md").read_text()


def test_what_is_not_served_is_refused_by_name(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for name in UNSUPPORTED:
            body = {"messages": [{"role": "user", "content": "hello"}], name: {"asks": "something"}}
            answer = await router.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, name
            assert answer.json()["error"]["param"] == name
            assert name in answer.json()["error"]["message"]

    serve(scenario)


def test_every_parameter_that_is_not_served_has_a_row() -> None:
    assert [name for name in UNSUPPORTED if f"`{name}`" not in DOCUMENT] == []


def test_every_test_that_the_document_names_exists() -> None:
    named = re.findall(r"`((?:e2e/|contract/(?:api/)?|engine/)?test_\w+\.py)(?:::(test_\w+))?`", DOCUMENT)
    assert named
    for file, test in named:
        path = TESTS / file if "/" in file else HERE / file
        assert path.is_file(), file
        assert not test or f"def {test}(" in path.read_text(), f"{file}::{test}"
