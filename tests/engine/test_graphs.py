"""Decode steps, and prompts, through the static inputs of captured graphs give the tokens of transformers.generate.

On the CPU a graph is stood in for by calling the recorded function again; on a device the real ones are captured when
an engine starts, so every other test of this folder goes through them too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine, FailedRequest, StepResult, device
from baton_serve.engine.execution import prompt_graphs
from baton_serve.engine.execution.decode_graphs import DecodeGraphs
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.forward import Forward
from tests.devices import DEVICE
from tests.engine.conftest import FakeCapture, FakeGraph, References
from tests.engine.driving import hand_over, hand_over_all, make_engine, make_work, run

pytestmark = pytest.mark.slow
FAMILIES = pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "qwen3_moe", "gpt_oss", "gemma3", "cohere2", "glm4_moe"]
)
OF_LOGITS = pytest.mark.parametrize("family", ["llama", "gpt_oss"])
"""For tests of what graphs do with logits, whatever the layers are."""


def ask(engine: Engine, prompts: list[list[int]], attempt: int = 0) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, f"{attempt}-{number}", prompt))
    answers = run(engine)
    return [answers[f"{attempt}-{number}", 0] for number in range(len(prompts))]


@FAMILIES
def test_padded_batches_give_the_right_tokens(family: str, references: References, captured: FakeCapture) -> None:
    reference = references(family)
    with make_engine(reference.folder, max_num_seqs=16, max_num_batched_tokens=512) as engine:
        decodes, prompts = captured.graphs[:5], captured.graphs[5:]  # of 16, 8, 4, 2 and 1; of 512 to 16 tokens
        assert len(prompts) == 2 * len(prompt_graphs.token_buckets(512))
        assert ask(engine, reference.prompts) == reference.answers
        assert ask(engine, reference.prompts[:3], 1) == reference.answers[:3]
        assert sum(graph.replays for graph in decodes) > 10
        assert sum(graph.replays for graph in prompts) > 1


@FAMILIES
def test_prompts_in_chunks_beside_sequences_that_write(
    family: str, references: References, captured: FakeCapture
) -> None:
    """Some tokens of a step are then known to the device alone."""
    reference = references(family)
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "async_scheduling": True}
    with make_engine(reference.folder, **settings) as engine:
        prompts = captured.graphs[4:]  # after the decodes of 8, 4, 2 and 1; of 24 and 16 tokens
        beside, alone = prompts[::2], prompts[1::2]
        assert ask(engine, reference.prompts) == reference.answers
        assert sum(graph.replays for graph in alone) > 0 and sum(graph.replays for graph in beside) > 5


@FAMILIES
def test_a_sequence_that_outgrows_its_block_and_a_slot_used_again(
    family: str, references: References, captured: FakeCapture
) -> None:
    reference = references(family)
    with make_engine(reference.folder, block_size=8, max_num_seqs=2) as engine:
        assert ask(engine, reference.prompts) == reference.answers


@FAMILIES
def test_after_a_handoff(family: str, references: References, captured: FakeCapture) -> None:
    reference = references(family)
    with make_engine(reference.folder) as source, make_engine(reference.folder) as sink:
        alone = make_work(source, "alone", reference.prompts[2])
        assert hand_over(source, sink, alone) == {("alone", 0): reference.answers[2]}
        works = [make_work(source, str(number), prompt) for number, prompt in enumerate(reference.prompts)]
        answers = hand_over_all(source, sink, works)
        assert [answers[work.request_id, 0] for work in works] == reference.answers


@FAMILIES
def test_sampled_tokens_do_not_depend_on_the_graph(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch, captured: FakeCapture
) -> None:
    reference = references(family)
    work = partial(make_work, temperature=0.8, top_p=0.9, seed=11, logprobs=2)
    found = []
    for enforce_eager in (True, False):
        with make_engine(reference.folder, enforce_eager=enforce_eager) as engine:
            for number, prompt in enumerate(reference.prompts[:3]):
                grammar = "start: /[a-z ]{3,30}/" if number == 1 else None
                engine.add(work(engine, str(number), prompt, grammar=grammar))
            found.append(run(engine))
    assert found[0] == found[1]


@OF_LOGITS
@pytest.mark.parametrize("is_async", [False, True], ids=["step by step", "ahead"])
def test_a_request_whose_logits_are_no_numbers_fails_alone(
    family: str, references: References, request: pytest.FixtureRequest, is_async: bool
) -> None:
    if DEVICE == "cpu":
        request.getfixturevalue("captured")
    reference, failed = references(family), list[FailedRequest]()
    with make_engine(reference.folder, async_scheduling=is_async, enable_prefix_caching=False) as engine:
        engine.add(make_work(engine, "good", reference.prompts[1]))
        engine.add(make_work(engine, "bad", reference.prompts[3], ignore_eos=True))

        def spoil(result: StepResult) -> None:
            failed.extend(result.failed)
            bad = engine._table.requests.get(RequestId("bad"))
            if bad is not None and bad.sequences[0].num_generated == 3:
                engine.kv.tensor[bad.sequences[0].blocks[-1]] = float("nan")

        answers = run(engine, spoil)
    assert answers["good", 0] == reference.answers[1]
    assert 3 <= len(answers["bad", 0]) < 6 and answers["bad", 0] == reference.answers[3][: len(answers["bad", 0])]
    assert [(one.request_id, one.code) for one in failed] == [("bad", "internal")]
    assert "NaN logits" in failed[0].message


class Halves:
    """A forward whose logits lie in two halves, as with two ranks."""

    max_rows = 64
    is_capturable = True
    adapter_slots = None

    def __init__(self, forward: Forward, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_gathered = 0
        self._forward = forward
        self._others = torch.zeros(0)

    @property
    def parts(self) -> "Halves":
        return self

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        return self._forward(inputs, layers)

    def compute(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        part, self._others = torch.split(self._forward(inputs, layers), self.vocab_size // 2, dim=1)
        return part

    def largest(self, part: Tensor, out: Tensor) -> None:
        out.copy_(torch.cat((part, self._others), dim=1).argmax(dim=1))

    def whole(self, part: Tensor) -> Tensor:
        self.num_gathered += 1
        return torch.cat((part, self._others[: len(part)]), dim=1)


@OF_LOGITS
def test_logits_of_several_ranks_are_put_together_for_who_asks(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch, captured: FakeCapture
) -> None:
    reference = references(family)
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "logprobs": 2}
    with make_engine(reference.folder, max_num_seqs=4) as whole:
        whole.add(make_work(whole, "sampled", reference.prompts[0], **sampling))
        expected = run(whole)["sampled", 0]
    made: list[Halves] = []

    def halved(forward: Forward, *arguments: Any) -> DecodeGraphs:
        made.append(Halves(forward, whole.vocab_size))
        return DecodeGraphs(made[-1], *arguments)

    monkeypatch.setattr("baton_serve.engine.execution.executor.DecodeGraphs", halved)
    with make_engine(reference.folder, max_num_seqs=4) as engine:
        assert ask(engine, reference.prompts) == reference.answers
        assert sum(halves.num_gathered for halves in made) == 0
        engine.add(make_work(engine, "sampled", reference.prompts[0], **sampling))
        assert run(engine)["sampled", 0] == expected
        assert made[-1].num_gathered > 5


@OF_LOGITS
def test_a_device_that_cannot_capture_decodes_without_graphs(
    family: str,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(call: Callable[[], None]) -> FakeGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "has_graphs", lambda _: True)
    monkeypatch.setattr(device, "Capturing", lambda _: refuse)
    reference = references(family)
    with make_engine(reference.folder) as engine:
        assert ask(engine, reference.prompts[:2]) == reference.answers[:2]
    assert [r.message for r in caplog.records if "cannot capture graphs" in r.message]
