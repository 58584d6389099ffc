"""The service of one model, which all endpoints share: its names and limits in this cluster, and the way to its
instances.
"""

import logging
import random
import time
from collections.abc import Callable, Generator, Sequence
from types import coroutine

import msgspec

from baton_serve.contracts.beam_search import BeamRules, BeamSearch
from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.common.http.exchange import Exchange
from baton_serve.services.router.api.beam_search import BeamGeneration, BeamPlan
from baton_serve.services.router.api.best_of import BestOfGeneration
from baton_serve.services.router.api.generation import SampledGeneration, TextGeneration
from baton_serve.services.router.cluster.adapters import most_common_adapters
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.routable import serves_model
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.asgi import RequestContext, while_connected
from baton_serve.services.router.protocol.caller import Slo
from baton_serve.services.router.protocol.errors import BadRequestError, ModelNotFoundError, UnavailableError
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.protocol.sizes import MAX_TOKENISED
from baton_serve.services.router.quota.priority import allowed
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.pooling_dispatcher import PoolingDispatcher
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestTiming
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.grammar import GrammarSpec
from baton_serve.services.router.text.message_reader import MessageFormats
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt
from baton_serve.services.router.text.sampling_params import (
    ModelLimits,
    SequenceCounts,
    TextRules,
    check_beams,
    kept,
    sampling_params,
    sequence_counts,
    token_rules,
    with_ranking_logprobs,
)
from baton_serve.services.router.text.served_model import ModelNames, ServedModel
from baton_serve.services.router.text.text_output import SequenceWriter

logger = logging.getLogger(__name__)

_random = random.Random()
"""Generates the unique parts of request ids. They need not be secret, and `secrets` would cost a system call."""


@coroutine
def _yield_to_loop() -> Generator[None, None, None]:
    """Suspend the task until the next turn of the event loop, like `asyncio.sleep(0)` but without its checks."""
    yield


class ModelService:
    """Serves one model of the router: checks requests against the model's limits and starts their generations.

    `Models` owns one service per model from start to stop; endpoints get the default model's and switch to another one
    with `of` or `serving`. All methods run on the event loop. Values that depend on the instances are computed again
    only if `cluster.version` has changed.
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
        self.started_at = self.now()
        self._names = ModelNames(settings)
        # Each cached value has the version of the cluster for which it was computed; -1: never.
        self._names_version = -1
        self._known_names: list[str] = []
        self._adapters_version = -1
        self._known_adapters: dict[str, AdapterRecord] = {}
        self._is_known_version = -1
        self._is_known = False
        # Requests that wait for the first instance are not counted by the dispatcher yet, so they have their own bound.
        self._num_early = 0
        self._max_early = settings.max_concurrent_requests
        self._limits_version = -1
        self._known_limits: ModelLimits | None = None
        self.own_names = self._names.own()
        self.siblings: list[ModelService] = [self]
        """The services of all models of this router, this one included; `Models` sets it."""

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
            if requested in sibling.names() or requested in sibling.adapters():
                return sibling
        served = [name for sibling in self.siblings for name in (*sibling.names(), *sibling.adapters())]
        raise ModelNotFoundError(f"the model {requested!r} does not exist; served: {', '.join(served)}", param="model")

    async def serving(self, requested: str | None) -> "ModelService":
        """Return `of(requested)`, after waiting until an instance of that model is known, at most `--instance-wait-s`.

        A router that has just started waits like this for its first instances. Raises `ModelNotFoundError`.
        """
        if not all([sibling.is_known() for sibling in self.siblings]) and self._num_early < self._max_early:
            self._num_early += 1
            try:
                await self.cluster.wait_until(
                    lambda: self._has_instances(requested), within_s=self.settings.instance_wait_s
                )
            finally:
                self._num_early -= 1
        return self.of(requested)

    def is_known(self) -> bool:
        """Return whether the router knows an instance of this model."""
        if self._is_known_version != self.cluster.version:
            self._is_known_version = self.cluster.version
            self._is_known = bool(self.workers())
        return self._is_known

    def _has_instances(self, requested: str | None) -> bool:
        """Return whether an instance of the requested model is known.

        If no model has the name, return whether instances of all models are known: one may still bring the name.
        """
        named = [
            sibling for sibling in self.siblings if requested in sibling.names() or requested in sibling.adapters()
        ]
        candidates = [self] if requested is None or len(self.siblings) == 1 else named or self.siblings
        return all(sibling.is_known() for sibling in candidates)

    def workers(self) -> list[WorkerState]:
        """Return the instances of this model."""
        workers = self.cluster.workers()
        # With a single model, instances need not carry the name that the router knows: the folder's path may differ
        # from host to host.
        if len(self.siblings) == 1:
            return workers
        return [worker for worker in workers if serves_model(worker.record, self.own_names)]

    def only_names(self) -> frozenset[str] | None:
        """Return the names to which requests must be restricted, or None if the router serves only this model."""
        return self.own_names if len(self.siblings) > 1 else None

    def names(self) -> list[str]:
        """Return the names under which clients may request the model; answers carry the first one."""
        if self._names_version != self.cluster.version:
            self._names_version = self.cluster.version
            self._known_names = self._find_names()
        return self._known_names

    def adapters(self) -> dict[str, AdapterRecord]:
        """Return the LoRA adapters of the model's instances by name, in the version that most instances have."""
        if self._adapters_version != self.cluster.version:
            self._adapters_version = self.cluster.version
            self._known_adapters = most_common_adapters([worker.record.adapters for worker in self.workers()])
        return self._known_adapters

    def _find_names(self) -> list[str]:
        advertised: list[str] = []
        for worker in self.workers():
            advertised += [worker.record.model, *worker.record.model_aliases]
        return self._names.all(advertised)

    def model_name(self, requested: str | None) -> str:
        """Return the name that the answer carries: the model's first one, or the name of the requested adapter.

        Raises `ModelNotFoundError` if neither the model nor an adapter has the requested name.
        """
        names = self.names()
        if requested is not None and requested not in names:
            if requested in (adapters := self.adapters()):
                return requested
            names = [*names, *adapters]
            raise ModelNotFoundError(
                f"the model {requested!r} does not exist; served: {', '.join(names)}", param="model"
            )
        return names[0]

    def max_model_len(self) -> int | None:
        """Return the largest number of tokens of prompt and answer that all known instances accept.

        `--max-model-len` may lower it. Return None if no instance is known and the setting is not given.
        """
        lengths = [worker.record.max_model_len for worker in self.workers()]
        stated = self.settings.max_model_len
        return min([*lengths, *([stated] if stated is not None else [])], default=None)

    def pooling_profile(self) -> PoolingProfile:
        """Return what a pooling model computes: its tasks, dimensions and labels.

        Raises `BadRequestError` for a model that generates text, and `UnavailableError` if no instance is known.
        """
        profiles = [worker.record.pooling for worker in self.workers()]
        found = next((profile for profile in profiles if profile is not None), None)
        if found is not None:
            return found
        if profiles:
            raise BadRequestError(
                "this model generates text and computes no vectors: serve an embedding, scoring or classification"
                " model, or start the instances with --task embed, score or classify",
                code="unsupported_endpoint",
            )
        raise UnavailableError("no instance that computes vectors is ready: retry later", retry_after_s=1.0)

    def limits(self) -> ModelLimits:
        """Return the limits that requests for generated text must keep.

        Raises `UnavailableError` if the length of the context is not known, because no instance is, and
        `BadRequestError` for a model that computes vectors.
        """
        if self._known_limits is None or self._limits_version != self.cluster.version:
            # The version is stored afterwards: if this raises, the next call must try again.
            self._known_limits = self._find_limits()
            self._limits_version = self.cluster.version
        return self._known_limits

    def _find_limits(self) -> ModelLimits:
        max_model_len = self.max_model_len()
        workers = self.workers()
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
            defaults=self.model.sampling_defaults,
        )

    def timing(self, context: RequestContext, *, tokenizing_at: float) -> RequestTiming:
        """Return the times of a request whose tokenization started at `tokenizing_at` and ended just now."""
        return RequestTiming(
            at=context.arrived_at,
            tokenizing_at=tokenizing_at,
            tokenized_at=self.clock(),
            trace_headers=context.trace_headers,
            caller=context.caller,
            slo=self.slo(context),
        )

    async def tokenize(
        self, text: str, limits: ModelLimits, *, add_special_tokens: bool, truncate: int | None
    ) -> list[int]:
        """Return the token ids of a prompt. With `truncate`, only about that number from its end are computed.

        Raises `BadRequestError` for a text that is far too long, unless it is to be truncated.
        """
        keep = kept(truncate, limits)
        # A text that is much too long is rejected or cut before all of it is tokenized, which could take seconds.
        if keep is None:
            token_ids = await self.model.tokenize(
                text, add_special_tokens=add_special_tokens, max_tokens=limits.max_model_len
            )
        else:
            token_ids = await self.model.tokenize_end(text, add_special_tokens=add_special_tokens, num_tokens=keep)
        # Requests that arrived together are all tokenized before the first of them is placed. Doing one kind of work
        # several times in a row takes a tenth less time than alternating (docs/log/router.md).
        await _yield_to_loop()
        return token_ids

    def max_tokenised(self) -> int:
        """Return the largest number of tokens that /tokenize and the endpoints that count tokens handle."""
        return max(MAX_TOKENISED, self.max_model_len() or 0)

    async def with_grammar(
        self, rules: TextRules, request: GenerationRequest, spec: GrammarSpec | None, exchange: Exchange | None
    ) -> TextRules:
        """Return `rules` with the grammar of `spec` and the request's `bad_words`.

        Compiling a grammar can take long; it is cancelled if the client of `exchange` disconnects. Raises
        `BadRequestError` for a grammar that is not valid, and the other errors of `ServedModel.grammar`.
        """
        if spec is None and not request.bad_words:
            return rules
        grammar = None if spec is None else await while_connected(self.model.grammar(spec), exchange)
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

        `api_id` is the id of the answer. The caller must end the generation (`generation.ended`). Raises `ApiError` if
        the parameters do not fit the limits or the request is not admitted.
        """
        if (priority := allowed(request.priority, timing.caller)) != (request.priority or 0):
            request = request.model_copy(update={"priority": priority})
        size = sequence_counts(request, len(prompts), limits)
        check_beams(request, size.width, rules, limits)
        requests = self._prompt_requests(request, api_id, prompts, rules, limits, size)
        if request.use_beam_search:
            plan = self._beam_plan(request, requests, rules, size)
            return BeamGeneration(plan, self.dispatcher.submit, timing=timing, clock=self.clock)
        token_queue = TokenQueue()
        writers = [SequenceWriter(self.model.detokenizer, rules) for _ in range(size.width * len(prompts))]
        lifecycles = self.dispatcher.submit(requests, token_queue, timing=timing)
        generation = SampledGeneration(lifecycles, token_queue, writers, metrics=self.metrics, clock=self.clock)
        if size.width == size.count:
            return generation
        return BestOfGeneration(generation, count=size.count, keeps_logprobs=rules.logprobs is not None)

    def _prompt_requests(
        self,
        request: GenerationRequest,
        api_id: str,
        prompts: Sequence[TokenizedPrompt],
        rules: TextRules,
        limits: ModelLimits,
        size: SequenceCounts,
    ) -> list[PromptRequest]:
        # Instances need unique ids, but clients may choose ids (x-request-id) and use one twice.
        unique = f"{api_id}-{_random.getrandbits(32):08x}"
        tokens = token_rules(request, rules, limits, num_prompts=len(prompts))
        requests = [
            PromptRequest(
                request_id=f"{unique}-{i}" if len(prompts) > 1 else unique,
                token_ids=prompt.token_ids,
                media=prompt.media,
                images=prompt.images,
                sampling=with_ranking_logprobs(
                    sampling_params(request, len(prompt.token_ids), rules, tokens, limits), size
                ),
                num_sequences=size.width,
                first_choice=i * size.width,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                model=self.only_names(),
                lora=self._lora_of(request.model),
            )
            for i, prompt in enumerate(prompts)
        ]
        if self.settings.enable_log_requests:
            self._log(requests)
        return requests

    def _lora_of(self, requested: str | None) -> str:
        """Return the fingerprint of the adapter that a request names, or an empty string if it names none."""
        if requested is None or requested in self.names():
            return ""
        adapter = self.adapters().get(requested)
        # The adapter was there when the request was checked (`model_name`), and was unloaded during tokenization.
        if adapter is None:
            raise ModelNotFoundError(f"the model {requested!r} does not exist any more", param="model")
        return adapter.fingerprint

    def _beam_plan(
        self, request: GenerationRequest, requests: Sequence[PromptRequest], rules: TextRules, size: SequenceCounts
    ) -> BeamPlan:
        """Return the plan of a request with beam search: one search for each prompt."""
        eos = frozenset() if request.ignore_eos else self.model.eos_token_ids
        searches = [
            BeamSearch(
                BeamRules(
                    width=size.width,
                    max_tokens=prompt_request.sampling.max_tokens,
                    ends=eos | rules.stop_token_ids,
                    length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
                    early_stopping=request.early_stopping or False,
                ),
                num_prompt_tokens=len(prompt_request.token_ids),
            )
            for prompt_request in requests
        ]
        return BeamPlan(
            requests=requests,
            searches=searches,
            count=size.count,
            # Twice the width, as in vLLM: even if the most likely token of every beam ends it, enough beams go on.
            num_alternatives=max(2 * size.width, rules.logprobs or 0),
            logprobs=rules.logprobs,
            write=lambda: SequenceWriter(self.model.detokenizer, rules),
            timeout_s=self.settings.request_timeout_s,
        )

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

    def _log(self, requests: Sequence[PromptRequest]) -> None:
        """Log the prompts of requests. Call it only with `--enable-log-requests`, because prompts are confidential."""
        for prompt_request in requests:
            prompt = self.model.detokenizer.text(prompt_request.token_ids, skip_special_tokens=False)
            extra = {"request_id": prompt_request.request_id, "prompt": prompt[: self.settings.max_log_len]}
            logger.info("request received", extra={**extra, "prompt_tokens": len(prompt_request.token_ids)})
