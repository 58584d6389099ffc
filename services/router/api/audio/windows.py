"""Transcribe the windows of one file: prompts, generations of several windows at a time, and retries at higher
temperatures.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from baton_serve.contracts.audio import Cut
from baton_serve.contracts.media import digest_of, source_span
from baton_serve.services.router.api.audio.schema import TranscriptionRequest
from baton_serve.services.router.api.generation import TextGeneration, ended
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import DisconnectWatch, Receive, RequestContext
from baton_serve.services.router.protocol.openai_requests import CompletionRequest
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt
from baton_serve.services.router.text.prompt_length import check_prompt
from baton_serve.services.router.text.sampling_params import TextRules
from baton_serve.services.router.text.speech.profile import SpeechProfile, Task
from baton_serve.services.router.text.speech.transcript import (
    TranscribedWindow,
    average_logprob,
    compression_ratio,
    text_tokens,
)
from baton_serve.services.router.text.text_output import TextDelta

MAX_WINDOWS = 16
"""Number of windows of one file that are computed at a time, so that a long file leaves room for other requests."""
# Both limits are those of OpenAI's Whisper.
MAX_COMPRESSION_RATIO = 2.4
"""A window whose text can be compressed more repeats itself. It is computed again at the next temperature."""
MIN_AVERAGE_LOGPROB = -1.0
"""A window whose tokens are less likely on average is computed again at the next temperature."""


class AbandonableGeneration(Protocol):
    """The part of `TextGeneration` by which a disconnected client ends the work for it."""

    def abandon(self) -> None: ...


class FileTranscriber:
    """Transcribes the windows of one file. Made for each request."""

    def __init__(
        self,
        service: ModelService,
        profile: SpeechProfile,
        request: TranscriptionRequest,
        cut: Cut,
        *,
        api_id: str,
        context: RequestContext,
    ) -> None:
        self._service = service
        self._profile = profile
        self._request = request
        self._windows = cut.windows
        self._api_id = api_id
        self._context = context
        self._running: AbandonableGeneration | None = None
        self._usages: list[Usage] = []

    @property
    def usage(self) -> Usage:
        """Return the numbers of prompt and generated tokens so far."""
        prompt = sum(one.prompt_tokens for one in self._usages)
        generated = sum(one.completion_tokens for one in self._usages)
        return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)

    def watch(self, receive: Receive) -> DisconnectWatch:
        """Return a context manager that cancels the work for this file if the client disconnects."""
        return DisconnectWatch(receive, self._abandon, self._context.exchange)

    async def detect_language(self) -> str:
        """Return the most likely language of the first window, which takes one token."""
        languages = self._profile.languages
        # The model was trained to name the language first; the audio is encoded once for this and for the transcript.
        options = {"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": sorted(languages.values())}
        prompt = [self._profile.start_token]
        found: list[int] = []
        async for _, delta in self._generated([0], prompt, TextRules(), options):
            found += delta.token_ids
        return next(language for language, token in languages.items() if token == found[0])

    async def deltas(self, language: str | None, task: Task) -> AsyncIterator[tuple[int, TextDelta]]:
        """Iterate over the pieces of all windows, as they are generated, with the number of the window. Windows of one
        group come in any order.
        """
        prompt = await self._prompt(language, task)
        options = self._options(self._request.temperature[0])
        for first in range(0, len(self._windows), MAX_WINDOWS):
            group = range(first, min(first + MAX_WINDOWS, len(self._windows)))
            async for number, delta in self._generated(group, prompt, self._rules(), options):
                yield number, delta

    async def transcribe(self, language: str | None, task: Task) -> list[TranscribedWindow]:
        """Return all windows with their tokens. Windows that are not good enough are computed again."""
        prompt = await self._prompt(language, task)
        found: dict[int, TranscribedWindow] = {}
        for temperature in self._request.temperature:
            # The first time, all windows wait.
            waiting = [number for number in range(len(self._windows)) if not self._is_good(found.get(number))]
            for first in range(0, len(waiting), MAX_WINDOWS):
                group = waiting[first : first + MAX_WINDOWS]
                found |= await self._whole(group, prompt, temperature)
        # A window that is not good at the last temperature either stays as it is, as with Whisper.
        return [found[number] for number in range(len(self._windows))]

    def _is_good(self, window: TranscribedWindow | None) -> bool:
        """Return whether a window need not be computed again."""
        if window is None:
            return False
        text = self._service.model.detokenizer.text(text_tokens(window.token_ids, self._profile))
        return compression_ratio(text) <= MAX_COMPRESSION_RATIO and average_logprob(window) >= MIN_AVERAGE_LOGPROB

    async def _whole(self, group: Sequence[int], prompt: list[int], temperature: float) -> dict[int, TranscribedWindow]:
        """Return the windows of a group with all their tokens."""
        tokens = {number: TextDelta("", [], []) for number in group}
        async for number, delta in self._generated(group, prompt, self._rules(), self._options(temperature)):
            whole = tokens[number]
            whole.token_ids += delta.token_ids
            whole.logprobs = [*(whole.logprobs or ()), *(delta.logprobs or ())]
        return {
            number: TranscribedWindow(
                start_s=self._windows[number].start_s,
                duration_s=self._windows[number].duration_s,
                token_ids=whole.token_ids,
                logprobs=whole.logprobs or (),
                temperature=temperature,
            )
            for number, whole in tokens.items()
        }

    async def _prompt(self, language: str | None, task: Task) -> list[int]:
        """Return the prompt of all windows, with the text that the client states."""
        text = self._request.prompt.strip()
        previous: list[int] = []
        if text:
            limits = self._service.limits()
            # Words begin with a space in what the model has seen before.
            previous = await self._service.model.tokenize(
                f" {text}", add_special_tokens=False, max_tokens=64 * limits.max_model_len
            )
        return self._profile.prompt(language, task, previous, has_timestamps=self._request.has_timestamps)

    def _rules(self) -> TextRules:
        needs_logprobs = self._request.response_format == "verbose_json" or len(self._request.temperature) > 1
        return TextRules(
            transcript=self._profile.rules(has_timestamps=self._request.has_timestamps),
            logprobs=0 if needs_logprobs else None,
        )

    def _options(self, temperature: float) -> dict[str, object]:
        """Return the sampling parameters of the request."""
        request = self._request
        return {
            "temperature": temperature,
            "max_tokens": request.max_completion_tokens,
            "seed": request.seed,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "repetition_penalty": request.repetition_penalty,
        }

    async def _generated(
        self, group: Sequence[int], prompt: list[int], rules: TextRules, options: dict[str, object]
    ) -> AsyncIterator[tuple[int, TextDelta]]:
        """Iterate over the pieces of the windows of a group, with the number of the window. Raises `ApiError`."""
        service, limits = self._service, self._service.limits()
        check_prompt(prompt, limits, param="prompt")
        prompts = [
            TokenizedPrompt(
                prompt,
                media=[source_span(digest_of(self._windows[number].file))],
                images=[self._windows[number].file],
                source_tokens=self._profile.source_tokens,
            )
            for number in group
        ]
        # The windows of a group are the prompts of one completion, whose code also retries and counts tokens.
        request = CompletionRequest.model_validate({"model": self._request.model, "prompt": "", **options})
        timing = service.timing(self._context, tokenizing_at=service.clock())
        generation: TextGeneration = service.generate(request, self._api_id, prompts, rules, limits, timing=timing)
        # `abandon` cancels the generation that runs at that moment.
        with ended(generation):
            self._running = generation
            while not generation.is_done:
                for choice, delta in await generation.take():
                    yield group[choice], delta
            self._running = None
            self._usages.append(generation.usage())

    def _abandon(self) -> None:
        if self._running is not None:
            self._running.abandon()


class OrderedText:
    """Puts the text of windows that are computed together into the order of the file."""

    def __init__(self, num_windows: int, decode: Callable[[int, TextDelta], str]) -> None:
        """`decode` returns the new text of a window for its next piece."""
        self._decode = decode
        self._held: list[list[str]] = [[] for _ in range(num_windows)]
        self._is_over = [False] * num_windows
        self._current = 0

    def push(self, number: int, delta: TextDelta) -> str:
        """Return the text that can be sent after the next piece of window `number`."""
        self._held[number].append(self._decode(number, delta))
        # Windows of a group are computed together, but the text is sent in order.
        self._is_over[number] = delta.finish_reason is not None
        found: list[str] = []
        while self._current < len(self._held):
            found += self._held[self._current]
            self._held[self._current] = []
            if not self._is_over[self._current]:
                break
            self._current += 1
        return "".join(found)
