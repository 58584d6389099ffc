"""Start the generation of an API call: sampled, `best_of` or beam search, with one request to the instances per
prompt.
"""

import logging
import random
from collections.abc import Callable, Sequence

from baton_serve.contracts.beam_search import BeamRules, BeamSearch
from baton_serve.services.router.api.beam_search import BeamGeneration, BeamPlan
from baton_serve.services.router.api.best_of import BestOfGeneration
from baton_serve.services.router.api.generation import SampledGeneration, TextGeneration
from baton_serve.services.router.api.model_view import ModelView
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.quota.api_keys import allowed
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestTiming
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt
from baton_serve.services.router.text.sampling_params import (
    ModelLimits,
    SequenceCounts,
    TextRules,
    check_beams,
    check_num_prompt_logprobs,
    sampling_params,
    sequence_counts,
    token_rules,
    with_ranking_logprobs,
)
from baton_serve.services.router.text.served_model import ServedModel
from baton_serve.services.router.text.text_output import SequenceWriter

logger = logging.getLogger(__name__)

_random = random.Random()
"""Generates the unique parts of request ids. They need not be secret, and `secrets` would cost a system call."""


class GenerationStarter:
    """Starts the text generation of API calls for one model: sampled, `best_of`, or beam search.

    `ModelService` owns it as long as the router runs. It keeps no state between requests.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        model: ServedModel,
        view: ModelView,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._model = model
        self._view = view
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock

    def start(
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
        # Copied only if it changes: most requests ask for no priority, and copying a request costs time.
        if (priority := allowed(request.priority, timing.caller)) != (request.priority or 0):
            request = request.model_copy(update={"priority": priority})
        size = sequence_counts(request, len(prompts), limits)
        check_beams(request, size.width, rules, limits)
        # With `--prefix-cache-sharing per-key` the request's own salt is mixed with that of the API key's owner.
        salt = timing.caller.salt_of(request.cache_salt)
        requests = self._prompt_requests(request, api_id, prompts, rules, limits, size, cache_salt=salt)
        if request.use_beam_search:
            plan = self._beam_plan(request, requests, rules, size)
            return BeamGeneration(plan, self._dispatcher.submit, timing=timing, clock=self._clock)
        # One queue for all prompts: the client gets their tokens in one stream, in order of arrival.
        token_queue = TokenQueue()
        writers = [SequenceWriter(self._model.detokenizer, rules) for _ in range(size.width * len(prompts))]
        lifecycles = self._dispatcher.submit(requests, token_queue, timing=timing)
        generation = SampledGeneration(lifecycles, token_queue, writers, metrics=self._metrics, clock=self._clock)
        # `best_of` computes more sequences per prompt (`width`) than it returns (`count`).
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
        *,
        cache_salt: str,
    ) -> list[PromptRequest]:
        """Return one request to the instances for each prompt of an API call. All have the same sampling parameters;
        their ids begin with `api_id`, the id of the answer. `size` says how many sequences each prompt gets. Raises
        `ApiError` for parameters that do not fit the limits.
        """
        # Instances need unique ids, but clients may choose ids (x-request-id) and use one twice.
        unique = f"{api_id}-{_random.getrandbits(32):08x}"
        tokens = token_rules(request, rules, limits, num_prompts=len(prompts))
        requests = [
            PromptRequest(
                request_id=f"{unique}-{i}" if len(prompts) > 1 else unique,
                token_ids=prompt.token_ids,
                media=prompt.media,
                images=prompt.images,
                files=prompt.files,
                source_tokens=prompt.source_tokens,
                sampling=with_ranking_logprobs(
                    sampling_params(request, len(prompt.token_ids), rules, tokens, limits), size
                ),
                num_sequences=size.width,
                num_choices=size.count,
                first_choice=i * size.width,
                priority=request.priority or 0,
                cache_salt=cache_salt,
                model=self._view.only_names(),
                lora=self._view.lora_of(request.model),
            )
            for i, prompt in enumerate(prompts)
        ]
        check_num_prompt_logprobs(
            sum([len(prompt.token_ids) for prompt in prompts]), requests[0].sampling.prompt_logprobs, size.count
        )
        if self._settings.enable_log_requests:
            self._log(requests)
        return requests

    def _beam_plan(
        self, request: GenerationRequest, requests: Sequence[PromptRequest], rules: TextRules, size: SequenceCounts
    ) -> BeamPlan:
        """Return the plan of an API call with beam search: one search for each prompt, whose request is in
        `requests`.
        """
        eos = frozenset() if request.ignore_eos else self._model.eos_token_ids
        searches = [
            BeamSearch(
                BeamRules(
                    width=size.width,
                    max_tokens=prompt_request.sampling.max_tokens,
                    ends=eos | rules.stop_token_ids,
                    length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
                    early_stopping=request.early_stopping or False,
                    num_alternatives=rules.logprobs or 0,
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
            write=lambda: SequenceWriter(self._model.detokenizer, rules),
            timeout_s=self._settings.request_timeout_s,
        )

    def _log(self, requests: Sequence[PromptRequest]) -> None:
        """Log the text of the prompts of these requests. Call it only with `--enable-log-requests`: prompts are
        confidential.
        """
        for prompt_request in requests:
            prompt = self._model.detokenizer.text(prompt_request.token_ids, skip_special_tokens=False)
            extra = {"request_id": prompt_request.request_id, "prompt": prompt[: self._settings.max_log_len]}
            logger.info("request received", extra={**extra, "prompt_tokens": len(prompt_request.token_ids)})
