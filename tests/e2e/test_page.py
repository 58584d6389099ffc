"""The page at / in a real browser, over a live cluster: what it shows, the chat, a phone's width."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chromium import PROGRAM, Browser
from tests.e2e.cluster import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: tools/install_system_packages.sh installs one"),
]

TEXT = "document.body.innerText"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The bundled demo model, with a host tier."""
    with Cluster(None, args=("--disaggregation-min-tokens", "0", "--host-kv-gb", "0.05")) as running:
        for number in range(3):
            running.complete(f"{number} " + "The weather is fine and the train is late. " * 4, max_tokens=20)
        yield running


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BATON_TEST_SCREENSHOTS names a folder in which they are kept."""
    kept = os.environ.get("BATON_TEST_SCREENSHOTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("screenshots")


@pytest.mark.parametrize(("name", "width"), [("desk", 1280), ("phone", 390)])
def test_the_page_shows_the_cluster_and_chats(cluster: Cluster, screenshots: Path, name: str, width: int) -> None:
    with Browser() as browser:
        browser.open(cluster.url, width=width, height=900)
        browser.until("document.querySelectorAll('.request').length >= 3")
        browser.until("document.querySelectorAll('#instances .card').length === 2")
        browser.until(f"{TEXT}.includes('from prefill-0: usm')")  # the link is reported with a heartbeat
        text = browser.value(TEXT)
        for shown in (
            "1 prefill · 1 decode",
            "prefill-0",
            "decode-0",
            "KV cache in use",
            "prompt tokens cached",
            "tok/s written",
        ):
            assert shown in text
        for shown in ("host tier", "waiting", "from prefill-0: usm", "GB/s", "prefill-0 → usm → decode-0"):
            assert shown in text
        bars = "[...document.querySelectorAll('.request .bar')].map(bar => bar.getBoundingClientRect().width)"
        assert max(browser.value(bars)) > 100
        browser.value(f"document.getElementById('text').value = {QUESTION!r}, document.getElementById('send').click()")
        browser.until(f"{TEXT}.includes('first token')")
        said = browser.value("document.querySelector('.said.answer').textContent")
        assert len(said) > 5
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.screenshot(screenshots / f"page-{name}.png")
        asked = {url for url in browser.requested if not url.startswith("data:")}
        assert asked and all(url.startswith(cluster.url) for url in asked)
        assert browser.value("performance.getEntriesByType('resource').every(r => new URL(r.name).origin === origin)")
