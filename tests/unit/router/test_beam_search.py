"""Beam search and best_of: the search itself against every possible answer, and both through the router."""

import math
import random
from itertools import product
from typing import Any

import pytest

from baton_serve.contracts.beam_search import Beam, BeamRules, BeamSearch, EarlyStopping
from baton_serve.contracts.messages import TokenLogprob, TokenLogprobs
from baton_serve.services.router.api.best_of import RankedText, best_of
from baton_serve.services.router.text.text_output import TextDelta
from tests.unit.router.conftest import Router, Serve

END = 0
VOCAB = 4


class Model:
    """A distribution over VOCAB tokens after every text."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, text: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{self._seed} {text}")
        weights = [draw.random() + 0.01 for _ in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def answer(self, text: tuple[int, ...]) -> TokenLogprobs:
        order = sorted(enumerate(self(text)), key=lambda one: -one[1])
        top = [TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(order, 1)]
        return TokenLogprobs(top[0], top)


def searched(model: Model, count: int, **rules: Any) -> list[Beam]:
    search = BeamSearch(BeamRules(**{"ends": frozenset({END}), **rules}), num_prompt_tokens=3)
    while not search.is_over:
        search.advance([model.answer(tuple(beam.token_ids)) for beam in search.running])
    return search.best(count)


def every_answer(model: Model, max_tokens: int, length_penalty: float) -> list[tuple[float, list[int]]]:
    found: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        for text in product(range(VOCAB), repeat=length):
            ends = [token == END for token in text]
            if any(ends[:-1]) or not (ends[-1] or length == max_tokens):
                continue
            total = sum(model(text[:i])[token] for i, token in enumerate(text))
            found.append((total / (3 + length - ends[-1]) ** length_penalty, list(text)))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_wide_enough_it_finds_the_best_of_all_answers(length_penalty: float) -> None:
    for seed in range(5):
        model = Model(seed)
        found = searched(model, 3, width=VOCAB**3, max_tokens=4, length_penalty=length_penalty)
        expected = every_answer(model, 4, length_penalty)[:3]
        assert [beam.token_ids for beam in found] == [text for _, text in expected]
        assert [beam.score for beam in found] == pytest.approx([score for score, _ in expected])
        assert [len(beam.steps) for beam in found] == [len(beam.token_ids) for beam in found]


def test_one_beam_is_greedy() -> None:
    model = Model(7)
    (beam,) = searched(model, 1, width=1, max_tokens=6, ends=frozenset())
    text: tuple[int, ...] = ()
    for _ in range(6):
        text = (*text, max(range(VOCAB), key=model(text).__getitem__))
    assert tuple(beam.token_ids) == text
    assert beam.finish_reason == "length"


def steps_of(early_stopping: EarlyStopping, length_penalty: float) -> int:
    """An end that is likely at once, and a running beam that loses a little with each token."""
    end, going = TokenLogprob(END, -0.1, 1), TokenLogprob(1, -0.2, 2)
    rules = BeamRules(
        width=1, max_tokens=9, ends=frozenset({END}), early_stopping=early_stopping, length_penalty=length_penalty
    )
    search = BeamSearch(rules, num_prompt_tokens=1)
    steps = 0
    while not search.is_over:
        steps += 1
        search.advance([TokenLogprobs(end, [end, going] if steps == 1 else [going])])
    return steps


def test_early_stopping_says_how_long_to_hope_for_better() -> None:
    assert [steps_of(early, 1.0) for early in (True, False, "never")] == [1, 1, 5]
    assert [steps_of(early, 3.0) for early in (True, False, "never")] == [1, 9, 9]
    assert [steps_of(early, 0.0) for early in (True, False, "never")] == [1, 1, 1]


def test_best_of_keeps_the_most_likely() -> None:
    def ranked(text: str, *logprobs: float) -> RankedText:
        found = RankedText()
        found.add(TextDelta(text, [], [TokenLogprobs(TokenLogprob(0, value, 1), []) for value in logprobs]))
        return found

    sequences = [ranked("a", -1.0, -1.0), ranked("b", -0.5), ranked("c", -0.2, -0.3), ranked("d", -3.0)]
    assert [one.whole().text for one in best_of(sequences, 3)] == ["b", "c", "a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"best_of": 4}, {"best_of": 4, "use_beam_search": True}])
def test_the_logprobs_of_all_sequences_count_from_which_the_answer_is_chosen(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], stream: bool
) -> None:
    monkeypatch.setattr("baton_serve.services.router.text.sampling_params.MAX_LOGPROBS", 200)

    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 20, "seed": 0, "ignore_eos": True, **more}
        # 4 sequences of 20 tokens, with 3 logprobs each.
        refused = await router.http.post("/v1/completions", json={**body, "logprobs": 2, "stream": stream})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "too_many_values"
        monkeypatch.setattr("baton_serve.services.router.text.sampling_params.MAX_LOGPROBS", 20)
        # The logprobs that only rank the sequences are not kept.
        assert (await router.http.post("/v1/completions", json={**body, "stream": stream})).status_code == 200

    serve(scenario)


def test_a_long_search_keeps_as_many_finished_beams_as_can_be_answers() -> None:
    rules = BeamRules(width=2, max_tokens=50, ends=frozenset({END}), early_stopping="never", length_penalty=9.0)
    search = BeamSearch(rules, num_prompt_tokens=1)
    while not search.is_over:
        top = [TokenLogprob(END, -0.9, 1), TokenLogprob(1, -0.1, 2), TokenLogprob(2, -0.2, 3)]
        search.advance([TokenLogprobs(top[0], top)] * len(search.running))
        assert len(search._finished) <= 2 * rules.width
    assert [len(beam.token_ids) for beam in search.best(2)] == [50, 50]


def texts(chunks: list[dict[str, Any]], count: int) -> list[str]:
    mine: list[list[str]] = [[] for _ in range(count)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine[choice["index"]].append(choice["text"])
    return ["".join(one) for one in mine]


def test_best_of_writes_more_than_it_answers(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": ["hello", "world"], "n": 2, "best_of": 4, "max_tokens": 3}
        answer = await router.complete(**body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 2 * 4 * 3
        assert {choice["logprobs"] is None for choice in answer["choices"]} == {True}
        assert router.fakes["prefill-0"].assignments()[0].work.sequences == [0, 1, 2, 3]
        chunks = await router.stream("/v1/completions", **body)
        assert texts(chunks, 4) == [choice["text"] for choice in answer["choices"]]

    serve(scenario)


def test_beams_are_asked_for_step_by_step_and_answered_at_once(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1}
        answer = await router.complete(**body)
        # The fake model finds token t with -0.5, t + 1 with -1.5 and so on, whatever came before.
        assert answer["choices"][0]["text"] == "aaa"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        assert answer["choices"][1]["logprobs"]["token_logprobs"] != [-0.5] * 3
        assert answer["usage"]["completion_tokens"] == 6
        asked = [m.work for m in router.fakes["prefill-0"].assignments()]
        assert len(asked) == 1 + 2 + 2
        assert {(work.sampling.max_tokens, work.sampling.logprobs) for work in asked} == {(1, 4)}
        chunks = await router.stream("/v1/completions", **body)
        assert texts(chunks, 2) == [choice["text"] for choice in answer["choices"]]

    serve(scenario)


def test_beams_of_a_request_without_a_limit_do_not_fill_the_context(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello", use_beam_search=True)
        assert answer["usage"]["completion_tokens"] == 7

    serve(scenario, beam_search_max_tokens=7)


def test_a_chat_may_be_answered_by_beams_and_an_end_is_not_shown(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "use_beam_search": True, "best_of": 2, "seed": 0}
        answer = await router.http.post("/v1/chat/completions", json={**body, "max_tokens": 4, "stop_token_ids": [98]})
        (choice,) = answer.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) in (("stop", 98), ("length", None))
        assert "b" not in choice["message"]["content"]

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "guided_regex": "x"}, "use_beam_search"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"best_of": 2, "n": 3}, "best_of"),
    ],
)
def test_what_beams_cannot_do_is_refused(serve: Serve, body: dict[str, Any], param: str) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post("/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    serve(scenario)
