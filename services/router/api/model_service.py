"""Serve one model to all endpoints: its limits in this cluster, tokenization, and the way to its instances."""

import random
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import coroutine
from typing import get_args

import msgspec

from baton_serve.contracts.instance import Role
from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.api.generation_starter import GenerationStarter
from baton_serve.services.router.api.model_view import ModelView
from baton_serve.services.router.cluster.adapter_folder import AdapterFolder
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.protocol.asgi import RequestContext, while_connected
from baton_serve.services.router.protocol.caller import Slo
from baton_serve.services.router.protocol.errors import BadRequestError, ModelNotFoundError, UnavailableError
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.protocol.request_bounds import MAX_TOKENISED
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.pooling_dispatcher import PoolingDispatcher
from baton_serve.services.router.requests.prompt_request import RequestTiming
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.grammar import GrammarSpec
from baton_serve.services.router.text.message_reader import MessageFormats
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt
from baton_serve.services.router.text.prompt_length import Truncation
from baton_serve.services.router.text.sampling_params import ModelLimits, TextRules
from baton_serve.services.router.text.served_model import ServedModel
from baton_serve.services.router.text.speech.cutter_processes import AudioCutter


@coroutine
def _yield_to_loop() -> Generator[None, None, None]:
    """Let other tasks of the event loop run once, like `asyncio.sleep(0)` but faster, because it checks nothing."""
    yield


def _pool_size(view: ModelView, role: str) -> int:
    return sum(one.record.role == role and one.state == "ready" and one.takes_work for one in view.instances())


def _audio_cutter(settings: RouterSettings, model: ServedModel) -> AudioCutter | None:
    """Return the decoder of audio for a model; None if it reads no audio."""
    if model.speech is not None:
        return AudioCutter(settings.cutter_limits(model.speech.rate_hz, model.speech.window_s))
    sounds = None if model.vision is None else model.vision.audio
    return None if sounds is None else AudioCutter(settings.sound_limits(sounds))


class ModelService:
    """Serves one model of the router: checks requests against the model's limits and starts their generations.

    `Models` owns one service per model from start to stop. Endpoints get the service of the default model, and find
    another one with `of` or `serving`. `view` describes the model's instances. All methods run on the event loop.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        model: ServedModel,
        cluster: Cluster,
        dispatcher: Dispatcher,
        pooling: PoolingDispatcher,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.model = model
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.pooling = pooling
        self.metrics = metrics
        self.clock = clock
        self.message_formats = MessageFormats(settings)
        self.image_limits = settings.image_limits
        self.image_memory = ImageMemory(
            settings.max_image_memory_bytes,
            cache_bytes=int(settings.mm_processor_cache_gb * (1 << 30)),
            has_several_owners=dispatcher.has_several_owners,
        )
        self.audio_cutter = _audio_cutter(settings, model)
        """Decodes the audio files of clients; None if the model neither transcribes audio nor hears it in chats."""
        self.started_at = self.now()
        self.view = ModelView(settings, cluster)
        for role in get_args(Role):
            metrics.pool_instances(role).set_function(partial(_pool_size, self.view, role))
        self._starter = GenerationStarter(
            settings, model=model, view=self.view, dispatcher=dispatcher, metrics=metrics, clock=clock
        )
        # Requests that wait for the first instance are not counted by the dispatcher yet, so they have their own bound.
        self._num_early = 0
        self._seeds = random.Random(settings.seed)
        self._max_early = settings.max_concurrent_requests
        self._limits_version = -1
        self._known_limits: ModelLimits | None = None
        self.adapter_folder: AdapterFolder | None = None
        """Loads adapters at the first request for them; only the default model's service has it."""
        self.siblings: list[ModelService] = [self]
        """The services of all models of this router, this one included."""

    def join(self, siblings: "list[ModelService]") -> None:
        """Connect this service with the services of the router's other models, so that `of` finds them. `siblings` are
        all of them, this service included. Call it before the first request.
        """
        self.siblings = siblings
        self.image_memory = siblings[0].image_memory  # its limits are those of the process
        self.view.shares_router = len(siblings) > 1

    @property
    def tokens_as_ids(self) -> bool:
        """True if tokens in logprobs are written as `token_id:N`, unless the request says otherwise
        (`--return-tokens-as-token-ids`).
        """
        return self.settings.return_tokens_as_token_ids or self.settings.skip_tokenizer_init

    @staticmethod
    def now() -> int:
        """Return the time in seconds since 1970, for the `created` field of answers."""
        return int(time.time())

    def of(self, requested: str | None) -> "ModelService":
        """Return the service of the model or adapter of this name, or this service if `requested` is None.

        Raises `ModelNotFoundError` if no model of the router has the name.
        """
        # With a single model the name is checked later (`model_name`), as its names may depend on instances.
        if requested is None or len(self.siblings) == 1:
            return self
        for sibling in self.siblings:
            if requested in sibling.view.names() or requested in sibling.view.adapters():
                return sibling
        served = [name for sibling in self.siblings for name in (*sibling.view.names(), *sibling.view.adapters())]
        raise ModelNotFoundError(f"the model {requested!r} does not exist; served: {', '.join(served)}", param="model")

    async def serving(self, requested: str | None) -> "ModelService":
        """Return the service of the requested model, as `of` does, after waiting until an instance of that model is
        known; it waits at most `--instance-wait-s`.

        A router that has just started waits like this for its first instances. Raises `ModelNotFoundError`.
        """
        if not all([sibling.view.is_known() for sibling in self.siblings]) and self._num_early < self._max_early:
            self._num_early += 1
            try:
                await self.cluster.wait_until(
                    lambda: self._has_instances(requested), within_s=self.settings.instance_wait_s
                )
            finally:
                self._num_early -= 1
        if self.adapter_folder is not None and requested is not None:
            if self._is_served(requested):
                self.adapter_folder.on_use(requested)
            else:
                await self.adapter_folder.resolve(requested)
        return self.of(requested)

    def _is_served(self, name: str) -> bool:
        """Return whether one of the router's models or their adapters has this name."""
        return any(name in sibling.view.names() or name in sibling.view.adapters() for sibling in self.siblings)

    def _has_instances(self, requested: str | None) -> bool:
        """Return whether the router knows an instance of the requested model; None stands for the model of this
        service.

        If no model has the name, return whether each model has an instance: one that is missing may still bring an
        adapter of that name.
        """
        named = [
            sibling
            for sibling in self.siblings
            if requested in sibling.view.names() or requested in sibling.view.adapters()
        ]
        candidates = [self] if requested is None or len(self.siblings) == 1 else named or self.siblings
        return all(sibling.view.is_known() for sibling in candidates)

    def limits(self) -> ModelLimits:
        """Return the model's limits for requests that generate text, such as the context length. Raises
        `UnavailableError` if the context length is not known because no instance is connected, and `BadRequestError`
        for a pooling model, which generates no text.
        """
        if self._known_limits is None or self._limits_version != self.cluster.version:
            # The version is stored afterwards: if this raises, the next call must try again.
            self._known_limits = self._find_limits()
            self._limits_version = self.cluster.version
        return self._known_limits

    def _find_limits(self) -> ModelLimits:
        max_model_len = self.view.max_model_len()
        workers = self.view.workers()
        if workers and all(worker.record.pooling is not None for worker in workers):
            raise BadRequestError(
                "this model computes vectors and generates no text: use /v1/embeddings, /pooling, /score, /rerank or"
                " /classify",
                code="unsupported_endpoint",
            )
        if max_model_len is None:
            raise UnavailableError(
                "no instance is ready, the prefill, decode and unified pools are empty: retry later", retry_after_s=1.0
            )
        return ModelLimits(
            vocab_size=self.model.vocab_size,
            max_model_len=max_model_len,
            max_logprobs=self.settings.max_logprobs,
            max_sequences=self.settings.max_sequences,
            beam_search_max_tokens=self.settings.beam_search_max_tokens,
            generation=self.model.generation,
            seeds=self._seeds,
        )

    def timing(self, context: RequestContext, *, tokenizing_at: float) -> RequestTiming:
        """Return when a request arrived and was tokenized, with its SLO and its caller. Its tokenization started at
        `tokenizing_at` (seconds on the service's clock) and ended just now.
        """
        return RequestTiming(
            at=context.arrived_at,
            tokenizing_at=tokenizing_at,
            tokenized_at=self.clock(),
            trace_headers=context.trace_headers,
            caller=context.caller,
            slo=self.slo(context),
        )

    async def tokenize(
        self, text: str, limits: ModelLimits, *, add_special_tokens: bool, truncation: Truncation | None
    ) -> list[int]:
        """Return the token ids of a prompt's text. With `truncation`, only the end or beginning that it keeps, and a
        few tokens more, is tokenized: the caller still cuts the result. Raises `BadRequestError` for a text that is far
        too long, unless it is to be truncated.
        """
        # A text that is much too long is rejected or cut before all of it is tokenized, which could take seconds.
        if truncation is None:
            token_ids = await self.model.tokenize(
                text, add_special_tokens=add_special_tokens, max_tokens=limits.max_model_len
            )
        else:
            token_ids = await self.model.tokenize_part(text, truncation, add_special_tokens=add_special_tokens)
        # Requests that arrived together are all tokenized before the first of them is placed. Doing one kind of work
        # several times in a row takes a tenth less time than alternating (docs/log/router.md).
        await _yield_to_loop()
        return token_ids

    def max_tokenised(self) -> int:
        """Return the largest number of tokens that /tokenize and the endpoints that count tokens accept."""
        return max(MAX_TOKENISED, self.view.max_model_len() or 0)

    async def with_grammar(
        self, rules: TextRules, request: GenerationRequest, spec: GrammarSpec | None, context: RequestContext
    ) -> TextRules:
        """Return a copy of `rules` to which the compiled grammar of `spec` (None: no grammar) and the request's
        `bad_words` are added. Compiling can take long; it is cancelled if the client of `context` disconnects. Raises
        `BadRequestError` for a grammar that is not valid, and the other errors of `ServedModel.grammar`.
        """
        if spec is None and not request.bad_words:
            return rules
        grammar = None
        if spec is not None:
            grammar = await while_connected(self.model.grammar(spec, context.caller.name), context.exchange)
        bad_words = await self.model.bad_words(request.bad_words or ())
        return msgspec.structs.replace(rules, grammar=grammar, bad_words=bad_words)

    def generate(
        self,
        request: GenerationRequest,
        api_id: str,
        prompts: Sequence[TokenizedPrompt],
        rules: TextRules,
        limits: ModelLimits,
        *,
        timing: RequestTiming,
    ) -> TextGeneration:
        """Submit the prompts of an API call to the instances and return the source of its text deltas.

        `api_id` is the id of the answer; `rules` says how tokens become text; `limits` are those of the model. The
        caller must end the generation (`generation.ended`). Raises `ApiError` if the parameters do not fit the limits
        or the request is not admitted.
        """
        if rules.stop and self.settings.skip_tokenizer_init:
            raise BadRequestError(
                "this server has no tokenizer, so it cannot find stop strings: use stop_token_ids", param="stop"
            )
        return self._starter.start(request, api_id, prompts, rules, limits, timing=timing)

    def slo(self, context: RequestContext) -> Slo:
        """Return the SLO of a request: that of its headers, or else the model's default (`--default-ttft-ms`)."""
        ttft_ms, itl_ms = self.settings.default_ttft_ms, self.settings.default_itl_ms
        if ttft_ms is None and itl_ms is None:
            return context.slo
        ttft_s, itl_s = context.slo.ttft_s, context.slo.itl_s
        return Slo(
            ttft_s if ttft_s is not None or ttft_ms is None else ttft_ms / 1e3,
            itl_s if itl_s is not None or itl_ms is None else itl_ms / 1e3,
        )
