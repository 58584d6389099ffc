"""The class `LLMEngine`: accepts requests while others run; its owner calls `step` in a loop. Its owner calls `step` in
a loop, from one thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.engine import Engine
from baton_serve.engine.errors import ConfigError, EngineError, UsageError
from baton_serve.engine.loading.sharded_saving import save_sharded_state
from baton_serve.engine.model.vision.text_part import family_of
from baton_serve.engine.offline.engine_args import (
    EngineArgs,
    LoRAConfig,
    ModelConfig,
    OfflineSchedulerConfig,
    OpenedModel,
    ParallelConfig,
    open_model,
    profiler_folder,
)
from baton_serve.engine.offline.outputs import Metric, RequestOutput, engine_metrics
from baton_serve.engine.offline.prompts import ParsedPrompt, Prompt, checked_tokenizer, parse_prompts, without_text
from baton_serve.engine.offline.request_params import SamplingParams, default_params
from baton_serve.engine.offline.request_runner import PreparedPrompt, RequestRunner, StepChanges
from baton_serve.engine.offline.requested_adapters import LoRARequest, RequestedAdapters

if TYPE_CHECKING:
    from baton_serve.engine.offline.images import MediaRules  # loads Pillow, which texts do not need

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded engine and the objects that use it. `LLMEngine.sleep` drops all of them together."""

    engine: Engine
    runner: RequestRunner
    adapters: RequestedAdapters


class LLMEngine:
    """An engine with vLLM's interface: `engine = LLMEngine.from_engine_args(EngineArgs("/models/llama"))`,
    `add_request`, `step`.

    Not thread-safe; `AsyncLLMEngine` runs one in a thread of its own. `LLM` uses the same class.
    """

    def __init__(self, model: OpenedModel) -> None:
        """Load the model that `open_model` has opened. Raises `ConfigError`, `ModelError`, `CapacityError` or
        `AdapterError`."""
        config = model.config
        if model.kind != "generate":
            raise ConfigError("this is a pooling model: use LLM and its embed, classify, score or encode")
        self.tokenizer = model.tokenizer
        self._generation = model.generation
        self._config = config
        self._media = model.media
        self._rules: MediaRules | None = None
        self._outputs: list[RequestOutput] = []
        self._failures: list[EngineError] = []
        self._loaded: _Loaded | None = self._load()

    def _load(self) -> "_Loaded":
        """Load the model into a new engine, and make the objects that use it."""
        config = self._config
        engine = Engine(config)
        # Adapters of `lora_modules` stay loaded, so they take slots that requests cannot use.
        most = config.max_adapters - len(config.lora_modules)
        return _Loaded(
            engine,
            RequestRunner(engine, self.tokenizer, seed=config.seed),
            RequestedAdapters(engine.adapters, most=most),
        )

    @property
    def _awake(self) -> "_Loaded":
        """The loaded engine and the objects that use it. Raises `ConfigError` between `sleep` and `wake_up`."""
        if self._loaded is None:
            raise ConfigError("the engine sleeps: call wake_up first")
        return self._loaded

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Open the folder of the model in `engine_args`, and load the model. Raises the same errors as
        `LLMEngine()`."""
        return cls(open_model(engine_args))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the model's weights to the folder `path`, with the arguments of `LLM.save_sharded_state`."""
        save_sharded_state(self._config, Path(path), pattern=pattern, max_size=max_size)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queue one prompt, as in vLLM; `step` returns its outputs. Without `params` the model's defaults are used.
        `lora_request` names the LoRA adapter to use, None: none. Lower values of `priority` run first.

        Raises `RequestError`, `ConfigError` or `AdapterError`; then the request is not added.
        """
        given = parse_prompts(prompt)
        if len(given) != 1:
            raise ConfigError("add_request takes one prompt")
        self.add(request_id, given[0], params or self.default_params(), lora_request=lora_request, priority=priority)

    def add(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> None:
        """Queue a prompt that `parse_prompts` has read; otherwise as `add_request`.

        `add_special_tokens` False is for texts of a chat template, which contain the special tokens already.
        """
        # Load first: a request that names a broken adapter must not be added.
        fingerprint = self.load_adapters([lora_request])[0]
        ids = prompt.token_ids
        if self.tokenizer is None:
            params = without_text(prompt, params)
        if ids is None:
            ids = self.tokenizer(prompt.text, add_special_tokens=add_special_tokens)["input_ids"]
        keep = params.truncate_prompt_tokens
        if keep is not None and prompt.media:
            raise ConfigError("truncate_prompt_tokens could cut an image: leave it out for prompts with images")
        # vLLM keeps the end of a long prompt, which has the question.
        kept = ids if keep is None else ids[-keep:]
        if self._generation.end_token_ids:
            params = params.clone()
            params.update_from_generation_config({"eos_token_id": sorted(self._generation.end_token_ids)})
        prepared = PreparedPrompt(prompt.text, kept, params, priority, lora_request, fingerprint)
        if prompt.media:
            from baton_serve.engine.offline.images import MediaRules, add_images  # loads Pillow

            if self._rules is None:
                family = family_of(model_folder(self._config.model))
                self._rules = MediaRules(family, *self._media)
            reader = self._awake.engine.image_reader
            found = add_images(prompt, kept, self._rules, reader, self.tokenizer, add_special_tokens=add_special_tokens)
            prepared = replace(prepared, token_ids=found.token_ids, media=found.media, pixels=found.pixels)
        self._awake.runner.add(RequestId(request_id), prepared)

    def load_adapters(self, asked: Sequence[LoRARequest | None]) -> list[str]:
        """Load the LoRA adapters `asked`, which the prompts of one call use, where they are missing. Return their
        fingerprints, in order; "" for None.

        Loading them one after another could evict one that the same call needs. Raises `ConfigError` or `AdapterError`.
        """
        if any(asked) and not self._config.enable_lora:
            raise ConfigError("lora_request needs enable_lora=True")
        return self._awake.adapters.fingerprints(asked)

    def step(self) -> list[RequestOutput]:
        """Run one step, and return an output for each request that has new tokens, with the content that its
        `output_kind` asks for.

        Raises `EngineError` for a request that failed. Outputs of the other requests are kept and returned by the next
        call.
        """
        stepped = self.advance()
        # Build the outputs before ended requests are forgotten below.
        self._outputs += filter(None, map(self.next_output, stepped.changed))
        self.abort_request(stepped.ended)
        self._failures += stepped.failed.values()
        # One error per call: vLLM's interface has no other way to report several failed requests.
        if self._failures:
            raise self._failures.pop(0)
        # Outputs of earlier steps may be left from a call that raised an error.
        outputs, self._outputs = self._outputs, []
        return outputs

    def advance(self) -> StepChanges:
        """Run one step, and return which requests have changed, without building their outputs. The caller gets these
        by `look`, `next_output` and `take`."""
        runner = self._awake.runner
        return runner.step() if runner.has_requests else StepChanges()

    def look(self, request_id: str) -> RequestOutput:
        """Return the output of a request so far, and keep the request. The id must be known."""
        return self._awake.runner.output(RequestId(request_id))

    def next_output(self, request_id: str) -> RequestOutput | None:
        """Return the output that the caller of a request gets after a step, by its `output_kind`; None if it gets none
        now. The id must be known."""
        return self._awake.runner.next_output(RequestId(request_id))

    def take(self, request_id: str) -> RequestOutput:
        """Return the output of a request so far, and end and forget the request. The id must be known."""
        output = self.look(request_id)
        self.abort_request(request_id)
        return output

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End the requests with these ids, in any state, and drop their outputs. Ids that are unknown or have ended are
        ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            # A sleeping engine has no requests.
            if self._loaded is not None:
                self._loaded.runner.forget(RequestId(one))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are running, or `step` has outputs or errors left to return."""
        return self.get_num_unfinished_requests() > 0 or bool(self._outputs or self._failures)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that were added and have not ended."""
        return 0 if self._loaded is None else self._loaded.runner.num_requests

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV blocks that no request uses. Return True if no cached block is left."""
        return self._awake.engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the memory of the weights and of the KV cache until `wake_up`. Raises `UsageError` if a request is
        running."""
        if self.has_unfinished_requests():
            raise UsageError("sleep: requests are running; finish or abort them first")
        # Forgotten first: the engine holds the tensors, and must not be used any more even if `close` fails.
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.engine.close()

    def wake_up(self) -> None:
        """Load the model again after `sleep`, from its files. Do nothing if it is loaded."""
        if self._loaded is None:
            self._loaded = self._load()

    def is_sleeping(self) -> bool:
        """Return whether the model is not loaded: `sleep` was called, and `wake_up` was not called since."""
        return self._loaded is None

    def start_profile(self) -> None:
        """Start a recording with torch's profiler, to be written to the folder in the variable VLLM_TORCH_PROFILER_DIR.
        Raises `ConfigError` if it is not set or the folder cannot be made, and `UsageError` if a recording runs."""
        self._awake.engine.start_profile(profiler_folder())

    def stop_profile(self) -> None:
        """End the recording of `start_profile`, and write the trace. Raises `UsageError` if no recording runs."""
        logger.info("wrote the trace %s", self._awake.engine.stop_profile())

    @property
    def model_executor(self) -> "LLMEngine":
        """This engine itself, because vLLM's programs call `llm_engine.model_executor.save_sharded_state`."""
        return self

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters and gauges since the start, under vLLM's names."""
        return engine_metrics(self._awake.engine.stats())

    def do_log_stats(self) -> None:
        """Log the number of requests, the use of the KV cache and the prefix cache, in one line."""
        stats = self._awake.engine.stats()
        logger.info(
            "running %d sequences, waiting %d, KV blocks free %d of %d",
            stats.running,
            stats.waiting,
            stats.free_blocks,
            stats.total_blocks,
        )

    def get_model_config(self) -> ModelConfig:
        """Return the settings of the model, such as its dtype and longest context, under vLLM's names."""
        config = self._config
        return ModelConfig(
            model=config.model,
            tokenizer=str(getattr(self.tokenizer, "name_or_path", config.model)),
            trust_remote_code=config.trust_remote_code,
            dtype=self._awake.engine.layout.dtype if config.dtype == "auto" else config.dtype,
            seed=config.seed,
            max_model_len=self._awake.engine.max_model_len,
            quantization=config.quantization,
            enforce_eager=config.enforce_eager,
            max_logprobs=config.max_logprobs,
        )

    def get_parallel_config(self) -> ParallelConfig:
        """Return over how many devices the model is split, by tensor and by pipeline parallelism."""
        config = self._config
        return ParallelConfig(
            tensor_parallel_size=config.tensor_parallel_size, pipeline_parallel_size=config.pipeline_parallel_size
        )

    def get_scheduler_config(self) -> OfflineSchedulerConfig:
        """Return how many sequences and tokens one step may have, under vLLM's names."""
        limits = self._awake.engine.limits
        return OfflineSchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )

    def get_lora_config(self) -> LoRAConfig | None:
        """Return how many LoRA adapters one step may have and their largest rank, or None without `enable_lora`."""
        config = self._config
        return LoRAConfig(config.max_loras, config.max_lora_rank) if config.enable_lora else None

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, an object of transformers. Raises `ConfigError` with `skip_tokenizer_init`."""
        return checked_tokenizer(self.tokenizer)

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that give none: vLLM's defaults, changed by the model's
        generation_config.json."""
        return default_params(self._generation.defaults)

    def close(self) -> None:
        """Free the model and its memory. No other method may be called after it."""
        if self._loaded is not None:
            self._loaded.engine.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
