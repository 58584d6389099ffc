"""Define the settings of the router itself (model, server, templates, parsers, media), with their defaults."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.audio import CutterLimits
from baton_serve.contracts.vision import SoundRules
from baton_serve.generation_config import checked_overrides
from baton_serve.services.common.settings.shared_settings import Host, Port
from baton_serve.services.router.protocol.image_limits import ImageLimits, limits_per_prompt, processor_settings
from baton_serve.services.router.quota.api_keys import CacheSharing
from baton_serve.services.router.settings.limits import BatchSettings

ToolCallParser = Literal["deepseek_v3", "hermes", "llama3_json", "mistral", "openai", "pythonic", "qwen3_coder"]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "gpt_oss", "mistral", "qwen3"]


class RequestSettings(BatchSettings, frozen=True, kw_only=True):
    """The settings for the content of requests: lengths, chat templates, tools, images and audio."""

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
        str,
        Meta(
            description="default sampling parameters: auto takes those of the model's generation_config.json, vllm "
            "takes neutral ones, and a folder has a generation_config.json to use instead, whose max_new_tokens is"
            " also the limit of max_tokens",
            min_length=1,
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, object],
        Meta(
            description="default sampling parameters that replace those of --generation-config:"
            ' {"temperature": 0.5, "max_new_tokens": 512}, of which max_new_tokens also limits max_tokens'
        ),
    ] = {}
    seed: Annotated[
        int | None,
        Meta(
            description="seed from which requests without one get theirs: after a restart the same requests in the same"
            " order get the same answers (default: random)",
            ge=0,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(
            description="file with a chat template, the template itself, or the name of one of the model's, such as"
            " tool_use (default: the model's)"
        ),
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="how message content that is a list of parts is passed to the chat template: string joins "
            "the text parts, openai passes the list, auto detects what the template expects"
        ),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="render chat templates that come with requests. They are programs whose memory is not "
            "limited: every client can then stop the router"
        ),
    ] = False
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
        Meta(
            description="let clients load and unload LoRA adapters (/v1/load_lora_adapter, /v1/unload_lora_adapter); if"
            " API keys have several owners, only those with operator=true in --api-key-file"
        ),
    ] = False
    enable_admin_endpoints: Annotated[
        bool,
        Meta(
            description="serve /reset_prefix_cache, /start_profile, /stop_profile, /sleep and /wake_up; if API keys"
            " have several owners, only for those with operator=true in --api-key-file"
        ),
    ] = False
    update_weights_folder: Annotated[
        str | None,
        Meta(
            description="folder from which POST /update_weights_from_disk may load weights, with"
            " --enable-admin-endpoints; workers must see it under this path"
        ),
    ] = None
    lora_resolver_folder: Annotated[
        str | None,
        Meta(
            description="folder of LoRA adapters; a request for an unknown model loads the adapter of that name."
            " Router and instances must see the folder under this path"
        ),
    ] = None
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="serve the tokenizer's configuration at GET /tokenizer_info")
    ] = False
    response_store_ttl_s: Annotated[
        float,
        Meta(
            description="how long answers of /v1/responses are stored, for previous_response_id and retrieval; in the"
            " registry's Redis, or else in the memory of each router process. 0 stores none",
            ge=0,
        ),
    ] = 1800.0
    response_store_bytes: Annotated[
        int,
        Meta(
            description="largest size of the stored answers, with their conversations, in Redis or in the memory of"
            " one process; beyond it the owner of API keys with the most of them loses its oldest",
            ge=0,
        ),
    ] = 256 * 1024 * 1024
    return_tokens_as_token_ids: Annotated[bool, Meta(description="write tokens in logprobs as token_id:N")] = False

    limit_mm_per_prompt: Annotated[
        str,
        Meta(
            description='largest number of images, videos and audio per prompt, as image=4,audio=1 or {"image": 4}; 0'
            " allows none (default: 999 of each)",
            extra={"group": "images"},
        ),
    ] = ""
    mm_processor_kwargs: Annotated[
        str,
        Meta(
            description="settings of the model's image and video processors as JSON, such as"
            ' {"max_pixels": 1003520} or {"fps": 1}; requests may replace them by a field of this name'
        ),
    ] = ""
    # Off by default, as in vLLM: embeddings reach the decoder without any processor that would bound their values.
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="accept parts of type image_embeds, which hold embeddings of an image instead of the image:"
            " a file of torch.save or safetensors in base64"
        ),
    ] = False
    # Empty by default: fetching any URL that a client names would let it reach services inside the operator's network.
    allowed_media_domains: Annotated[
        list[str],
        Meta(
            description="hosts from which the router may fetch images, even at private addresses; * allows all "
            "hosts with a public address (default: none; data: URLs need no permission)"
        ),
    ] = []
    allowed_local_media_path: Annotated[
        str | None,
        Meta(
            description="folder whose files clients may use as images, videos and audio by file: URLs (default: none)"
        ),
    ] = None
    image_fetch_timeout_s: Annotated[float, Meta(description="longest time to fetch one image", gt=0)] = 5.0
    max_image_bytes: Annotated[int, Meta(description="largest size of an image file", ge=1, le=32 * 1024 * 1024)] = (
        16 * 1024 * 1024
    )
    # A small file can decode to a huge picture, so the limit in bytes does not bound the memory that it needs.
    max_image_pixels: Annotated[
        int,
        Meta(
            description="largest size of an image or of a video's frame in pixels, width times height",
            ge=1,
            le=128 * 1024 * 1024,
        ),
    ] = 32 * 1024 * 1024
    max_video_bytes: Annotated[int, Meta(description="largest size of a video file", ge=1, le=31 * 1024 * 1024)] = (
        31 * 1024 * 1024
    )
    max_video_s: Annotated[
        float, Meta(description="longest video in seconds, which is checked before it is decoded", gt=0, le=6 * 3600)
    ] = 600.0
    video_fetch_timeout_s: Annotated[float, Meta(description="longest time to fetch one video", gt=0)] = 30.0
    mm_processor_cache_gb: Annotated[
        float,
        Meta(
            description=(
                "GiB of files with a uuid that each process keeps, so that later requests need not send them, and as"
                " many bytes, up to 64 MiB, of recent images of data: URLs"
            ),
            ge=0,
        ),
    ] = 0.25
    # At least the images of one prompt (`MAX_PROMPT_BYTES`).
    max_image_memory_bytes: Annotated[
        int,
        Meta(
            description="largest size of all image files together that one process loads, and keeps for the requests "
            "that it serves; further requests with images wait 2 s, then get status 429",
            ge=48 * 1024 * 1024,
        ),
    ] = 512 * 1024 * 1024

    max_audio_bytes: Annotated[
        int,
        Meta(
            description="largest size of an audio file, or of a request with one (default: 25 MiB)",
            ge=1,
            extra={"group": "audio"},
        ),
    ] = 25 * 1024 * 1024
    max_audio_s: Annotated[
        float, Meta(description="longest audio file in seconds, which is checked before all of it is decoded", gt=0)
    ] = 7200.0
    audio_fetch_timeout_s: Annotated[float, Meta(description="longest time to fetch the audio of a chat", gt=0)] = 10.0

    def __post_init__(self) -> None:
        # The result is not stored. A malformed value must stop the process at its start, not fail the first request.
        limits_per_prompt(self.limit_mm_per_prompt)
        processor_settings(self.mm_processor_kwargs)
        checked_overrides(self.override_generation_config)
        if self.max_request_bytes > self.max_body_memory_bytes:
            raise ValueError(
                f"--max-request-bytes {self.max_request_bytes} is more than --max-body-memory-bytes"
                f" {self.max_body_memory_bytes}, so that the largest bodies could never be accepted: raise the latter"
            )

    def cutter_limits(self, rate_hz: int, window_s: float) -> CutterLimits:
        """Return the limits of the process that decodes audio files, for a model with windows of `window_s` seconds at
        `rate_hz` samples per second.
        """
        return CutterLimits(rate_hz=rate_hz, window_s=window_s, max_s=self.max_audio_s)

    def sound_limits(self, rules: SoundRules) -> CutterLimits:
        """Return the limits of the process that decodes the audio of chats for a model that hears it by `rules`."""
        # A model that hears all of a long audio must not get a part of it only.
        max_s = min(self.max_audio_s, rules.longest_s) if rules.hears_all else self.max_audio_s
        return CutterLimits(rate_hz=rules.rate_hz, window_s=max_s, heard_s=rules.longest_s, max_s=max_s)

    @property
    def image_limits(self) -> ImageLimits:
        """Return the limits for the images of a request."""
        return ImageLimits(
            per_prompt=limits_per_prompt(self.limit_mm_per_prompt),
            processor_settings=processor_settings(self.mm_processor_kwargs),
            takes_embeddings=self.enable_mm_embeds,
            domains=frozenset(domain.lower() for domain in self.allowed_media_domains),
            local_path=Path(self.allowed_local_media_path) if self.allowed_local_media_path else None,
            fetch_timeout_s=self.image_fetch_timeout_s,
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            max_video_bytes=self.max_video_bytes,
            max_video_s=self.max_video_s,
            video_fetch_timeout_s=self.video_fetch_timeout_s,
            max_audio_bytes=self.max_audio_bytes,
            audio_fetch_timeout_s=self.audio_fetch_timeout_s,
        )


class RouterSettings(RequestSettings, frozen=True, kw_only=True):
    """Holds the value of each flag of the router: the field `max_model_len` has the value of the flag
    `--max-model-len`.
    """

    EVERYDAY: ClassVar = (
        "model", "host", "port", "registry", "served_model_name", "max_model_len", "api_key", "tool_call_parser",
        "workers", "models",
    )  # fmt: skip
    """The options that `--help` shows first."""
    ACCEPTS_VLLM: ClassVar = True

    model: Annotated[
        str,
        Meta(
            description="folder of the model with config.json, tokenizer.json and tokenizer_config.json, GGUF file, or"
            " ORG/NAME of a model on the hub, of which only these files are downloaded",
            min_length=1,
            extra={"group": "model", "positional": True},
        ),
    ]
    served_model_name: Annotated[
        list[str], Meta(description="names of the model in requests; answers carry the first one (default: --model)")
    ] = []
    skip_tokenizer_init: Annotated[
        bool,
        Meta(
            description="read no tokenizer: requests have token ids instead of text, and answers have them with"
            " return_token_ids; texts, stop strings and structured output get 400"
        ),
    ] = False
    tokenizer: Annotated[
        str | None, Meta(description="folder of the tokenizer, if it is not in the folder of the model")
    ] = None
    models: Annotated[
        dict[str, object],
        Meta(description='further models behind this router, by name: {"small": {"model": "/models/small"}}'),
    ] = {}
    host: Annotated[Host, Meta(description="address to listen on", extra={"group": "server"})] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port to listen on")] = 8000
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
        Meta(
            description="file with the secret of the cluster; without it connections to instances are not encrypted",
            extra={"group": "security"},
        ),
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
        Meta(
            description="which API keys share cached prefixes. per-key: only keys with the same name=… or"
            " cache_group=…, because a short TTFT reveals that a prefix is cached; all: every key"
        ),
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
            "outermost",
            extra={"group": "server"},
        ),
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="file with the private key for TLS")] = None
    ssl_certfile: Annotated[str | None, Meta(description="file with the certificate for TLS")] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="file with the authorities whose certificates clients may have")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(
            description="certificates of clients: 0 none, 1 checked if they are sent, 2 required; 1 and 2 need"
            " --ssl-ca-certs",
            ge=0,
            le=2,
        ),
    ] = 0
    root_path: Annotated[
        str, Meta(description="path prefix that a reverse proxy removes: /llm", pattern=r"^(/[A-Za-z0-9._~-]+)*/?$")
    ] = ""
