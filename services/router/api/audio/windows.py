"""Transcribe the windows of one audio file: detect the language, and decide which are tried again at a higher
temperature.
"""

import asyncio
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
from baton_serve.services.router.text.speech.speech_profile import SpeechProfile, Task
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
    """The part of `TextGeneration` that `FileTranscriber` needs to stop the running generation when the client
    disconnects.
    """

    def abandon(self) -> None: ...


class FileTranscriber:
    """Transcribes one audio file, which was cut into windows (parts of up to 30 s): sends them to instances and
    collects their tokens. It is created for each request.
    """

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
        """The numbers of prompt and generated tokens of all windows so far."""
        prompt = sum(one.prompt_tokens for one in self._usages)
        generated = sum(one.completion_tokens for one in self._usages)
        return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)

    def watch(self, receive: Receive) -> DisconnectWatch:
        """Return a context manager that cancels the work for this file if the client disconnects."""
        return DisconnectWatch(receive, self._abandon, self._context.exchange)

    async def detect_language(self) -> str:
        """Let the model name the most likely language of the file's first window, and return its code (such as `en`).
        The model generates one token for it.
        """
        languages = self._profile.languages
        # The model was trained to name the language first; the audio is encoded once for this and for the transcript.
        options = {"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": sorted(languages.values())}
        prompt = [self._profile.start_token]
        found: list[int] = []
        async for _, delta in self._generated([0], prompt, TextRules(), options):
            found += delta.token_ids
        return next(language for language, token in languages.items() if token == found[0])

    async def deltas(self, language: str | None, task: Task) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield the new tokens of all windows as they are generated, each with the number of its window in the file.

        A group of windows is computed at the same time, so that their tokens come in any order; group follows group.
        """
        prompt = await self._prompt(language, task)
        options = self._options(self._request.temperature[0])
        for first in range(0, len(self._windows), MAX_WINDOWS):
            group = range(first, min(first + MAX_WINDOWS, len(self._windows)))
            async for number, delta in self._generated(group, prompt, self._rules(), options):
                yield number, delta

    async def transcribe(self, language: str | None, task: Task) -> list[TranscribedWindow]:
        """Return all windows of the file with their tokens, in order. A window whose text repeats itself or is
        improbable is computed again at the request's next temperature, as in Whisper.
        """
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
        """Return whether a window's text is good enough: it does not repeat itself and its tokens are probable enough.
        It is False for None, a window that was not computed yet.
        """
        if window is None:
            return False
        text = self._service.model.detokenizer.text(text_tokens(window.token_ids, self._profile))
        return compression_ratio(text) <= MAX_COMPRESSION_RATIO and average_logprob(window) >= MIN_AVERAGE_LOGPROB

    async def _whole(self, group: Sequence[int], prompt: list[int], temperature: float) -> dict[int, TranscribedWindow]:
        """Compute the windows with the numbers `group` at one temperature, and return each by its number with all its
        tokens.
        """
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
        """Return the token ids of the decoder prompt, which is the same for all windows. It includes the text that the
        client gave as `prompt`. `language` is None for a model of one language.
        """
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
        """Return the sampling parameters of the request with this temperature, as fields of a completion request."""
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
        """Generate text for the windows with the numbers `group`, and yield their new tokens, each with the number of
        its window. `options` are sampling parameters by name. Raises `ApiError` if the generation fails.
        """
        service, limits = self._service, self._service.limits()
        check_prompt(prompt, limits, param="prompt")
        prompts: list[TokenizedPrompt] = []
        for number in group:
            file = self._windows[number].file
            digest = digest_of(file)
            prompts.append(
                TokenizedPrompt(
                    prompt,
                    media=[source_span(digest)],
                    images=[file],
                    files=[(digest,)],
                    source_tokens=self._profile.source_tokens,
                )
            )
            # The digest of a window of 30 s takes a few milliseconds; those of a group would delay all streams.
            await asyncio.sleep(0)
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
    """Puts the text of an audio file's windows into the order of the file, although several windows are computed at the
    same time.
    """

    def __init__(self, num_windows: int, decode: Callable[[int, TextDelta], str]) -> None:
        """Start without text, for a file of `num_windows` windows. `decode` gets the number of a window and its next
        delta, and returns the new text.
        """
        self._decode = decode
        self._held: list[list[str]] = [[] for _ in range(num_windows)]
        self._is_over = [False] * num_windows
        self._current = 0

    def push(self, number: int, delta: TextDelta) -> str:
        """Add the next delta of window `number`. Return the text that can be sent now: text of a window is held back
        until all earlier windows have ended.
        """
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
