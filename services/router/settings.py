"""Settings of the router process. Flags carry vLLM's names where vLLM has them.

Read once in `main` by `services.common.settings.configuration`; nobody changes them afterwards.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.services.router.placement.policy import PolicyName
from baton_serve.services.router.placement.prefix_pull import PullPolicy
from baton_serve.services.router.protocol.image_limits import ImageLimits, images_per_prompt

ToolCallParser = Literal["deepseek_v3", "hermes", "llama3_json", "mistral", "openai", "pythonic", "qwen3_coder"]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "gpt_oss", "mistral", "qwen3"]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One field, one flag: `max_model_len` is `--max-model-len`."""

    model: Annotated[
        str,
        Meta(
            description="folder with tokenizer.json, tokenizer_config.json, config.json",
            min_length=1,
            extra={"group": "model"},
        ),
    ]
    served_model_name: Annotated[
        list[str],
        Meta(description="names under which clients may ask for the model; the first is reported (default: the model)"),
    ] = []
    tokenizer: Annotated[str | None, Meta(description="folder of the tokenizer, when it is not the model's")] = None
    models: Annotated[
        dict[str, object],
        Meta(description='further models behind this router, by name: {"small": {"model": "/models/small"}}'),
    ] = {}
    host: Annotated[str, Meta(description="address to listen on", min_length=1, extra={"group": "server"})] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(description="port to listen on", ge=0, le=65535)] = 8000
    workers: Annotated[
        int,
        Meta(
            description="processes that share the port, each a router of its own; limits of requests and tokens that "
            "wait are divided among them",
            ge=1,
            le=256,
            extra={"aliases": ["--api-server-count"]},
        ),
    ] = 1
    registry: Annotated[
        str,
        Meta(
            description="memory://HOST:PORT (hosted here, instances connect to it), redis://…, rediss://… or unix:///…"
        ),
    ] = "memory://127.0.0.1:8801"

    cluster_key_file: Annotated[
        str | None,
        Meta(description="file with the secret that the cluster shares; without it ZeroMQ is not encrypted"),
    ] = None
    api_key: Annotated[list[str], Meta(description="accepted keys; without any key nobody is refused")] = []
    api_key_file: Annotated[
        str | None,
        Meta(description="file with a key a line, name=… and limits may follow; read again when it changes"),
    ] = None
    audit_log: Annotated[
        str | None, Meta(description="file that gets one JSON line a request: who asked, and what came of it")
    ] = None
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="names that clients may call this server by (Host), beside IP addresses and localhost;"
            " *.example.com for all below one, * for any (default: * unless it listens on a loopback address)"
        ),
    ] = []
    allowed_origins: Annotated[
        list[str], Meta(description="web pages that browsers may let ask (CORS); * for all; none: no foreign page")
    ] = []
    allowed_methods: Annotated[list[str], Meta(description="HTTP methods for such pages")] = msgspec.field(
        default_factory=lambda: ["*"]
    )
    allowed_headers: Annotated[list[str], Meta(description="HTTP headers for such pages")] = msgspec.field(
        default_factory=lambda: ["*"]
    )
    allow_credentials: Annotated[bool, Meta(description="let browsers send cookies from such pages")] = False
    middleware: Annotated[
        list[str],
        Meta(
            description="ASGI middleware around all requests, by import path: a class, or a coroutine function of a"
            " request and what calls the next one; the last is the outermost"
        ),
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="file of the TLS key")] = None
    ssl_certfile: Annotated[str | None, Meta(description="file of the TLS certificate")] = None
    root_path: Annotated[
        str,
        Meta(description="path prefix that a proxy in front strips: /llm", pattern=r"^(/[A-Za-z0-9._~-]+)*/?$"),
    ] = ""

    max_model_len: Annotated[
        int | None,
        Meta(
            description="greatest number of tokens of prompt and answer (default: what the instances serve)",
            ge=1,
            extra={"group": "requests"},
        ),
    ] = None
    max_logprobs: Annotated[int, Meta(description="most alternatives that a request may ask for", ge=0)] = 20
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Meta(description="sampling where a request says nothing: as the model's generation_config.json, or neutral"),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="file of a chat template, or the template itself (default: the model's)")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="how the template wants content that is a list of parts: joined, or as the list"),
    ] = "auto"
    trust_request_chat_template: Annotated[bool, Meta(description="run chat templates that come with requests")] = False
    response_role: Annotated[str, Meta(description="role of answers in chats", min_length=1)] = "assistant"
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="let models call tools that requests offer; needs --tool-call-parser")
    ] = False
    tool_call_parser: Annotated[
        ToolCallParser | None, Meta(description="format in which the model writes calls of tools")
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None,
        Meta(description="format in which the model writes its reasoning, to be told from the answer"),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        Meta(description="let clients load and unload adapters (/v1/load_lora_adapter, /v1/unload_lora_adapter)"),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="answer GET /tokenizer_info: the tokenizer's configuration and chat template")
    ] = False
    return_tokens_as_token_ids: Annotated[bool, Meta(description="write tokens in logprobs as token_id:N")] = False

    limit_mm_per_prompt: Annotated[
        str, Meta(description='most images of a prompt: image=4, or {"image": 4}; 0: none (default: image=999)')
    ] = ""
    allowed_media_domains: Annotated[
        list[str],
        Meta(
            description="hosts that images are fetched from, whatever their address; * for all with a public one "
            "(default: none; data: URLs need none)"
        ),
    ] = []
    allowed_local_media_path: Annotated[
        str | None, Meta(description="folder whose files clients may name as images (file: URLs)")
    ] = None
    image_fetch_timeout_s: Annotated[float, Meta(description="time for an image to be fetched", gt=0)] = 5.0
    max_image_bytes: Annotated[int, Meta(description="greatest file of an image", ge=1, le=32 * 1024 * 1024)] = (
        16 * 1024 * 1024
    )
    max_image_pixels: Annotated[
        int, Meta(description="greatest size of an image: width times height", ge=1, le=128 * 1024 * 1024)
    ] = 32 * 1024 * 1024

    max_request_bytes: Annotated[int, Meta(description="greatest body of a request", ge=1)] = 8 * 1024 * 1024
    max_header_bytes: Annotated[
        int, Meta(description="greatest head of a request: its first line and headers", ge=1024)
    ] = 64 * 1024
    header_timeout_s: Annotated[float, Meta(description="time for the head of a request to arrive", gt=0)] = 10.0
    body_timeout_s: Annotated[
        float, Meta(description="time between two parts of a request's body, and for its first part", gt=0)
    ] = 30.0
    slow_client_s: Annotated[
        float, Meta(description="time for a whole body to arrive, and for a client to take what it is sent", gt=0)
    ] = 60.0
    keep_alive_timeout_s: Annotated[
        float,
        Meta(
            description="time for which a connection without a request stays open",
            gt=0,
            extra={"aliases": ["--timeout-keep-alive"]},
        ),
    ] = 75.0
    lingering_time_s: Annotated[
        float,
        Meta(description="time for which the rest of a request that was answered early is read and discarded", gt=0),
    ] = 30.0
    lingering_timeout_s: Annotated[float, Meta(description="time between two parts of such a rest", gt=0)] = 5.0
    max_connections: Annotated[
        int,
        Meta(
            description="connections of one process, at most three quarters of its file descriptors (ulimit -n); beyond"
            " it idle ones are closed, then others get status 503",
            ge=1,
        ),
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        Meta(
            description="connections of one process from one address, beyond it others get status 503; 0: any number,"
            " as behind a proxy, which has one address for all its clients",
            ge=0,
        ),
    ] = 0
    beam_search_max_tokens: Annotated[
        int, Meta(description="tokens of an answer found by beam search where the request states none", ge=1)
    ] = 256
    max_sequences: Annotated[int, Meta(description="most sequences (prompts times n) of one request", ge=1)] = 128
    max_concurrent_requests: Annotated[
        int, Meta(description="requests in flight before others get status 429", ge=1)
    ] = 4096
    max_queued_tokens: Annotated[
        int, Meta(description="tokens of prompts that may wait in the router before others get status 429", ge=0)
    ] = 1_000_000
    dispatch_ahead_s: Annotated[
        float,
        Meta(description="work that instances are given ahead; what is more waits here, by priority and key", gt=0),
    ] = 1.0
    default_ttft_ms: Annotated[
        float | None,
        Meta(description="a request whose first token would come later is refused, unless x-baton-ttft-ms says", gt=0),
    ] = None
    default_itl_ms: Annotated[
        float | None,
        Meta(description="a request whose tokens would come more slowly is refused, unless x-baton-itl-ms says", gt=0),
    ] = None
    first_token_hold: Annotated[
        float,
        Meta(
            description="where a time between tokens was promised, the first one of a prompt that is handed over waits "
            "in the router for up to so many times as long, for the second to follow in time; 0: never",
            ge=0,
        ),
    ] = 3.0
    requests_per_minute: Annotated[
        int, Meta(description="of each key whose line in --api-key-file says nothing else; 0: any", ge=0)
    ] = 0
    tokens_per_minute: Annotated[int, Meta(description="as above: prompt and answer, of each key", ge=0)] = 0
    tokens_per_day: Annotated[int, Meta(description="as above: prompt and answer, of each key", ge=0)] = 0
    min_priority: Annotated[
        int,
        Meta(
            description="as above: least priority that a key's requests may ask for (the smaller, the sooner); without"
            " any key all may ask for any"
        ),
    ] = 0
    retry_budget: Annotated[
        float,
        Meta(description="part of requests that may be tried again after an instance refused or failed; 0: none", ge=0),
    ] = 0.2
    request_timeout_s: Annotated[float, Meta(description="longest life of a request", gt=0)] = 3600.0
    handoff_timeout_s: Annotated[
        float, Meta(description="longest time from placement until decode has the prompt's blocks", gt=0)
    ] = 120.0

    placement_policy: Annotated[
        PolicyName,
        Meta(
            description="who serves a request: prefix predicts the time to first token from cached prefixes and "
            "queues; the others are for comparison",
            extra={"group": "placement"},
        ),
    ] = "prefix"
    kv_pull: Annotated[
        PullPolicy,
        Meta(
            description="whether an instance fetches a cached prefix from another one before it computes: auto where "
            "that is predicted to be quicker, always where there is one, or never"
        ),
    ] = "auto"
    disaggregation_min_tokens: Annotated[
        int,
        Meta(
            description="prompts with fewer tokens that decode has not cached are served by decode alone; "
            "0 always hands off",
            ge=0,
        ),
    ] = 32
    joint_prefill_min_tokens: Annotated[
        int | None, Meta(description="without effect, will be refused by the next version: leave it out")
    ] = None
    max_replays: Annotated[int, Meta(description="times a broken stream is resumed on other instances", ge=0)] = 3
    instance_wait_s: Annotated[
        float,
        Meta(
            description="time that a request waits for an instance that was lost, or for the first ones after the "
            "router's start, before it is given up",
            ge=0,
        ),
    ] = 15.0
    expected_blocks_ttl_s: Annotated[
        float, Meta(description="time that blocks of work just placed count as cached before an event says so", ge=0)
    ] = 5.0
    instance_timeout_s: Annotated[float, Meta(description="silence after which an instance is lost", gt=0)] = 3.0
    shutdown_timeout_s: Annotated[float, Meta(description="time for running requests to end after SIGTERM", ge=0)] = (
        10.0
    )

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="least level that is logged", extra={"group": "process"}),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="of log lines")] = "text"
    enable_log_requests: Annotated[bool, Meta(description="log the prompt of each request")] = False
    max_log_len: Annotated[
        int | None, Meta(description="characters of a prompt that are logged (default: all)", ge=0)
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="collector of traces (OTLP over HTTP): http://HOST:4318/v1/traces; needs baton-serve[otel]"),
    ] = None

    def __post_init__(self) -> None:
        images_per_prompt(self.limit_mm_per_prompt)

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(
            per_prompt=images_per_prompt(self.limit_mm_per_prompt),
            domains=frozenset(domain.lower() for domain in self.allowed_media_domains),
            local_path=Path(self.allowed_local_media_path) if self.allowed_local_media_path else None,
            fetch_timeout_s=self.image_fetch_timeout_s,
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
        )
