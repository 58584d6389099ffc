"""The bundled model answers fresh questions, and a lost block shows: its answer is then wrong.

Plain transformers in float32; the same model through the whole cluster is the demo's own business.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from baton_serve.services.local.demo import SEEDS, make_demo_prompt
from tools.demo_model.batches import Layout
from tools.demo_model.corpus import encode, lookup
from tools.demo_model.evaluation import TOOL_KINDS, Judge, ToolKind, tool_question
from tools.demo_model.lookups import Fact
from tools.demo_model.network import TrainingForward
from tools.demo_model.tokenization import ROLES, WordEncoder
from tools.demo_model.tool_chats import Message, tool_exchange, tools_block
from tools.demo_model.tool_specs import offer_tools

MODEL = Path(__file__).resolve().parents[2] / "services" / "local" / "demo_model"
BLOCK_TOKENS = 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(MODEL, torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder(judge: Judge) -> WordEncoder:
    return WordEncoder(judge.tokenizer.backend_tokenizer)


@pytest.fixture(scope="module")
def fresh(encoder: WordEncoder) -> list[tuple[list[Message], Fact]]:
    """Twenty questions about passages of 1,000 tokens, from a random stream no training used."""
    rng = Random("tests/fresh")
    return [lookup(rng, encoder, num_tokens=1000) for _ in range(20)]


def test_19_of_20_fresh_lookups_at_1000_tokens_are_right_and_end(
    judge: Judge, fresh: list[tuple[list[Message], Fact]]
) -> None:
    replies = judge.reply([messages[:-1] for messages, _ in fresh])
    right = [reply == messages[-1][1] + "<|end|>" for reply, (messages, _) in zip(replies, fresh, strict=True)]
    assert sum(right) >= 19


def test_both_questions_of_make_demo_are_right_with_each_of_its_prompts(judge: Judge) -> None:
    prompts = [make_demo_prompt(Random(seed)) for seed in SEEDS]
    asked = [(prompt, fact) for prompt in prompts for fact in prompt.asked]
    replies = judge.reply([[("user", f"{prompt.text} {fact.question}")] for prompt, fact in asked])
    assert [reply for reply, (_, fact) in zip(replies, asked, strict=True) if fact.code not in reply] == []


def test_chat_and_sums(judge: Judge) -> None:
    asked = ["Who are you?", "What is 347 + 285?", "What is the capital of France?", "what is 7 times 8"]
    who, total, capital, product = judge.reply([[("user", text)] for text in asked])
    assert "Baton" in who
    assert total == "347 + 285 = 632.<|end|>"
    assert capital == "The capital of France is Paris.<|end|>"
    assert product == "7 * 8 = 56.<|end|>"


def test_a_name_is_remembered_over_turns(judge: Judge) -> None:
    reported: list[Message] = [("user", "My name is Anna."), ("assistant", "Nice to meet you, Anna!")]
    assert judge.reply([[*reported, ("user", "What is my name?")]]) == ["Your name is Anna.<|end|>"]


def test_without_the_sentence_that_states_it_the_answer_is_wrong(
    judge: Judge, fresh: list[tuple[list[Message], Fact]]
) -> None:
    robbed = [
        ([(role, text.replace(fact.value, "nobody knows")) for role, text in messages[:-1]], fact)
        for messages, fact in fresh[:3]
    ]
    replies = judge.reply([messages for messages, _ in robbed])
    assert not any(fact.value in reply for reply, (_, fact) in zip(replies, robbed, strict=True))


def test_zeroing_the_block_that_holds_the_fact_makes_the_answer_wrong(
    judge: Judge, encoder: WordEncoder, fresh: list[tuple[list[Message], Fact]]
) -> None:
    for messages, fact in fresh[:3]:
        prompt = encode(encoder, messages[:-1])[0] + [encoder.ids[ROLES["assistant"]]]
        first, last = _position(prompt, [encoder.encode(fact.value), encoder.encode(f" {fact.value}")])
        lost = range(first // BLOCK_TOKENS, last // BLOCK_TOKENS + 1)
        assert fact.value not in _answer_with_lost_blocks(judge, prompt, lost=lost)


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_19_of_20_fresh_questions_with_tools_are_right(judge: Judge, kind: ToolKind) -> None:
    rng = Random(f"tests/{kind}")
    wrong = judge.mistakes([tool_question(rng, kind) for _ in range(20)])
    assert len(wrong) <= 1, wrong


def test_the_chat_template_gives_the_tokens_of_training_for_tools(judge: Judge, encoder: WordEncoder) -> None:
    for seed in range(40):
        rng = Random(seed)
        tools = offer_tools(rng, rng.randint(1, 4))
        exchange = tool_exchange(rng, tools, is_parallel=seed % 2 == 0)
        calls = [{"name": call.name, "arguments": call.arguments} for call in exchange.request.calls]
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": exchange.request.text},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]},
            *({"role": "tool", "content": content} for content in exchange.results),
            {"role": "assistant", "content": exchange.answer},
        ]
        system = [{"role": "system", "content": "Be brief."}] if seed % 3 == 0 else []
        functions = [{"type": "function", "function": dict(tool.function)} for tool in tools]
        ids = judge.tokenizer.apply_chat_template([*system, *chat], tools=functions, return_dict=True)["input_ids"]
        offered = tools_block([tool.function for tool in tools])
        block = f"Be brief.\n\n{offered}" if system else offered
        assert ids == encode(encoder, [("system", block), *exchange.messages()])[0]


def test_the_chat_template_gives_the_tokens_of_training(
    judge: Judge, encoder: WordEncoder, fresh: list[tuple[list[Message], Fact]]
) -> None:
    for messages, _ in fresh[:3]:
        chat = [{"role": role, "content": text} for role, text in messages]
        ids = judge.tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        assert ids == encode(encoder, messages)[0]


def test_the_training_forward_equals_transformers(judge: Judge) -> None:
    torch.manual_seed(0)
    layout = Layout(((16, 3), (64, 2)))
    tokens = torch.randint(6, 2048, (layout.num_tokens,))
    forward = TrainingForward(judge.model, compiled=False)
    with torch.no_grad():
        losses = forward.token_losses(forward.hidden(tokens, layout), tokens)
        rows = [judge.model(part).logits for part in (tokens[:48].view(3, 16), tokens[48:].view(2, 64))]
        flat = torch.cat([row.flatten(0, 1) for row in rows])
        expected = torch.nn.functional.cross_entropy(flat, tokens, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def _position(tokens: list[int], forms: list[list[int]]) -> tuple[int, int]:
    """Return the first and the last position of the part that has one of these forms: a word after a space may be other
    tokens than the word alone."""
    spans = ((i, i + len(part)) for part in forms for i in range(len(tokens)) if tokens[i : i + len(part)] == part)
    first, end = next(spans)
    return first, end - 1


def _answer_with_lost_blocks(judge: Judge, prompt: list[int], *, lost: range) -> str:
    """Greedy decoding after a prefill whose KV of `lost` blocks arrived as zeros."""
    # transformers 5.24 renamed `past_key_values` to `cache`, in the output and in the argument.
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        output = judge.model(tokens[:, :-1], use_cache=True)
        name = "cache" if "cache" in output else "past_key_values"
        cache: Any = output[name]
        for layer in cache.layers:
            for block in lost:
                layer.keys[:, :, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = 0
                layer.values[:, :, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = 0
        ids = judge.model.generate(tokens, **{name: cache}, do_sample=False, max_new_tokens=30)
    return str(judge.tokenizer.decode(ids[0, len(prompt) :]))
