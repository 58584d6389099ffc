"""What all endpoints share: the served model, its limits in this cluster, and the way to the instances."""

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


@coroutine
def _yield_to_loop() -> Generator[None, None, None]:
    """`asyncio.sleep(0)` without its questions."""
    yield


class ModelService:
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
        self._block_hashes_of = -1
        self._known_names: list[str] = []
        self._adapters_of = -1
        self._known_adapters: dict[str, AdapterRecord] = {}
        self._is_known_of = -1
        self._is_known = False
        self._num_early = 0
        self._max_early = settings.max_concurrent_requests
        self._limits_of = -1
        self._known_limits: ModelLimits | None = None
        self.own_names = self._names.own()
        self.siblings: list[ModelService] = [self]
        """All models of this router, this one included."""

    @staticmethod
    def now() -> int:
        """Seconds since 1970, for answers."""
        return int(time.time())

    def of(self, asked: str | None) -> "ModelService":
        """The one that serves the model of this name; this one for no name. Raises `ModelNotFoundError`."""
        if asked is None or len(self.siblings) == 1:
            return self
        for sibling in self.siblings:
            if asked in sibling.names() or asked in sibling.adapters():
                return sibling
        served = [name for sibling in self.siblings for name in (*sibling.names(), *sibling.adapters())]
        raise ModelNotFoundError(f"the model {asked!r} does not exist; served: {', '.join(served)}", param="model")

    async def serving(self, asked: str | None) -> "ModelService":
        """`of`, once an instance of the model is known: a router that has just started waits as for one lost."""
        if not all([sibling.is_known() for sibling in self.siblings]) and self._num_early < self._max_early:
            self._num_early += 1
            try:
                await self.cluster.wait_until(
                    lambda: self._has_instances(asked), within_s=self.settings.instance_wait_s
                )
            finally:
                self._num_early -= 1
        return self.of(asked)

    def is_known(self) -> bool:
        """Whether the router knows an instance of this model."""
        if self._is_known_of != self.cluster.version:
            self._is_known_of = self.cluster.version
            self._is_known = bool(self.workers())
        return self._is_known

    def _has_instances(self, asked: str | None) -> bool:
        """Of the model of this name; of every model while the name is unknown: an instance may bring it."""
        named = [sibling for sibling in self.siblings if asked in sibling.names() or asked in sibling.adapters()]
        meant = [self] if asked is None or len(self.siblings) == 1 else named or self.siblings
        return all(sibling.is_known() for sibling in meant)

    def workers(self) -> list[WorkerState]:
        """Instances of this model: all of them, where the router serves no other."""
        workers = self.cluster.workers()
        if len(self.siblings) == 1:
            return workers
        return [worker for worker in workers if serves_model(worker.record, self.own_names)]

    def only_names(self) -> frozenset[str] | None:
        """Those of this model, where the router serves others too."""
        return self.own_names if len(self.siblings) > 1 else None

    def names(self) -> list[str]:
        if self._block_hashes_of != self.cluster.version:
            self._block_hashes_of = self.cluster.version
            self._known_names = self._find_names()
        return self._known_names

    def adapters(self) -> dict[str, AdapterRecord]:
        """By name. Where instances disagree about one, that which most of them have."""
        if self._adapters_of != self.cluster.version:
            self._adapters_of = self.cluster.version
            self._known_adapters = most_common_adapters([worker.record.adapters for worker in self.workers()])
        return self._known_adapters

    def _find_names(self) -> list[str]:
        advertised: list[str] = []
        for worker in self.workers():
            advertised += [worker.record.model, *worker.record.model_aliases]
        return self._names.all(advertised)

    def model_name(self, asked: str | None) -> str:
        """The name that the answer carries: an adapter's own. Raises `ModelNotFoundError`."""
        names = self.names()
        if asked is not None and asked not in names:
            if asked in (adapters := self.adapters()):
                return asked
            names = [*names, *adapters]
            raise ModelNotFoundError(f"the model {asked!r} does not exist; served: {', '.join(names)}", param="model")
        return names[0]

    def max_model_len(self) -> int | None:
        """Of the instances that are known; None when there is none and no setting says it."""
        lengths = [worker.record.max_model_len for worker in self.workers()]
        stated = self.settings.max_model_len
        return min([*lengths, *([stated] if stated is not None else [])], default=None)

    def pooling_profile(self) -> PoolingProfile:
        """Of a model that answers with vectors. Raises `BadRequestError` for one that writes text, and
        `UnavailableError` when no instance is known."""
        profiles = [worker.record.pooling for worker in self.workers()]
        found = next((profile for profile in profiles if profile is not None), None)
        if found is not None:
            return found
        if profiles:
            raise BadRequestError(
                "this model writes text and answers with no vectors: serve an embedding, scoring or classifying model,"
                " or start the instances with --task embed, score or classify",
                code="unsupported_endpoint",
            )
        raise UnavailableError("no instance is ready that computes vectors", retry_after_s=1.0)

    def limits(self) -> ModelLimits:
        """Raises `UnavailableError` when nothing is known of the context's length, and `BadRequestError` for a model
        that writes no text."""
        if self._known_limits is None or self._limits_of != self.cluster.version:
            self._known_limits = self._find_limits()
            self._limits_of = self.cluster.version
        return self._known_limits

    def _find_limits(self) -> ModelLimits:
        max_model_len = self.max_model_len()
        workers = self.workers()
        if workers and all(worker.record.pooling is not None for worker in workers):
            raise BadRequestError(
                "this model answers with vectors and writes no text: ask /v1/embeddings, /pooling, /score, /rerank or"
                " /classify",
                code="unsupported_endpoint",
            )
        if max_model_len is None:
            raise UnavailableError(
                "no instance is ready: the prefill, decode and unified pools are empty", retry_after_s=1.0
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
        """Of a request whose prompts have just become tokens."""
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
        """Raises `BadRequestError` for a text that is far too long, unless it is to be truncated.

        Returns in the next turn of the loop, so that requests that came together go through each half of their way
        together: what is done for several in a row takes a tenth less (docs/log/router.md).
        """
        keep = kept(truncate, limits)
        if keep is None:
            token_ids = await self.model.tokenize(
                text, add_special_tokens=add_special_tokens, max_tokens=limits.max_model_len
            )
        else:
            token_ids = await self.model.tokenize_end(text, add_special_tokens=add_special_tokens, num_tokens=keep)
        await _yield_to_loop()
        return token_ids

    def max_tokenised(self) -> int:
        """The most tokens that are answered with, or counted."""
        return max(MAX_TOKENISED, self.max_model_len() or 0)

    async def with_grammar(
        self, rules: TextRules, request: GenerationRequest, asked: GrammarSpec | None, exchange: Exchange | None
    ) -> TextRules:
        """`rules` with the form that the answer must have; compiling it ends when the client of `exchange` leaves.
        Raises `BadRequestError` for one that cannot be, and what `ServedModel.grammar` raises."""
        if asked is None and not request.bad_words:
            return rules
        grammar = None if asked is None else await while_connected(self.model.grammar(asked), exchange)
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
        """Sends the prompts on their way. Raises `ApiError`."""
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
        # Clients choose ids, and may choose one twice.
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

    def _lora_of(self, asked: str | None) -> str:
        """Fingerprint of the adapter that a request names, if it names one."""
        if asked is None or asked in self.names():
            return ""
        adapter = self.adapters().get(asked)
        if adapter is None:  # it has left since
            raise ModelNotFoundError(f"the model {asked!r} does not exist any more", param="model")
        return adapter.fingerprint

    def _beam_plan(
        self, request: GenerationRequest, requests: Sequence[PromptRequest], rules: TextRules, size: SequenceCounts
    ) -> BeamPlan:
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
            num_alternatives=max(2 * size.width, rules.logprobs or 0),
            logprobs=rules.logprobs,
            write=lambda: SequenceWriter(self.model.detokenizer, rules),
            timeout_s=self.settings.request_timeout_s,
        )

    def slo(self, context: RequestContext) -> Slo:
        """What the request says, else what the settings say for this model."""
        ttft_ms, itl_ms = self.settings.default_ttft_ms, self.settings.default_itl_ms
        if ttft_ms is None and itl_ms is None:
            return context.slo
        ttft_s, itl_s = context.slo.ttft_s, context.slo.itl_s
        return Slo(
            ttft_s if ttft_s is not None or ttft_ms is None else ttft_ms / 1e3,
            itl_s if itl_s is not None or itl_ms is None else itl_ms / 1e3,
        )

    def _log(self, requests: Sequence[PromptRequest]) -> None:
        """Only where it was asked for: prompts are nobody else's business."""
        for prompt_request in requests:
            prompt = self.model.detokenizer.text(prompt_request.token_ids, skip_special_tokens=False)
            extra = {"request_id": prompt_request.request_id, "prompt": prompt[: self.settings.max_log_len]}
            logger.info("request received", extra={**extra, "prompt_tokens": len(prompt_request.token_ids)})
