"""Which pools `baton serve` starts for a model."""

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.local.pools import with_pools
from baton_serve.services.local.settings import ServeSettings


def test_a_model_that_answers_with_vectors_gets_no_decode_instances() -> None:
    assert with_pools(ServeSettings(), "embed").decode == 0
    assert with_pools(ServeSettings(prefill=0, unified=2), "classify").unified == 2
    assert with_pools(ServeSettings(decode=3), "generate").decode == 3


def test_pools_that_could_not_serve_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="generate tokens"):
        with_pools(ServeSettings(decode=0), "generate")
    with pytest.raises(ConfigurationError, match="compute its vectors"):
        with_pools(ServeSettings(prefill=0), "embed")
