"""Decides what vLLM's flags mean that Baton lacks: refused with a reason, or accepted with a line in the log.

A flag whose effect is given in any case is accepted, and a line of the log says why it changes nothing. A flag that
asks for something else is refused with advice. Flags that an option carries as its name or alias are not listed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Arity = Literal["switch", "value", "list", "any"]
"""The words after a flag: none, one, one or more, or any number of a flag that is refused."""


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag of vLLM that is not an option of Baton. `names` are its spellings, and `text` says why it changes nothing
    here, or what to do instead.
    """

    names: tuple[str, ...]
    text: str
    arity: Arity = "any"
    harmless: tuple[str, ...] = ()
    """Values that change nothing. With the arity `value` or `list`, an empty tuple stands for all values."""
    option: str = ""
    """Name of the option of Baton that the flag may set."""

    @property
    def is_refused(self) -> bool:
        """Return whether Baton refuses the flag with every value."""
        return self.arity == "any"

    @property
    def outcome(self) -> str:
        """Return what Baton does with the flag, as text for the user, such as `changes nothing: …`."""
        if self.is_refused:
            return f"refused: {self.text}"
        if self.option:
            return f"may set --{self.option.replace('_', '-')}; {self.text}"
        if self.harmless:
            return f"accepted as {', '.join(self.harmless)}, else refused: {self.text}"
        return f"changes nothing: {self.text}"

    def accepts(self, values: tuple[str, ...]) -> bool:
        """Return whether Baton accepts the flag with these values: it then changes nothing, or sets an
        option of Baton.
        """
        return not self.is_refused and (not self.harmless or all(value.lower() in self.harmless for value in values))


_SWITCHES = (
    ("requests are logged only with --enable-log-requests", "--disable-log-requests"),
    ("prompts are always computed in chunks of --max-num-batched-tokens", "--enable-chunked-prefill"),
    ("there is one block manager", "--use-v2-block-manager"),
    ("the router and each instance are processes of their own", "--disable-frontend-multiprocessing"),
    ("outputs are always processed while the next step runs", "--disable-async-output-proc"),
    ("each token is sent as soon as it is generated", "--multi-step-stream-outputs"),
    ("instances are processes of this host, without Ray", "--worker-use-ray --engine-use-ray"),
    ("ranks always divide adapters as the layers that they change", "--fully-sharded-loras"),
    ("scales of the KV cache are computed for each token and head", "--calculate-kv-scales"),
    ("no access log is written; --enable-log-requests logs requests", "--disable-uvicorn-access-log"),
    ("the router keeps only images and videos with a uuid", "--disable-mm-preprocessor-cache"),
    ("--reasoning-parser turns reasoning on", "--enable-reasoning"),
    ("usage contains prompt_tokens_details in any case", "--enable-prompt-tokens-details"),
)
_VALUES = (
    ("each step computes one token of a sequence; see --async-scheduling", "--num-scheduler-steps"),
    ("graphs are captured for all lengths", "--max-seq-len-to-capture --max-context-len-to-capture"),
    ("graphs are captured for all sizes of a batch", "--cuda-graph-sizes"),
    (
        "tokenizer.json is read by a library in Rust, without a pool",
        "--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
    ),
    ("llguidance serves the syntax of all backends", "--guided-decoding-backend --structured-outputs-config"),
    (
        "instances find each other by themselves; --kv-transport can force a transport",
        "--kv-transfer-config --kv-events-config",
    ),
    ("the HTTP server logs by --log-level", "--uvicorn-log-level"),
    ("adapters add no tokens to the vocabulary", "--lora-extra-vocab-size"),
    ("weights are read by as many threads as the machine has cores", "--max-parallel-loading-workers"),
    ("scales of the KV cache are computed for each token and head", "--quantization-param-path"),
    ("only the files that are needed are downloaded", "--ignore-patterns"),
    ("spans have the times in the model without it, as in newer vLLM", "--collect-detailed-traces"),
    ("blocks are identified by one hash, which peers share", "--prefix-caching-hash-algo"),
    ("instances of one pool have no ranks among each other", "--data-parallel-backend --data-parallel-address"),
)
# Scripts often state defaults, so each default of vLLM is among the values that change nothing.
_CERTAIN_VALUES = (
    ("start more instances, or give the flag to baton serve", "--data-parallel-size -dp --dp", "1"),
    ("steps do not wait for more prompts", "--scheduler-delay-factor", "0 0.0"),
    ("speculative decoding is not supported", "--num-lookahead-slots", "0"),
    ("preempted sequences are computed again", "--preemption-mode", "recompute"),
    (
        "ranks are processes that the instance starts by itself, on several hosts with --nnodes",
        "--distributed-executor-backend",
        "mp uni ray external_launcher",
    ),
    (
        "the tokenizer is read from tokenizer.json",
        "--tokenizer-mode",
        "auto slow hf bpe-qwen",
    ),
    ("models are served by Baton's engine and by transformers", "--model-impl", "auto transformers"),
    ("the config is read from config.json", "--config-format", "auto hf"),
    ("requests are served by priority, then fairly among API keys", "--scheduling-policy", "fcfs priority"),
    ("the scheduler decides how many prompts share a step", "--max-num-partial-prefills", "1"),
)
_REFUSED = (
    ("leave it out; Baton starts no Ray workers", "--ray-workers-use-nsight"),
    (
        "speculative decoding is not supported",
        "--speculative-model --speculative-model-quantization --num-speculative-tokens --speculative-config"
        " --speculative-draft-tensor-parallel-size -spec-draft-tp --speculative-max-model-len"
        " --speculative-disable-by-batch-size --speculative-disable-mqa-scorer --ngram-prompt-lookup-max"
        " --ngram-prompt-lookup-min --spec-decoding-acceptance-method --typical-acceptance-sampler-posterior-threshold"
        " --typical-acceptance-sampler-posterior-alpha --disable-logprobs-during-spec-decoding",
    ),
    (
        "prompt adapters are not supported; --enable-lora serves LoRA adapters",
        "--enable-prompt-adapter --prompt-adapters --max-prompt-adapters --max-prompt-adapter-token",
    ),
    (
        "adapters keep the context of their model: leave it out, and use a model with a longer context",
        "--long-lora-scaling-factors",
    ),
    ("restart the router for new certificates, one after the other behind a load balancer", "--enable-ssl-refresh"),
    ("scrape vllm:num_requests_running and vllm:num_requests_waiting at /metrics", "--enable-server-load-tracking"),
    ("hide /docs and /openapi.json at the proxy before the router", "--disable-fastapi-docs"),
    ("start the processes by themselves: baton router, baton prefill, baton decode", "--headless --data-parallel-rank"),
    ("start more instances with --prefill, --decode or --unified", "--data-parallel-size-local -dpl"),
    (
        "start an instance on several hosts by itself: baton prefill, decode or unified, with this flag",
        "--nnodes -n --node-rank -r --master-addr --master-port",
    ),
    ("use --middleware, or start the offline API (LLM)", "--logits-processors"),
    ("use --tool-call-parser with one of its names", "--tool-parser-plugin --tool-server"),
    ("listen on --host and --port", "--uds"),
)
_LOW_BITS = {"fp16": "", "bf16": "", "sym_int8": "int8"}
"""IPEX-LLM's names of formats that `--quantization` calls differently; those without quantization are empty."""
LOW_BIT = VllmFlag(
    ("--load-in-low-bit",), "--quantization names the format already", arity="value", option="quantization"
)
QLORA = VllmFlag(
    ("--qlora-adapter-name-or-path",),
    "--model-loader-extra-config names the adapter already",
    arity="value",
    option="model_loader_extra_config",
)
COMPILATION = VllmFlag(
    ("--compilation-config", "-O"),
    "graphs are captured unless the flag says level 0 or cudagraph_mode NONE, or --enforce-eager is given",
    arity="value",
    option="enforce_eager",
)


def vllm_flags() -> Iterator[VllmFlag]:
    """Yield all flags of vLLM that Baton knows and that are not names of its own options."""
    for text, names in _SWITCHES:
        yield from (VllmFlag((name,), text, "switch") for name in names.split())
    for text, names in _VALUES:
        yield from (VllmFlag((name,), text, "list") for name in names.split())
    for text, names, harmless in _CERTAIN_VALUES:
        yield VllmFlag(tuple(names.split()), text, "value", tuple(harmless.split()))
    for text, names in _REFUSED:
        yield from (VllmFlag((name,), text) for name in names.split())
    yield from (LOW_BIT, QLORA, COMPILATION)


def option_value(flag: VllmFlag, value: str) -> object:
    """Return the value that `flag`, given with `value`, sets for the option of Baton named `flag.option`; None if the
    flag leaves the option as it is. Raises `ValueError` if the value should be JSON and is not.
    """
    if flag is LOW_BIT:
        # A data type instead of a format means that the weights stay as they are.
        return _LOW_BITS.get(value.lower(), value) or None
    if flag is QLORA:
        return {"qlora_adapter_name_or_path": value}
    if flag is COMPILATION:
        return _compiles_nothing(value) or None
    return None


def _compiles_nothing(config: str) -> bool:
    """Return whether vLLM's `--compilation-config` (JSON text) turns compilation or graphs off: the number 0, or an
    object whose `level` or `mode` is 0 or whose `cudagraph_mode` is NONE. Raises `ValueError` for other types of JSON.
    """
    known = json.loads(config)
    # `-O3` is short for the level alone.
    if isinstance(known, int):
        known = {"level": known}
    if not isinstance(known, dict):
        raise ValueError(config)
    # Newer versions of vLLM call the level a mode.
    levels = (known.get(name) for name in ("level", "mode"))
    return 0 in levels or str(known.get("cudagraph_mode", "")).upper() in ("NONE", "0")


def vllm_flag_advice(name: str) -> str | None:
    """Return what to use instead of `name`, a flag that vLLM has and Baton does not, as text for the user. Return None
    for any other flag.
    """
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    for flag in vllm_flags():
        if positive in flag.names:
            # The texts of the other flags only say why it changes nothing.
            return flag.text if flag.is_refused or flag.harmless else f"leave it out; {flag.text}"
    return None
