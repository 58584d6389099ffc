"""Fixtures of the end-to-end tests: one cluster a module where tests can share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import forked_ranks as forked_ranks
from tests.e2e.cluster import Cluster
from tests.references import References, references_of
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random-weight Llama with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_tiny_model(folder, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_of(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Of the tests' own process: more only wait for each other where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cluster(llama: Path) -> Iterator[Cluster]:
    """One prefill and one decode instance; every test leaves it idle."""
    with Cluster(llama, args=("--dtype", "float32", "--api-key", "secret")) as running:
        running.client.headers["authorization"] = "Bearer secret"
        yield running


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_idle()
