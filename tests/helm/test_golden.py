"""The rendered chart equals the one that was reviewed last."""

import pytest

from tests.helm.golden import FOLDER, VARIANTS, golden


@pytest.mark.parametrize("name", VARIANTS)
def test_a_render_is_as_it_was_reviewed(name: str) -> None:
    assert golden(name) == (FOLDER / f"{name}.yaml").read_text(), (
        "look at the change, then: python -m tests.helm.golden"
    )
