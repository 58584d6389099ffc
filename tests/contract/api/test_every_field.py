"""Check that no field of the OpenAPI document is accepted and ignored: a value other than its default changes the
messages to instances or the answer, or is an error. NO_EFFECT lists the fields without effect by design, and each
field has a row with a test in docs/reference/api.md.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tokenizers import processors

from baton_serve.contracts.messages import Pool, Work
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.router.api.messages import schema as messages_schema
from baton_serve.services.router.api.responses import schema as responses_schema
from baton_serve.services.router.protocol.request_parsing import UNSUPPORTED
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_compatibility import DOCUMENT
from tests.unit.router.tokenizers_for_tests import TEMPLATE, byte_level, write_folder

FLAGS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1",
    "trust_request_chat_template": True,
}
SHOWN = "{{ tools }}{{ documents }}{{ mark }}{{ reasoning_effort }}{{ enable_thinking }}{{ verbosity }}"
HELLO = [{"role": "user", "content": "hello"}]
BEGUN = {"messages": [*HELLO, {"role": "assistant", "content": "he"}], "add_generation_prompt": False}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 6, "stop_token_ids": [98]}
SPECIAL = int(byte_level().token_to_id("<|im_start|>") or 0)


class Given(NamedTuple):
    """A value that asks for something, beside what it needs to have a meaning."""

    value: Any
    beside: dict[str, Any] = {}  # noqa: RUF012 - never changed


SAMPLING: dict[str, Any] = {
    "model": "nobody",
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "stop": "a",
    "ignore_eos": True,
    "min_tokens": 2,
    "seed": 1,
    "priority": 3,
    "cache_salt": "salt",
    "request_id": "mine",
}
GENERATION: dict[str, Any] = SAMPLING | {
    "stream_options": Given({"include_usage": True}, {"stream": True}),
    "n": 2,
    "best_of": 3,
    "use_beam_search": True,
    "length_penalty": Given(-3.0, BEAMS),
    "early_stopping": Given(True, BEAMS),
    "max_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"97": 1.0},
    "allowed_token_ids": [97],
    "stop_token_ids": [97],
    "bad_words": ["b"],
    "include_stop_str_in_output": Given(True, {"stop": "a"}),
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "logprob_token_ids": Given([97], {"logprobs": 1}),
    "truncate_prompt_tokens": 2,
    "truncation_side": Given("right", {"truncate_prompt_tokens": 2}),
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_decoding_backend": "nobody's",
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "guided_whitespace_pattern": Given("x?", {"guided_json": {"type": "object"}}),
}
TEMPLATED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "other"}],
    "add_special_tokens": True,
    "add_generation_prompt": False,
    "continue_final_message": Given(True, BEGUN),
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"mark": "!"},
    "mm_processor_kwargs": {"fps": 1},
}
INPUTS: dict[str, Any] = {
    "input": "other",
    "messages": Given([{"role": "user", "content": "other"}], {"input": None, "messages": HELLO}),
    "add_special_tokens": False,
    "add_generation_prompt": Given(True, {"input": None, "messages": HELLO}),
    "continue_final_message": Given(True, {"input": None, **BEGUN}),
    "chat_template": Given("{{ messages[0].content }}", {"input": None, "messages": HELLO}),
    "chat_template_kwargs": Given({"mark": "!"}, {"input": None, "messages": HELLO}),
}
ANY_POOLING: dict[str, Any] = {
    "mm_processor_kwargs": {"fps": 1},
    "model": "nobody",
    "truncate_prompt_tokens": 2,
    "truncation_side": Given("left", {"truncate_prompt_tokens": 3}),
    "priority": 3,
    "request_id": "mine",
}
EMBEDDING: dict[str, Any] = INPUTS | ANY_POOLING | {"encoding_format": "base64", "dimensions": 2, "normalize": False}
ANY_PAIRS: dict[str, Any] = ANY_POOLING | {"truncation_side": Given("left", {"truncate_prompt_tokens": 4})}
SCORE: dict[str, Any] = ANY_PAIRS | {"text_1": "other", "text_2": "other", "activation": False}
RERANK: dict[str, Any] = ANY_PAIRS | {
    "query": "other",
    "documents": ["other"],
    "top_n": 1,
    "return_documents": False,
    "activation": False,
    "texts": Given(["other"], {"documents": None, "texts": ["ab", "a"]}),
    "return_text": Given(True, {"documents": None, "texts": ["ab", "a"]}),
    "raw_scores": True,
    "truncation_direction": Given("Left", {"truncate_prompt_tokens": 4}),
}
CLAUDE_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
COUNTED: dict[str, Any] = {
    "model": "nobody",
    "messages": [{"role": "user", "content": "other"}],
    "system": "be brief",
    "tools": CLAUDE_TOOLS,
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "high"},
}
CLAUDE_EDITS = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
CLAUDE_FORM = {"type": "json_schema", "schema": {"type": "object"}}

COUNTED_CHATS = ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")

FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": GENERATION
    | TEMPLATED
    | {
        "echo": Given(True, BEGUN | {"continue_final_message": True}),
        "return_tokens_as_token_ids": Given(True, {"logprobs": True}),
        "return_token_ids": Given(True),
        "max_completion_tokens": 2,
        "logprob_token_ids": Given([97], {"logprobs": True}),
        "logprobs": True,
        "top_logprobs": Given(1, {"logprobs": True}),
        "tools": Given(TOOLS, {"tool_choice": "none"}),
        "tool_choice": Given("required", {"tools": TOOLS}),
        "parallel_tool_calls": Given(False, {"tools": TOOLS, "tool_choice": "required"}),
        "include_reasoning": False,
        "documents": [{"title": "a", "text": "b"}],
        "reasoning_effort": "high",
        "verbosity": "low",
    },
    "/v1/completions": GENERATION
    | {
        "prompt": "other",
        "echo": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": Given(True, {"logprobs": 1}),
        "return_token_ids": Given(True),
        "add_special_tokens": False,
    },
    **dict.fromkeys(
        COUNTED_CHATS,
        TEMPLATED
        | {
            "model": "nobody",
            "tools": TOOLS,
            "documents": [{"title": "a", "text": "b"}],
            "reasoning_effort": "high",
            "verbosity": "low",
        },
    ),
    "/tokenize": TEMPLATED
    | {
        "model": "nobody",
        "prompt": Given("other", {"prompt": "hello", "messages": None}),
        "return_token_strs": True,
        "tools": TOOLS,
    },
    "/detokenize": {"model": "nobody", "tokens": [98]},
    "/v1/responses": SAMPLING
    | {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"97": 1.0},
        "include_stop_str_in_output": Given(True, {"stop": "a"}),
        "skip_special_tokens": False,
        "structured_outputs": {"regex": "a"},
        "input": "other",
        "instructions": "be brief",
        "max_output_tokens": 2,
        "tools": Given([{"type": "function", **FUNCTION}], {"tool_choice": "none"}),
        "tool_choice": Given("required", {"tools": [{"type": "function", **FUNCTION}]}),
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_object"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_tool_calls": 3,
        "truncation": "auto",
        "metadata": {"a": "b"},
        "user": "somebody",
        "chat_template_kwargs": {"mark": "!"},
        "store": False,
        "background": True,
        "previous_response_id": "resp_1",
    },
    "/v1/responses/input_tokens": {
        "previous_response_id": "resp_1",
        "model": "nobody",
        "input": "other",
        "instructions": "be brief",
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "high"},
        "chat_template_kwargs": {"mark": "!"},
    },
    "/v1/messages": COUNTED
    | {
        "max_tokens": 2,
        "stream": True,
        "stop_sequences": ["a"],
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "tool_choice": Given({"type": "any"}, {"tools": CLAUDE_TOOLS}),
        "output_format": CLAUDE_FORM,
    },
    "/v1/messages/count_tokens": COUNTED,
    "/v1/embeddings": EMBEDDING,
    "/pooling": EMBEDDING | {"task": "token_embed", "activation": False},
    "/classify": INPUTS | ANY_POOLING | {"activation": False},
    **dict.fromkeys(("/score", "/v1/score"), SCORE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
}
USER = {"user": "somebody"}
BY_DECODER = {"spaces_between_special_tokens"}
"""Only decoders that put spaces there know it: see test_detokenizer.py."""
NO_EFFECT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "spaces_between_special_tokens": False,
        "user": "somebody",
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "a"},
    },
    "/v1/completions": {"spaces_between_special_tokens": False, "user": "somebody", "metadata": {"a": "b"}},
    "/v1/responses": {
        "safety_identifier": "somebody",
        "prompt_cache_key": "mine",
        "stream_options": {"include_obfuscation": False},
    },
    "/v1/responses/input_tokens": {
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {"metadata": {"user_id": "somebody"}, "service_tier": "standard_only", **CLAUDE_EDITS},
    "/v1/messages/count_tokens": {"tool_choice": {"type": "none"}, "output_format": CLAUDE_FORM, **CLAUDE_EDITS},
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"), USER),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), USER | {"truncate": True}),
}
NO_EFFECT |= dict.fromkeys(
    COUNTED_CHATS,
    NO_EFFECT["/v1/chat/completions"]
    | {
        name: given.value if isinstance(given, Given) else given
        for name, given in FIELDS["/v1/chat/completions"].items()
        if name not in FIELDS[COUNTED_CHATS[0]]
    },
)
"""These fields identify the caller, or request what is the case anyway; docs/reference/api.md says so."""

UNSERVED: dict[str, set[str]] = {
    "/v1/responses": set(responses_schema.UNSERVED),
    "/v1/responses/input_tokens": set(responses_schema.UNSERVED),
    "/v1/messages": set(messages_schema.UNSERVED),
    "/v1/messages/count_tokens": set(messages_schema.UNSERVED),
}
"""Beside what no path serves."""

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "seed": 0, "max_tokens": 5},
    **{path: {"messages": HELLO} for path in COUNTED_CHATS},
    "/v1/completions": {"prompt": "hello world", "seed": 0, "max_tokens": 5},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [97]},
    "/v1/responses": {"input": "hello", "seed": 0, "max_output_tokens": 5},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO},
    **{path: {"input": "hello world"} for path in ("/v1/embeddings", "/pooling", "/classify")},
    **{path: {"text_1": "hello", "text_2": "ab"} for path in ("/score", "/v1/score")},
    **{path: {"query": "hello", "documents": ["ab", "a"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
ELSEWHERE = {"/invocations", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""The first is any of the others; those of adapters change the cluster: see test_adapters.py."""

EMBEDS = PoolingProfile(tasks=["embed", "token_embed"], dimensions=3, is_matryoshka=True)
SCORES = PoolingProfile(tasks=["classify"], labels=["LABEL_0"])
GROUPS = [
    (
        [
            path
            for path in FIELDS
            if path.startswith(("/v1/chat", "/v1/comp", "/v1/resp", "/v1/mess")) and path not in COUNTED_CHATS
        ],
        None,
    ),
    (["/tokenize", "/detokenize", *COUNTED_CHATS], None),
    (["/v1/embeddings", "/pooling"], EMBEDS),
    (["/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"], SCORES),
]


def make_folder(folder: Path) -> Path:
    """Its tokenizer adds a token, and its template shows all that may be said."""
    tokenizer = byte_level()
    first = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[first]
    )
    return write_folder(folder, tokenizer, chat_template=TEMPLATE + SHOWN)


def make_model(folder: Path) -> ServedModel:
    return ServedModel.from_settings(RouterSettings(model=str(folder), **FLAGS))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("fields") / "tiny")


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return make_model(model_folder)


def writes(work: Work, sequence: int, position: int) -> int:
    """Letters, and amid them two special tokens."""
    return SPECIAL if position in (1, 2) else ord("a") + (sequence + 3 * position) % 5


async def seen(router: Router, path: str, body: dict[str, Any]) -> str:
    """Return the effects of a request: the messages to the instances and the answer, without IDs and times."""
    for fake in router.fakes.instances.values():
        fake.received.clear()
    answer = await router.http.post(path, json={name: value for name, value in body.items() if value is not None})
    works = [message.work for fake in router.fakes.instances.values() for message in fake.assignments()]
    pools = [m for fake in router.fakes.instances.values() for m in fake.received if isinstance(m, Pool)]
    text = f"{answer.status_code} {answer.text} {msgspec.json.encode([works, pools]).decode()}"
    text = re.sub(r"(?<=[-_])([0-9a-f]{12,}|[0-9a-f]{8}~\d+)", "", text)
    text = re.sub(r'"(created|created_at|completed_at|deadline\w*|timeout_s)": ?[\d.]+', "", text)
    return text if "seed" in body else re.sub(r'"seed": ?\d+', "", text)


@pytest.mark.parametrize(("paths", "pooling"), GROUPS)
def test_no_field_is_accepted_and_ignored(serve: Serve, paths: list[str], pooling: PoolingProfile | None) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes
        ignored: list[str] = []
        for path in paths:
            assert await seen(router, path, BASES[path]) == await seen(router, path, BASES[path]), path
            for name, stated in FIELDS[path].items():
                given = stated if isinstance(stated, Given) else Given(stated)
                base = BASES[path] | given.beside
                without = await seen(router, path, base)
                assert without.startswith("200 "), f"{path} {name}: {without}"
                if await seen(router, path, base | {name: given.value}) == without:
                    ignored.append(f"{path} {name}")
            without = await seen(router, path, BASES[path])
            assert await seen(router, path, BASES[path] | NO_EFFECT.get(path, {})) == without, path
        assert not ignored

    serve(scenario, pooling=pooling, **FLAGS, **({} if pooling is None else {"decode": 0}))


def test_every_field_of_the_document_is_among_them_and_has_a_row_with_a_test(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        document = (await router.http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        bodies: dict[str, str] = {}
        for path, operations in document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            # Forms with files have tests of their own.
            if "application/json" in content:
                bodies[path] = content["application/json"]["schema"]["$ref"]
        assert bodies.keys() == FIELDS.keys() | ELSEWHERE
        unlisted: list[str] = []
        for path in FIELDS:
            declared = schemas[bodies[path].rsplit("/", 1)[1]]["properties"].keys()
            assert declared == FIELDS[path].keys() | NO_EFFECT.get(path, {}).keys(), path
            unlisted += [f"{path} {name}" for name in declared if name not in documented()]
        assert not unlisted

    serve(scenario)


@pytest.mark.parametrize(("paths", "pooling"), GROUPS)
def test_what_is_not_served_is_refused_by_name_everywhere(
    serve: Serve, paths: list[str], pooling: PoolingProfile | None
) -> None:
    """Other names are ignored, with a line in the log."""

    async def scenario(router: Router) -> None:
        for path in paths:
            known = FIELDS[path].keys() | NO_EFFECT.get(path, {}).keys()
            for name in (UNSUPPORTED.keys() | UNSERVED.get(path, set())) - known:
                answer = await router.http.post(path, json=BASES[path] | {name: {"asks": "something"}})
                assert answer.status_code == 400 and name in answer.json()["error"]["message"], f"{path} {name}"
            answer = await router.http.post(path, json=BASES[path] | {"nobody_knows_this": 1})
            assert answer.status_code == 200, path

    serve(scenario, pooling=pooling, **FLAGS, **({} if pooling is None else {"decode": 0}))


def documented() -> set[str]:
    """Names in code in the first column of a row that names a test."""
    names: set[str] = set()
    for row in DOCUMENT.splitlines():
        cells = row.strip("| ").split(" | ")
        if row.startswith("| ") and "test_" in cells[-1]:
            names |= {word for code in re.findall(r"`([^`]*)`", cells[0]) for word in re.findall(r"\w+", code)}
    return names


CATALOGUE = """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty early_stopping stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens allowed_token_ids prompt_logprobs echo add_generation_prompt add_special_tokens documents
    chat_template chat_template_kwargs response_format guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern
""".split()
"""Extra parameters of vLLM that the schemas must have."""
ONLY_CHATS = {"add_generation_prompt", "documents", "chat_template", "chat_template_kwargs"}


def test_vllms_extra_parameters_are_among_them() -> None:
    catalogue = set(CATALOGUE) - BY_DECODER
    assert catalogue <= FIELDS["/v1/chat/completions"].keys() & documented()
    assert catalogue - ONLY_CHATS <= FIELDS["/v1/completions"].keys()
