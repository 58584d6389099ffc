"""Embeddings, scores, ranks and classes over fake instances that compute vectors."""

import asyncio
import struct
from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from baton_serve.contracts.messages import Batch, Cancel, Pool
from baton_serve.contracts.pooling import PoolingInput, PoolingProfile
from baton_serve.services.router.api.pooling.input_tokens import InputRules, of_texts, truncated_lengths
from baton_serve.services.router.api.pooling.score_endpoints import paired
from baton_serve.services.router.placement.circuit_breaker import FAILURE_THRESHOLD
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.requests.pooling_dispatcher import Vector, cosine, encode_vectors, split
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import pooled, record

JSON = (b"content-type", b"application/json")
EMBEDS = PoolingProfile(tasks=["embed", "token_embed"], dimensions=3)
SHRINKS = PoolingProfile(tasks=["embed", "token_embed"], dimensions=3, is_matryoshka=True)
SCORES = PoolingProfile(tasks=["classify"], labels=["LABEL_0"])
CLASSIFIES = PoolingProfile(tasks=["classify"], labels=["good", "bad"])
WORKERS = {"prefill": 1, "decode": 0}


async def ask(router: Router, path: str, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def messages(router: Router, instance: str = "prefill-0") -> list[Pool]:
    return [m for m in router.fakes[instance].received if isinstance(m, Pool)]


def test_the_list_of_models_says_what_each_computes(serve: Serve) -> None:
    def scenario(expected: list[str]) -> Callable[[Router], Awaitable[None]]:
        async def run(router: Router) -> None:
            cards = (await router.http.get("/v1/models")).json()["data"]
            assert [card["tasks"] for card in cards] == [expected] * len(cards)

        return run

    serve(scenario(["generate"]))
    serve(scenario(["embed", "token_embed"]), pooling=EMBEDS, **WORKERS)
    serve(scenario(["classify", "score"]), pooling=SCORES, **WORKERS)
    serve(scenario(["classify"]), pooling=CLASSIFIES, **WORKERS)
    serve(scenario([]), prefill=0, decode=0)


def test_embeddings_of_texts_and_of_token_ids_in_their_order(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, "/v1/embeddings", input=["abc", "b"], model="tiny")
        assert answer["object"] == "list" and answer["model"] == "tiny" and answer["id"].startswith("embd-")
        assert answer["data"] == [
            {"index": 0, "object": "embedding", "embedding": [3.0, 97.0 + 98 + 99, 0.0]},
            {"index": 1, "object": "embedding", "embedding": [1.0, 98.0, 0.0]},
        ]
        assert answer["usage"] == {
            "prompt_tokens": 4,
            "total_tokens": 4,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        ids = await ask(router, "/v1/embeddings", input=[[97, 98, 99], [98]])
        assert ids["data"] == answer["data"]
        one = await ask(router, "/v1/embeddings", input=[97, 98, 99])
        assert one["data"] == answer["data"][:1]
        chat = await ask(router, "/v1/embeddings", messages=[{"role": "user", "content": "b"}])
        assert chat["usage"]["prompt_tokens"] > 1

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_base64_is_the_same_vector(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, "/v1/embeddings", input="abc", encoding_format="base64")
        assert struct.unpack("<3f", b64decode(answer["data"][0]["embedding"])) == (3.0, 294.0, 0.0)

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_dimensions_and_normalisation_reach_the_engine(serve: Serve) -> None:
    async def shrinks(router: Router) -> None:
        await ask(router, "/v1/embeddings", input="abc", dimensions=2, normalize=False)
        params = messages(router)[0].params
        assert (params.task, params.dimensions, params.normalize) == ("embed", 2, False)
        answer = await router.http.post("/v1/embeddings", json={"input": "abc", "dimensions": 4})
        assert answer.status_code == 400 and "the model has 3" in answer.text

    async def does_not(router: Router) -> None:
        answer = await router.http.post("/v1/embeddings", json={"input": "abc", "dimensions": 2})
        assert answer.status_code == 400 and "Matryoshka" in answer.text
        assert answer.json()["error"]["param"] == "dimensions"

    serve(shrinks, pooling=SHRINKS, **WORKERS)
    serve(does_not, pooling=EMBEDS, **WORKERS)


def test_pooling_answers_for_inputs_and_for_their_tokens(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, "/pooling", input="ab")
        assert answer["data"] == [{"index": 0, "object": "pooling", "data": [2.0, 195.0, 0.0]}]
        tokens = await ask(router, "/pooling", input="ab", task="token_embed")
        assert tokens["data"][0]["data"] == [[2.0, 195.0, 0.0]] * 2

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_classes_carry_the_models_labels(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].answer_with = [0.25, 0.75]
        answer = await ask(router, "/classify", input=["a", "b"], activation=False)
        assert answer["data"][1] == {"index": 1, "label": "bad", "probs": [0.25, 0.75], "num_classes": 2}
        assert messages(router)[0].params.activation is False
        refused = await router.http.post("/score", json={"text_1": "a", "text_2": "b"})
        assert refused.status_code == 400 and "2 classes" in refused.text

    serve(scenario, pooling=CLASSIFIES, **WORKERS)


def test_a_classifier_of_one_class_scores_and_ranks_pairs(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path in ("/score", "/v1/score"):
            answer = await ask(router, path, text_1="q", text_2=["long text", "a"])
            scores = [item["score"] for item in answer["data"]]
            assert scores == pytest.approx([1 / (1 + 10), 1 / (1 + 2)])
            assert answer["data"][0]["object"] == "score"
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = await ask(router, path, query="q", documents=["long text", {"text": "a"}, "of"])
            assert [item["index"] for item in ranked["results"]] == [1, 2, 0]
            assert ranked["results"][0]["document"] == {"text": "a"}
            assert ranked["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
        top = await ask(router, "/rerank", query="q", documents=["ab", "c"], top_n=1, return_documents=False)
        assert [(item["index"], "document" in item) for item in top["results"]] == [(1, False)]

    serve(scenario, pooling=SCORES, **WORKERS)


def test_texts_are_ranked_as_by_text_embeddings_inference(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        texts = ["long text", "a", "of"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = await router.http.post(path, json={"query": "q", "texts": texts})
            ranked = answer.json()
            assert [(item["index"], set(item)) for item in ranked] == [(i, {"index", "score"}) for i in (1, 2, 0)]
            assert [item["score"] for item in ranked] == pytest.approx([1 / 3, 1 / 4, 1 / 11])
        shown = await router.http.post("/rerank", json={"query": "q", "texts": texts, "return_text": True, "top_n": 1})
        assert [item["text"] for item in shown.json()] == ["a"]
        for raw, activation in ((True, False), (False, True)):
            await router.http.post("/rerank", json={"query": "q", "texts": texts, "raw_scores": raw})
            assert messages(router)[-1].params.activation is activation
        long = {"query": "q", "texts": ["a" * 300 + "b"]}
        assert (await router.http.post("/rerank", json=long)).status_code == 400
        for side, last in (("left", ord("b")), ("Right", ord("a"))):
            body = {**long, "truncate": True, "truncation_direction": side}
            assert (await router.http.post("/rerank", json=body)).status_code == 200
            (pair,) = messages(router)[-1].inputs
            assert (len(pair.token_ids), pair.token_ids[-1]) == (256, last)
        for wrong, param in (
            ({"query": "q"}, "documents"),
            ({"query": "q", "documents": ["a"], "texts": ["a"]}, "documents"),
            ({"query": "q", "texts": []}, "texts"),
            ({"query": "q", "documents": ["a"], "return_text": True}, "return_text"),
            ({"query": "q", "texts": ["a"], "truncation_direction": "up"}, "truncation_direction"),
        ):
            refused = await router.http.post("/rerank", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), wrong
        assert (await router.http.post("/invocations", json={"query": "q", "texts": texts})).json()[0]["index"] == 1

    serve(scenario, pooling=SCORES, **WORKERS)


def test_an_embedding_model_scores_by_the_cosine_and_embeds_each_text_once(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, "/score", text_1=["a", "b"], text_2=["a", "abc"])
        scores = [item["score"] for item in answer["data"]]
        assert scores == pytest.approx([1.0, 1.0], abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == 5  # a, b, abc

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_pairs_go_through_a_template_that_the_server_was_given(serve: Serve, model_folder: Path) -> None:
    from baton_serve.services.router.settings import RouterSettings
    from baton_serve.services.router.text.served_model import ServedModel

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chosen = RouterSettings(model=str(model_folder), chat_template=template)

    async def scenario(router: Router) -> None:
        router.service.model = ServedModel.from_settings(chosen)
        await ask(router, "/score", text_1="q", text_2="d")
        token_ids = messages(router)[0].inputs[0].token_ids
        assert router.service.model.tokenizer.decode(token_ids) == "<query>q<document>d"

    serve(scenario, pooling=SCORES, chat_template=template, **WORKERS)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/embeddings", {"input": "x" * 300}, "number 0 has 300 tokens, but the model takes 256"),
        ("/v1/embeddings", {"input": [[1], [99999]]}, "token ids must be from"),
        ("/v1/embeddings", {"input": ""}, "has no tokens"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {}, "either input or messages"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 300}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8"}, "embed_dtype"),
        ("/classify", {"input": "a"}, "does not serve classify; it answers at /v1/embeddings"),
        ("/pooling", {"input": "a", "task": "classify"}, "does not serve classify"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "1 and N"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "generates no text"),
        ("/v1/completions", {"prompt": "a"}, "generates no text"),
    ],
)
def test_bad_requests_say_why(serve: Serve, path: str, body: dict[str, Any], why: str) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(path, json=body)
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_a_model_that_writes_text_says_so(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            answer = await router.http.post(path, json=body)
            assert answer.status_code == 400 and "generates text" in answer.text

    serve(scenario)


def test_truncation_keeps_the_first_tokens_or_the_last(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for wanted, kept in ((2, 2), (-1, 256)):
            answer = await ask(router, "/v1/embeddings", input="ab" + "c" * 300, truncate_prompt_tokens=wanted)
            assert answer["usage"]["prompt_tokens"] == kept
            assert messages(router)[-1].inputs[0].token_ids[:2] == [97, 98]
        for text in ("a" * 300 + "bc", [*[97] * 300, 98, 99]):
            await ask(router, "/v1/embeddings", input=text, truncate_prompt_tokens=3, truncation_side="left")
            assert messages(router)[-1].inputs[0].token_ids == [97, 98, 99]

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_a_prefill_pool_alone_is_healthy_and_shares_the_work(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.http.get("/health")).status_code == 200
        texts = [letter * 200 for letter in "mnopqrstuvwx"]
        answer = await ask(router, "/v1/embeddings", input=texts)
        assert [item["embedding"][1] for item in answer["data"]] == [200.0 * ord(text[0]) for text in texts]
        assert messages(router, "prefill-0") and messages(router, "prefill-1")
        text = (await router.http.get("/metrics")).text
        samples = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert samples["vllm:prompt_tokens_total"] == 2400
        assert samples["vllm:request_success_total"] == 12

    serve(scenario, pooling=EMBEDS, prefill=2, decode=0)


def test_what_a_lost_instance_had_not_computed_is_asked_of_another(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        first = router.fakes["prefill-0"]
        first.hold = 1
        asking = asyncio.create_task(ask(router, "/v1/embeddings", input=["a", "b", "c"]))
        await settle(40)
        assert [len(m.inputs) for m in messages(router)] == [3]
        first.die()
        answer = await asking
        assert [item["embedding"][1] for item in answer["data"]] == [97.0, 98.0, 99.0]
        assert [len(m.inputs) for m in messages(router, "prefill-1")] == [2]  # "a" had come already

    serve(scenario, pooling=EMBEDS, prefill=2, decode=0)


def test_an_instance_that_fails_is_avoided_and_its_fault_is_not_the_clients(serve: Serve) -> None:
    async def recovers(router: Router) -> None:
        router.fakes["prefill-0"].refuses = "internal"
        assert len((await ask(router, "/v1/embeddings", input="a"))["data"]) == 1

    async def gives_up(router: Router) -> None:
        router.fakes["prefill-0"].refuses = "internal"
        assert (await router.http.post("/v1/embeddings", json={"input": "a"})).status_code == 500
        router.fakes["prefill-0"].refuses = "invalid"
        assert (await router.http.post("/v1/embeddings", json={"input": "a"})).status_code == 400

    serve(recovers, pooling=EMBEDS, prefill=2, decode=0)
    serve(gives_up, pooling=EMBEDS, max_replays=1, **WORKERS)


def test_too_much_at_once_is_refused_and_nobody_is_a_503(serve: Serve) -> None:
    async def crowded(router: Router) -> None:
        router.fakes["prefill-0"].hold = 0
        asking = asyncio.create_task(router.http.post("/v1/embeddings", json={"input": ["a", "b"]}))
        await settle()
        answer = await router.http.post("/v1/embeddings", json={"input": "c"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        router.pooling.close()
        assert (await asking).status_code == 503

    async def empty(router: Router) -> None:
        assert (await router.http.post("/v1/embeddings", json={"input": "c"})).status_code == 503
        assert (await router.http.get("/health")).status_code == 503

    serve(crowded, pooling=EMBEDS, max_concurrent_requests=2, **WORKERS)
    serve(empty, pooling=EMBEDS, prefill=0, decode=0)


def test_the_limits_of_a_key_hold_here_too(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.app.keys = ApiKeys(["secret"], defaults=Caller(name="me", tokens_per_minute=5))
        header = {"authorization": "Bearer secret"}
        first = await router.http.post("/v1/embeddings", json={"input": "abcd"}, headers=header)
        second = await router.http.post("/v1/embeddings", json={"input": "abcd"}, headers=header)
        assert (first.status_code, second.status_code) == (200, 429)
        assert second.json()["error"]["code"] == "rate_limit_exceeded"

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_a_client_that_leaves_ends_the_work(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        instance = router.fakes["prefill-0"]
        instance.hold = 0
        received = iter([{"type": "http.request", "body": b'{"input": "a"}'}])
        leaves = asyncio.Event()

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise AssertionError(f"nobody is left to hear {message}")

        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [JSON]}
        serving = asyncio.create_task(router.app(scope, receive, send))
        await settle()
        leaves.set()
        await serving
        assert isinstance(instance.received[-1], Cancel)

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_pairs_keep_their_frame_when_they_are_cut() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )

    def read(*texts: Any, truncate: int | None = None) -> list[PoolingInput]:
        rules = InputRules(max_tokens=64, vocab_size=4, truncate=truncate)
        return asyncio.run(of_texts(TextTokenizer(tokenizer, {}), list(texts), rules, param="input"))

    assert read(("a a", "b b")) == [PoolingInput([0, 2, 2, 1, 3, 3, 1], [0, 0, 0, 0, 1, 1, 1])]
    assert read(("a", "b b b b"), truncate=6) == [PoolingInput([0, 2, 1, 3, 3, 1], [0, 0, 0, 1, 1, 1])]
    assert read("a a a", truncate=4) == [PoolingInput([0, 2, 2, 1])]
    assert read("a", truncate=4) == [PoolingInput([0, 2, 1])]


def test_the_longer_text_is_cut_first() -> None:
    assert truncated_lengths([5, 3], 8) == [5, 3]
    assert truncated_lengths([9, 3], 8) == [5, 3]
    assert truncated_lengths([3, 9], 8) == [3, 5]
    assert truncated_lengths([9, 9], 7) == [4, 3]
    assert truncated_lengths([9], 7) == [7]


def test_other_work_has_turns_while_long_vectors_are_written() -> None:
    async def turns() -> int:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        texts = await encode_vectors([Vector([4096], struct.pack("<f", 0.5) * 4096)] * 100, "float")
        counting.cancel()
        assert [bytes(text) for text in texts] == [b"[" + b",".join([b"0.5"] * 4096) + b"]"] * 100
        return num_turns

    assert asyncio.run(turns()) >= 25


def test_the_cosine_of_two_vectors() -> None:
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1.0)
    assert cosine([1.0, 0.0], [0.0, 2.0]) == 0.0
    assert cosine([1.0, 0.0], [-3.0, 0.0]) == pytest.approx(-1.0)
    assert cosine([0.0], [1.0]) == 0.0


def test_texts_are_paired_one_to_one_one_to_many_and_in_pairs() -> None:
    assert paired(["q"], ["a", "b"]) == [("q", "a"), ("q", "b")]
    assert paired(["q", "r"], ["a", "b"]) == [("q", "a"), ("r", "b")]


def test_a_small_call_is_not_torn_apart() -> None:
    inputs = [PoolingInput([1] * 100)] * 8
    assert [len(group.positions) for group in split(inputs, 1)] == [8]
    assert [len(group.positions) for group in split(inputs, 4)] == [6, 2]
    many = [PoolingInput([1] * 1000)] * 40
    assert [group.num_tokens for group in split(many, 2)] == [9000, 9000, 9000, 9000, 4000]


def test_the_openapi_document_lists_the_pooling_endpoints(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        document = (await router.http.get("/openapi.json")).json()
        wanted = {
            "/v1/embeddings",
            "/pooling",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/classify",
        }
        assert wanted <= document["paths"].keys()

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_instances_of_a_model_that_answers_with_vectors_write_no_text(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.add(record("prefill-9", "prefill", pooling=EMBEDS))
        await settle()
        await router.complete(prompt="hello", max_tokens=3)
        assert not router.fakes["prefill-9"].assignments()

    serve(scenario)


def test_a_call_that_cannot_be_in_time_is_refused_at_once(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post("/v1/embeddings", json={"input": "abc"}, headers={"x-baton-ttft-ms": "0.0001"})
        assert answer.status_code == 429 and "the TTFT SLO is" in answer.text
        assert "retry-after" in answer.headers
        assert not messages(router)
        metrics = (await router.http.get("/metrics")).text
        assert 'baton:admission_refusals_total{cause="ttft",model_name="tiny"} 1.0' in metrics
        await ask(router, "/v1/embeddings", input="abc")

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_what_is_more_than_instances_have_to_do_waits_in_the_router_by_priority(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        instance = router.fakes["prefill-0"]
        instance.hold = 0
        # 1,000 tokens take a second, and instances get one second of work.
        first = asyncio.create_task(ask(router, "/v1/embeddings", input=[[97] * 60] * 20))
        await settle()
        later = asyncio.create_task(ask(router, "/v1/embeddings", input="abc", priority=5))
        await settle()
        sooner = asyncio.create_task(ask(router, "/v1/embeddings", input="ab"))
        await settle()
        assert {len(m.inputs[0].token_ids) for m in messages(router)} == {60}
        metrics = (await router.http.get("/metrics")).text
        assert 'baton:router_waiting_requests{model_name="tiny"} 2.0' in metrics
        instance.hold = None
        for message in messages(router):
            instance.send(Batch([pooled(message, index, None) for index in range(len(message.inputs))]))
        await asyncio.gather(first, later, sooner)
        assert [len(m.inputs[0].token_ids) for m in messages(router)][-2:] == [2, 3]

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_an_instance_that_fails_again_and_again_is_left_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].refuses = "internal"
        for _ in range(8):
            await ask(router, "/v1/embeddings", input="abc")
        assert 5 <= len(messages(router)) < 8
        assert len(messages(router, "prefill-1")) == 8

    serve(scenario, pooling=EMBEDS, prefill=2, decode=0)


def test_a_failure_without_a_retry_left_counts_in_the_circuit_breaker(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].refuses = "internal"
        for _ in range(FAILURE_THRESHOLD):
            assert (await router.http.post("/v1/embeddings", json={"input": "a"})).status_code == 500
        (worker,) = router.cluster.workers()
        assert worker.circuit_breaker.failures == FAILURE_THRESHOLD

    serve(scenario, pooling=EMBEDS, max_replays=0, **WORKERS)


def test_of_a_word_of_a_million_characters_only_as_much_is_encoded_as_a_prompt_could_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = TextTokenizer(Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")), {})
    word, encoded = "a" * 1_000_000, list[int]()
    encode = tokenizer.encode

    def counted(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    rules = InputRules(max_tokens=64, vocab_size=9, add_special_tokens=False)

    with pytest.raises(BadRequestError, match="has more than 64 tokens"):
        asyncio.run(of_texts(tokenizer, [word], rules, param="input"))
    assert tokenizer.encode_part(word, add_special_tokens=False, num_tokens=64) == [0]
    beginning = tokenizer.part(word, 64)
    assert beginning.ids == [0] and beginning.offsets[-1][1] <= 256 * 1024
    assert max(encoded) <= 256 * 1024


def test_images_to_a_model_that_reads_none_are_refused(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        for path, body, reason in [
            ("/v1/embeddings", {"messages": [{"role": "user", "content": parts}]}, "does not accept images in inputs"),
            ("/score", {"text_1": "a", "text_2": {"content": parts}}, "does not accept images in inputs"),
            ("/rerank", {"query": "a", "documents": [{"content": parts}]}, "does not accept images in inputs"),
            ("/v1/embeddings", {"input": "a", "mm_processor_kwargs": {"max_pixels": 9}}, "reads no images"),
            ("/score", {"text_1": "a", "text_2": "b", "mm_processor_kwargs": {"size": 9}}, "reads no images"),
        ]:
            answer = await router.http.post(path, json=body)
            assert answer.status_code == 400 and reason in answer.text, answer.text
        assert not messages(router)

    serve(scenario, pooling=EMBEDS, **WORKERS)
