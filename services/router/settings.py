"""Settings of the router process. A flag that vLLM has too carries vLLM's name.

`main` reads them once with `services.common.settings.configuration`, and they are never changed afterwards. The
descriptions are the texts of `baton router --help`, which also shows the unit if a field's name ends with it (`_s`).
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.services.router.placement.policy import PolicyName
from baton_serve.services.router.placement.prefix_pull import PullPolicy
from baton_serve.services.router.protocol.image_limits import ImageLimits, images_per_prompt
from baton_serve.services.router.quota.api_keys import CacheSharing

ToolCallParser = Literal["deepseek_v3", "hermes", "llama3_json", "mistral", "openai", "pythonic", "qwen3_coder"]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "gpt_oss", "mistral", "qwen3"]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the value of each flag of the router: field `max_model_len` belongs to the flag `--max-model-len`.

    The order of the fields is the order in `--help`; `group` starts a new heading there.
    """

    model: Annotated[
        str,
        Meta(
            description="folder of the model with config.json, tokenizer.json and tokenizer_config.json",
            min_length=1,
            extra={"group": "model"},
        ),
    ]
    served_model_name: Annotated[
        list[str], Meta(description="names of the model in requests; answers carry the first one (default: --model)")
    ] = []
    tokenizer: Annotated[
        str | None, Meta(description="folder of the tokenizer, if it is not in the folder of the model")
    ] = None
    models: Annotated[
        dict[str, object],
        Meta(description='further models behind this router, by name: {"small": {"model": "/models/small"}}'),
    ] = {}
    host: Annotated[str, Meta(description="address to listen on", min_length=1, extra={"group": "server"})] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(description="port to listen on", ge=0, le=65535)] = 8000
    # The name is uvicorn's, the alias vLLM's. The code speaks of processes, because it calls an instance a worker.
    workers: Annotated[
        int,
        Meta(
            description="number of router processes that share the port; each is a complete router, and "
            "--max-concurrent-requests and --max-queued-tokens are divided among them",
            ge=1,
            le=256,
            extra={"aliases": ["--api-server-count"]},
        ),
    ] = 1
    registry: Annotated[
        str,
        Meta(
            description="URL of the registry that lists the instances: memory://HOST:PORT (this router hosts it, "
            "and instances connect to it), redis://…, rediss://… or unix:///…"
        ),
    ] = "memory://127.0.0.1:8801"

    cluster_key_file: Annotated[
        str | None,
        Meta(description="file with the secret of the cluster; without it ZeroMQ connections are not encrypted"),
    ] = None
    api_key: Annotated[
        list[str], Meta(description="API key to accept, may be repeated; without any key every client is accepted")
    ] = []
    api_key_file: Annotated[
        str | None,
        Meta(description="file with one API key per line, with name=… and limits; read again when it changes"),
    ] = None
    # Isolated by default: the time to the first token reveals whether another caller has sent the same prefix before.
    prefix_cache_sharing: Annotated[
        CacheSharing,
        Meta(description="which API keys share cached prefixes: per-key (those of one name=… or cache_group=…) or all"),
    ] = "per-key"
    audit_log: Annotated[
        str | None,
        Meta(description="file that gets one JSON line per request: caller, path and status, but no prompts"),
    ] = None
    # The default depends on --host: only a server on a loopback address is a target for DNS rebinding, where a web
    # page lets its own name resolve to this machine (`http.hosts`).
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="host names by which clients may address this server (Host header); IP addresses and "
            "localhost are always allowed, *.example.com allows all subdomains, * allows any name "
            "(default: *, or none if --host is a loopback address)"
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        Meta(description="origins of web pages that may call this server (CORS); * allows all (default: none)"),
    ] = []
    # msgspec copies empty lists only; a default that is not empty needs a factory.
    allowed_methods: Annotated[list[str], Meta(description="HTTP methods that pages of --allowed-origins may use")] = (
        msgspec.field(default_factory=lambda: ["*"])
    )
    allowed_headers: Annotated[list[str], Meta(description="HTTP headers that pages of --allowed-origins may send")] = (
        msgspec.field(default_factory=lambda: ["*"])
    )
    allow_credentials: Annotated[
        bool, Meta(description="let browsers send cookies with requests from pages of --allowed-origins")
    ] = False
    middleware: Annotated[
        list[str],
        Meta(
            description="import path of an ASGI middleware around all requests: a class, or a coroutine function "
            "that takes a request and the function to call next; may be repeated, the last one is the "
            "outermost"
        ),
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="file with the private key for TLS")] = None
    ssl_certfile: Annotated[str | None, Meta(description="file with the certificate for TLS")] = None
    root_path: Annotated[
        str, Meta(description="path prefix that a reverse proxy removes: /llm", pattern=r"^(/[A-Za-z0-9._~-]+)*/?$")
    ] = ""

    max_model_len: Annotated[
        int | None,
        Meta(
            description="largest number of tokens of prompt and answer together (default: that of the instances)",
            ge=1,
            extra={"group": "requests"},
        ),
    ] = None
    max_logprobs: Annotated[
        int, Meta(description="largest number of logprobs per token that requests may ask for", ge=0)
    ] = 20
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Meta(
            description="default sampling parameters: auto takes those of the model's generation_config.json, vllm "
            "takes neutral ones"
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="file with a chat template, or the template itself (default: the model's)")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="how message content that is a list of parts is passed to the chat template: string joins "
            "the text parts, openai passes the list, auto detects what the template expects"
        ),
    ] = "auto"
    trust_request_chat_template: Annotated[bool, Meta(description="render chat templates that come with requests")] = (
        False
    )
    response_role: Annotated[str, Meta(description="role of answers to chats", min_length=1)] = "assistant"
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="let the model decide to call tools; needs --tool-call-parser")
    ] = False
    tool_call_parser: Annotated[
        ToolCallParser | None, Meta(description="format in which the model generates tool calls")
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None,
        Meta(
            description="format in which the model generates its reasoning; it is then returned apart from the answer"
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        Meta(description="let clients load and unload LoRA adapters (/v1/load_lora_adapter, /v1/unload_lora_adapter)"),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="serve the tokenizer's configuration at GET /tokenizer_info")
    ] = False
    return_tokens_as_token_ids: Annotated[bool, Meta(description="write tokens in logprobs as token_id:N")] = False

    limit_mm_per_prompt: Annotated[
        str,
        Meta(
            description='largest number of images per prompt, as image=4 or {"image": 4}; 0 allows none (default: '
            "image=999)"
        ),
    ] = ""
    # Empty by default: fetching any URL that a client names would let it reach services inside the operator's network.
    allowed_media_domains: Annotated[
        list[str],
        Meta(
            description="hosts from which the router may fetch images, even at private addresses; * allows all "
            "hosts with a public address (default: none; data: URLs need no permission)"
        ),
    ] = []
    allowed_local_media_path: Annotated[
        str | None, Meta(description="folder whose files clients may use as images by file: URLs (default: none)")
    ] = None
    image_fetch_timeout_s: Annotated[float, Meta(description="longest time to fetch one image", gt=0)] = 5.0
    max_image_bytes: Annotated[int, Meta(description="largest size of an image file", ge=1, le=32 * 1024 * 1024)] = (
        16 * 1024 * 1024
    )
    # A small file can decode to a huge picture, so the limit in bytes does not bound the memory that it needs.
    max_image_pixels: Annotated[
        int, Meta(description="largest size of an image in pixels, width times height", ge=1, le=128 * 1024 * 1024)
    ] = 32 * 1024 * 1024

    max_request_bytes: Annotated[int, Meta(description="largest size of a request body", ge=1)] = 8 * 1024 * 1024
    max_header_bytes: Annotated[
        int, Meta(description="largest size of a request's first line and headers", ge=1024)
    ] = 64 * 1024
    header_timeout_s: Annotated[
        float, Meta(description="longest time for a request's first line and headers", gt=0)
    ] = 10.0
    body_timeout_s: Annotated[float, Meta(description="longest pause while a request body arrives", gt=0)] = 30.0
    slow_client_s: Annotated[
        float,
        Meta(
            description="longest time until a whole request body has arrived, and until a client takes the data "
            "sent to it",
            gt=0,
        ),
    ] = 60.0
    # Longer than common proxies keep an idle connection (60 s). If the server closed first, a proxy could send a
    # request into a connection that is just being closed.
    keep_alive_timeout_s: Annotated[
        float,
        Meta(
            description="time that a connection stays open without a request",
            gt=0,
            extra={"aliases": ["--timeout-keep-alive"]},
        ),
    ] = 75.0
    # TCP resets a connection that is closed with unread data, and the client would lose the answer (nginx's name).
    lingering_time_s: Annotated[
        float,
        Meta(description="longest time to read the rest of a request that was answered early, and discard it", gt=0),
    ] = 30.0
    lingering_timeout_s: Annotated[
        float, Meta(description="longest pause while the rest of a request that was answered early arrives", gt=0)
    ] = 5.0
    max_connections: Annotated[
        int,
        Meta(
            description="largest number of connections of one process, at most three quarters of its file "
            "descriptors (ulimit -n); beyond it idle connections are closed first, then new ones get "
            "status 503",
            ge=1,
        ),
    ] = 8192
    # 0 by default, because most routers stand behind a proxy or a load balancer.
    max_connections_per_address: Annotated[
        int,
        Meta(
            description="largest number of connections of one process from one client address, beyond it new ones "
            "get status 503; 0 sets no limit, as needed behind a proxy, whose clients all have its "
            "address",
            ge=0,
        ),
    ] = 0
    beam_search_max_tokens: Annotated[
        int, Meta(description="max_tokens of beam search requests that do not set it", ge=1)
    ] = 256
    max_sequences: Annotated[
        int, Meta(description="largest number of sequences of a request (prompts times n)", ge=1)
    ] = 128
    max_concurrent_requests: Annotated[
        int,
        Meta(
            description="largest number of prompts that are served at once, waiting ones included; further requests"
            " get status 429",
            ge=1,
        ),
    ] = 4096
    max_queued_tokens: Annotated[
        int,
        Meta(
            description="largest number of prompt tokens that wait in the router; further requests get status 429", ge=0
        ),
    ] = 1_000_000
    # Enough to keep an instance busy. A request that waits in the router instead can still be overtaken by one of
    # higher priority, and be placed by what is cached when its turn comes.
    dispatch_ahead_s: Annotated[
        float,
        Meta(
            description="amount of work, in seconds of computing time, that an instance may have in its queue; "
            "further requests wait in the router, ordered by priority and shared fairly among API keys",
            gt=0,
        ),
    ] = 1.0
    default_ttft_ms: Annotated[
        float | None,
        Meta(
            description="TTFT SLO in milliseconds of requests without the header x-baton-ttft-ms; a request that is"
            " predicted to miss it gets status 429 (default: no SLO)",
            gt=0,
        ),
    ] = None
    default_itl_ms: Annotated[
        float | None,
        Meta(
            description="ITL SLO in milliseconds of requests without the header x-baton-itl-ms; a request that is "
            "predicted to miss it gets status 429 (default: no SLO)",
            gt=0,
        ),
    ] = None
    # The gap between the first two tokens contains the rest of the handoff, so it is longer than later ones (ADR 0012).
    first_token_hold: Annotated[
        float,
        Meta(
            description="longest time that the router holds back the first token of a disaggregated request so that"
            " the second one follows within the ITL SLO, as a multiple of that SLO; 0 disables it",
            ge=0,
        ),
    ] = 3.0
    requests_per_minute: Annotated[
        int,
        Meta(
            description="requests per minute of each API key, unless its line in --api-key-file sets another limit;"
            " 0 sets no limit",
            ge=0,
        ),
    ] = 0
    tokens_per_minute: Annotated[
        int,
        Meta(
            description="prompt and generated tokens per minute of each API key, unless its line in --api-key-file "
            "sets another limit; 0 sets no limit",
            ge=0,
        ),
    ] = 0
    tokens_per_day: Annotated[
        int,
        Meta(
            description="prompt and generated tokens per day of each API key, unless its line in --api-key-file "
            "sets another limit; 0 sets no limit",
            ge=0,
        ),
    ] = 0
    min_priority: Annotated[
        int,
        Meta(
            description="smallest priority value that requests of an API key may ask for (smaller values are served"
            " earlier), unless its line in --api-key-file sets another one; without API keys every "
            "value is allowed"
        ),
    ] = 0
    # Without a budget retries could double the load of a cluster that already fails under its load.
    retry_budget: Annotated[
        float,
        Meta(
            description="number of retries per request, on average over all requests, after an instance rejected or"
            " failed one; 0 disables retries",
            ge=0,
        ),
    ] = 0.2
    request_timeout_s: Annotated[
        float, Meta(description="longest time from the arrival of a request to the end of its answer", gt=0)
    ] = 3600.0
    handoff_timeout_s: Annotated[
        float,
        Meta(
            description="longest time from placement until the KV blocks of the prompt are on the decode instance", gt=0
        ),
    ] = 120.0

    placement_policy: Annotated[
        PolicyName,
        Meta(
            description="how instances are chosen: prefix predicts the TTFT from cached prefixes and queues; the "
            "others are for comparison",
            extra={"group": "placement"},
        ),
    ] = "prefix"
    kv_pull: Annotated[
        PullPolicy,
        Meta(
            description="whether an instance fetches a cached prefix from another one before it computes the rest "
            "of a prompt: auto if that is predicted to be faster, always if another one has a longer "
            "prefix, never"
        ),
    ] = "auto"
    disaggregation_min_tokens: Annotated[
        int,
        Meta(
            description="prompts with fewer tokens than this that are not cached on the decode instance are "
            "computed there, without a prefill instance; 0 always uses a prefill instance",
            ge=0,
        ),
    ] = 32
    # Not in use any more, but a deployment that still sets it must be able to start (`main.warn_of_removed`).
    joint_prefill_min_tokens: Annotated[
        int | None, Meta(description="has no effect and will be rejected by the next version: leave it out")
    ] = None
    max_replays: Annotated[
        int,
        Meta(description="how often one request may be resumed on other instances after its instance was lost", ge=0),
    ] = 3
    instance_wait_s: Annotated[
        float,
        Meta(
            description="longest time that a request waits for an instance to return after one was lost, or for the"
            " first instances after the start of the router; then it fails with status 503",
            ge=0,
        ),
    ] = 15.0
    # Without it, requests with the same new prefix that arrive together would be spread over instances, and each
    # instance would compute the prefix itself.
    expected_blocks_ttl_s: Annotated[
        float, Meta(description="time that blocks of a placed prompt count as cached before they are reported", ge=0)
    ] = 5.0
    instance_timeout_s: Annotated[float, Meta(description="silence of an instance until it counts as lost", gt=0)] = 3.0
    shutdown_timeout_s: Annotated[
        float, Meta(description="time for running requests to finish after SIGTERM", ge=0)
    ] = 10.0

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged", extra={"group": "process"}),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="format of log lines")] = "text"
    enable_log_requests: Annotated[bool, Meta(description="log the prompt of each request")] = False
    max_log_len: Annotated[
        int | None, Meta(description="largest number of logged characters of a prompt (default: all)", ge=0)
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="OTLP/HTTP collector of traces: http://HOST:4318/v1/traces; needs baton-serve[otel]"),
    ] = None

    def __post_init__(self) -> None:
        # The result is not stored. A malformed value must stop the process at its start, not fail the first request.
        images_per_prompt(self.limit_mm_per_prompt)

    @property
    def image_limits(self) -> ImageLimits:
        """Return the settings that bound the images of a request."""
        return ImageLimits(
            per_prompt=images_per_prompt(self.limit_mm_per_prompt),
            domains=frozenset(domain.lower() for domain in self.allowed_media_domains),
            local_path=Path(self.allowed_local_media_path) if self.allowed_local_media_path else None,
            fetch_timeout_s=self.image_fetch_timeout_s,
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
        )
