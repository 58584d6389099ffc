"""The class `LLM`: pairs prompts with SamplingParams, keeps the order of outputs, applies chat templates, refuses calls
that do not fit the model. All work runs in the caller's thread; outputs have the order of the inputs.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

from torch import Tensor
from torch.nn import functional

from baton_serve.contracts import pooling
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.offline.engine_args import EngineArgs, open_model
from baton_serve.engine.offline.llm_engine import LLMEngine
from baton_serve.engine.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Metric,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    VectorRequestOutput,
)
from baton_serve.engine.offline.pooler import OfflinePooler
from baton_serve.engine.offline.progress import PromptProgressBar
from baton_serve.engine.offline.prompts import ParsedPrompt, Prompts, checked_tokenizer, parse_prompts
from baton_serve.engine.offline.request_params import BeamSearchParams, PoolingParams, SamplingParams, default_params
from baton_serve.engine.offline.requested_adapters import LoRARequest, LoRARequests
from baton_serve.engine.pooling.engine import PoolingEngine

Messages = list[dict[str, Any]]


class LLM:
    """A model in this process that answers lists of prompts: `LLM("/models/llama").generate("Hello")`.

    Use it as a context manager or call `close` at the end. Not thread-safe.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        """Load the model, which takes seconds to minutes. `tokenizer` is another folder to take the tokenizer from;
        None: that of the model.

        `options` are the fields of `EngineConfig` and vLLM's names for them. Raises `ConfigError`, `ModelError`,
        `CapacityError` or `AdapterError`.
        """
        found = open_model(EngineArgs(model, tokenizer=tokenizer, **options))
        self._tokenizer = found.tokenizer
        self._generation = found.generation
        self._num_requests = 0
        self._pooler: OfflinePooler | None = None
        if found.kind == "generate":
            self._engine: LLMEngine | PoolingEngine = LLMEngine(found)
        else:
            checked_tokenizer(found.tokenizer)
            # Checked before the weights are loaded, which may take minutes.
            if found.config.enable_lora:
                raise ConfigError("enable_lora: LoRA adapters are supported for models that generate text only")
            self._engine = PoolingEngine(found.config, found.kind)
            self._pooler = OfflinePooler(self._engine, found)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        inputs: Prompts | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate an answer for each prompt, given as text, token ids or dicts, or as `prompt_token_ids`. `inputs` is
        vLLM's older name of `prompts`.

        `sampling_params` and `lora_request` are one for all prompts, or a list with one for each; without them, the
        model's defaults and no adapter. Lower values of `priority` run first. Raises `RequestError`, `ConfigError` or
        `AdapterError`; then no prompt is answered.
        """
        given = _parse_either(prompts if inputs is None else inputs, prompt_token_ids)
        chosen = self._params(sampling_params, len(given))
        return self._generate(given, chosen, use_tqdm, lora_request, priority, add_special_tokens=True)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search the most likely answers to each prompt with `params.beam_width` beams.

        The setting `max_logprobs` must be at least twice the width. Raises the same errors as `generate`.
        """
        given = parse_prompts(prompts)
        outputs = self._generate(
            given, [params.sampling()] * len(given), use_tqdm, lora_request, None, add_special_tokens=True
        )
        return [self._beams(output, include_end=params.include_stop_str_in_output) for output in outputs]

    def chat(  # noqa: PLR0913 - vLLM's signature
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, formatted with `chat_template`, or if it is None with the model's own.
        The other arguments are those of vLLM.

        Images are parts of type `image_url` (a data: or file: URL) or `image_pil` (a Pillow image), and videos of type
        `video_url`. `mm_processor_kwargs` replaces settings of the model's image processor. Raises the same errors as
        `generate`, and `ConfigError` if the model has no chat template or if a message has other parts.
        """
        # One conversation is a list of dicts, several are a list of lists.
        chats: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        from baton_serve.engine.offline.images import chat_with_media  # loads Pillow

        with_files = [chat_with_media(chat) for chat in chats]
        if chat_template is None and self.get_tokenizer().chat_template is None:
            raise ConfigError("the model has no chat template; give chat_template")
        texts = [
            self.get_tokenizer().apply_chat_template(
                chat,
                tokenize=False,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for chat, _ in with_files
        ]
        chosen = self._params(sampling_params, len(texts))
        # The template has written the special tokens already; the tokenizer would add a second BOS token.
        settings = mm_processor_kwargs or {}
        given = [ParsedPrompt(text, None, files, settings) for text, (_, files) in zip(texts, with_files, strict=True)]
        return self._generate(given, chosen, use_tqdm, lora_request, None, add_special_tokens=False)

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        pooling_task: pooling.PoolingTask | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return the result of a pooling model for each input: an embedding, or the scores of classes. Inputs are
        `prompts` or `prompt_token_ids`.

        With the task `token_embed` each output has one row per token. `pooling_task` None takes the first task that the
        model supports, and `pooling_params` None the model's defaults. Raises `ConfigError` or `RequestError`.
        """
        params = pooling_params or PoolingParams()
        inputs = self._inputs(_parse_either(prompts, prompt_token_ids), params.truncate_prompt_tokens)
        task = pooling_task or self._require_pooler().engine.profile.tasks[0]
        found = self._pool(inputs, task, params, use_tqdm)
        return _outputs(inputs, [PoolingOutput(vector) for vector in found])

    def embed(
        self, prompts: Prompts, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Return one embedding for each prompt. `pooling_params` None takes the model's defaults. Raises `ConfigError`
        if the model computes no embeddings."""
        params = pooling_params or PoolingParams()
        inputs = self._inputs(parse_prompts(prompts), params.truncate_prompt_tokens)
        found = self._pool(inputs, "embed", params, use_tqdm)
        return _outputs(inputs, [EmbeddingOutput(vector.tolist()) for vector in found])

    def classify(
        self, prompts: Prompts, *, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class for each prompt. `pooling_params` None takes the model's defaults.
        Raises `ConfigError` if the model has no classifier."""
        params = pooling_params or PoolingParams()
        inputs = self._inputs(parse_prompts(prompts), params.truncate_prompt_tokens)
        found = self._pool(inputs, "classify", params, use_tqdm)
        return _outputs(inputs, [ClassificationOutput(vector.tolist()) for vector in found])

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts match. `text_1` and `text_2` are two texts, one text and a list, or two lists of equal
        length, whose texts are paired. `truncate_prompt_tokens` cuts longer inputs; None: they are refused.

        A cross-encoder scores each pair; with an embedding model the score is the cosine of the two embeddings. Raises
        `ConfigError` if the numbers of texts do not fit, or if the model can do neither.
        """
        first, second = _paired(text_1, text_2)
        pooler = self._require_pooler()
        if "embed" in pooler.engine.profile.tasks:
            return self._cosines(first, second, truncate_prompt_tokens, use_tqdm)
        if len(pooler.engine.profile.labels) != 1:
            raise ConfigError(f"score needs 1 class, not {len(pooler.engine.profile.labels)}: use classify")
        inputs = pooler.pairs(first, second, truncate_prompt_tokens)
        found = self._pool(inputs, "classify", PoolingParams(), use_tqdm)
        return _outputs(inputs, [ScoringOutput(float(vector)) for vector in found])

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine that generates text, with vLLM's engine interface. Raises `ConfigError` for a pooling model."""
        if not isinstance(self._engine, LLMEngine):
            raise ConfigError("this is a pooling model: use embed, classify, score or encode")
        return self._engine

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, an object of transformers. Raises `ConfigError` with `skip_tokenizer_init`."""
        return checked_tokenizer(self._tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that give none: vLLM's defaults, changed by the model's
        generation_config.json."""
        return default_params(self._generation.defaults)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters and gauges, under vLLM's names. Raises `ConfigError` for a pooling model."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV blocks. Return True if no cached block is left."""
        return self.llm_engine.reset_prefix_cache()

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the model's weights to the folder `path` in the format of `load_format="sharded_state"`, divided for
        `tensor_parallel_size` ranks.

        `pattern` is how the files are named, with `{rank}` and `{part}`; None: as in vLLM. `max_size` is the largest
        size of a file in bytes; None: one file for each rank. Raises `ConfigError` or `ModelError`.
        """
        self.llm_engine.save_sharded_state(path, pattern, max_size)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the weights and of the KV cache until `wake_up`.

        `level` makes no difference, unlike in vLLM: the weights are always read again from their files, which the
        system usually still has in memory. Raises `ConfigError` for a pooling model.
        """
        if level not in (1, 2):
            raise ConfigError(f"sleep: level is {level}; give 1 or 2")
        self.llm_engine.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again after `sleep`. Raises `ConfigError` if `tags` is given: weights and KV cache can only
        return together."""
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise ConfigError(f"wake_up: tags {list(tags)} cannot be loaded alone; call it without tags")
        self.llm_engine.wake_up()

    def start_profile(self) -> None:
        """Start a recording with torch's profiler, to be written to the folder in the variable VLLM_TORCH_PROFILER_DIR.
        Raises `ConfigError` if it is not set or the folder cannot be made, and `UsageError` if a recording runs."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        """End the recording of `start_profile`, and write the trace. Raises `UsageError` if no recording runs."""
        self.llm_engine.stop_profile()

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        """Raise `ConfigError`: vLLM calls a method of its worker objects here, which this engine does not have."""
        raise ConfigError(f"collective_rpc({method!r}): the engine has no vLLM workers; use the methods of `LLM`")

    def close(self) -> None:
        """Free the model and its memory. No other method may be called after it."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        given: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: LoRARequests,
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        """Queue all prompts, run steps until all have ended, and return their outputs in the order of the prompts. The
        other arguments are those of `generate`; `add_special_tokens` False is for texts of a chat template.

        Raises `RequestError` for a prompt that cannot be served, before any prompt is computed.
        """
        engine = self.llm_engine
        if priority is not None and len(priority) != len(given):
            raise ConfigError(f"priority has {len(priority)} entries for {len(given)} prompts")
        # Load all adapters before the first request is added: if one fails, nothing has to be undone.
        adapters = _adapters(lora_request, len(given))
        engine.load_adapters(adapters)
        # Ids are numbered over all calls, because the engine rejects an id that is still in use.
        ids = [str(self._num_requests + number) for number in range(len(given))]
        self._num_requests += len(ids)
        try:
            for number, (prompt, asked) in enumerate(zip(given, params, strict=True)):
                engine.add(
                    ids[number],
                    prompt,
                    asked,
                    lora_request=adapters[number],
                    priority=0 if priority is None else priority[number],
                    add_special_tokens=add_special_tokens,
                )
            with PromptProgressBar(len(ids), shown=use_tqdm) as progress:
                outputs = self._run(engine, set(ids), progress)
        finally:
            # Ids that have ended already are ignored. After an error this ends all other requests of the call.
            engine.abort_request(ids)
        return [outputs[request_id] for request_id in ids]

    def _run(self, engine: LLMEngine, running: set[str], progress: PromptProgressBar) -> dict[str, RequestOutput]:
        """Run steps until the requests with the ids `running` have ended, and return their outputs by id. Raises the
        error of the first request that fails."""
        found: dict[str, RequestOutput] = {}
        while len(found) < len(running):
            stepped = engine.advance()
            # vLLM's `generate` has no partial result: the first failure ends the call.
            for error in stepped.failed.values():
                raise error
            for request_id in running.intersection(stepped.ended):
                output = found[request_id] = engine.take(request_id)
                progress.done(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in output.outputs))
        return found

    def _beams(self, output: RequestOutput, *, include_end: bool) -> BeamSearchOutput:
        """Return the result of a beam search, which the engine has returned as `n` sequences. `include_end` keeps the
        token that ended a beam."""
        sequences: list[BeamSearchSequence] = []
        for found in output.outputs:
            assert found.logprobs is not None and found.cumulative_logprob is not None
            # vLLM leaves out the end token unless asked for it.
            hides_end = found.finish_reason == "stop" and not include_end
            tokens = output.prompt_token_ids + (found.token_ids[:-1] if hides_end else found.token_ids)
            sequence = BeamSearchSequence(
                tokens=tokens,
                text="" if self._tokenizer is None else self._tokenizer.decode(tokens),
                logprobs=found.logprobs,
                cum_logprob=found.cumulative_logprob,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
                lora_request=output.lora_request,
            )
            sequences.append(sequence)
        return BeamSearchOutput(sequences)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            # Sharing one object is safe, because requests never change their parameters.
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ConfigError(f"there are {len(given)} sampling_params for {count} prompts")
        return list(given)

    def _require_pooler(self) -> OfflinePooler:
        if self._pooler is None:
            raise ConfigError("this model generates text: use generate or chat, or load it with task='embed'")
        return self._pooler

    def _inputs(self, given: Sequence[ParsedPrompt], truncate: int | None) -> list[pooling.PoolingInput]:
        return self._require_pooler().inputs(given, truncate)

    def _pool(
        self, inputs: Sequence[pooling.PoolingInput], task: pooling.PoolingTask, params: PoolingParams, shown: bool
    ) -> list[Tensor]:
        with PromptProgressBar(len(inputs), shown=shown) as progress:
            return self._require_pooler().pool(inputs, task, params, progress)

    def _cosines(
        self, first: Sequence[str], second: Sequence[str], truncate: int | None, shown: bool
    ) -> list[ScoringRequestOutput]:
        # Compute the embedding of a text that is in several pairs only once.
        """Return the score of each pair `first[i]`, `second[i]`: the cosine of their embeddings. `truncate` cuts texts
        to this number of tokens; `shown` shows a progress bar."""
        texts = list(dict.fromkeys([*first, *second]))
        inputs = dict(zip(texts, self._inputs([ParsedPrompt(text, None) for text in texts], truncate), strict=True))
        found = dict(zip(texts, self._pool(list(inputs.values()), "embed", PoolingParams(), shown), strict=True))
        pairs = list(zip(first, second, strict=True))
        scores = [float(functional.cosine_similarity(found[a], found[b], dim=0)) for a, b in pairs]
        # vLLM reports the tokens of both texts for a pair.
        joined = [pooling.PoolingInput(inputs[a].token_ids + inputs[b].token_ids) for a, b in pairs]
        return _outputs(joined, [ScoringOutput(score) for score in scores])


def _outputs(inputs: Sequence[pooling.PoolingInput], found: Sequence[Any]) -> list[VectorRequestOutput[Any]]:
    return [
        VectorRequestOutput(request_id=str(number), outputs=output, prompt_token_ids=given.token_ids)
        for number, (given, output) in enumerate(zip(inputs, found, strict=True))
    ]


def _parse_either(prompts: Prompts | None, prompt_token_ids: list[int] | list[list[int]] | None) -> list[ParsedPrompt]:
    if (prompts is None) == (prompt_token_ids is None):
        raise ConfigError("give either prompts or prompt_token_ids")
    return parse_prompts(prompts if prompts is not None else cast(Prompts, prompt_token_ids))


def _paired(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists of equal length, whose texts are paired; a single first text is repeated. Raises `ConfigError`
    for other numbers of texts."""
    first = [text_1] if isinstance(text_1, str) else list(text_1)
    second = [text_2] if isinstance(text_2, str) else list(text_2)
    # One query against many documents is the usual form of reranking.
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ConfigError(f"score: {len(first)} and {len(second)} texts; give 1 and 1, 1 and N, or N and N")
    return first, second


def _adapters(given: LoRARequests, count: int) -> list[LoRARequest | None]:
    adapters = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
    if len(adapters) != count:
        raise ConfigError(f"there are {len(adapters)} lora_requests for {count} prompts")
    return adapters
