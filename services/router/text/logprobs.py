"""Converts logprobs of instances to the formats of chats, completions and prompts; they are computed in
`engine/sample/sampler.py`.
"""

from collections.abc import Sequence

from baton_serve.contracts.messages import TokenLogprob, TokenLogprobs
from baton_serve.services.router.protocol.openai_responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from baton_serve.services.router.text.detokenizer import Detokenizer

_MIN_LOGPROB = -9999.0
"""The smallest logprob that is sent, as in vLLM: JSON cannot express minus infinity."""


class LogprobWriter:
    """Converts logprobs of tokens to the formats of the HTTP APIs.

    With `tokens_as_ids` a token is written as `token_id:123`, which is unique where several tokens have the same text.
    """

    def __init__(self, detokenizer: Detokenizer, *, tokens_as_ids: bool) -> None:
        self._detokenizer = detokenizer
        self._tokens_as_ids = tokens_as_ids

    def token(self, token_id: int) -> str:
        """Return the text of a token, or its id as `token_id:123`."""
        return f"token_id:{token_id}" if self._tokens_as_ids else self._detokenizer.token_text(token_id)

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the logprobs of generated tokens in the format of chat completions."""
        return ChatLogprobs(
            [
                ChatLogprob(
                    self.token(step.chosen.token_id),
                    _finite(step.chosen),
                    self._bytes(step.chosen),
                    [TopLogprob(self.token(top.token_id), _finite(top), self._bytes(top)) for top in step.top],
                )
                for step in logprobs
            ]
        )

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], *, offset: int
    ) -> CompletionLogprobs:
        """Return logprobs in the format of the completions API. A token without logprobs (None) has null.

        `offset` is the position of the first of these tokens in the text of the answer, in characters.
        """
        tokens = [self.token(token_id) for token_id in token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if step is None else _finite(step.chosen) for step in logprobs],
            tokens=tokens,
            top_logprobs=[None if step is None else self._top(step) for step in logprobs],
        )

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """Return the logprobs of a prompt in vLLM's format, one entry for each token. The first token has null."""
        return [None if step is None else self._prompt_step(step) for step in logprobs]

    def _prompt_step(self, step: TokenLogprobs) -> dict[int, PromptLogprob]:
        return {
            one.token_id: PromptLogprob(
                logprob=_finite(one), rank=one.rank, decoded_token=self._detokenizer.token_text(one.token_id)
            )
            for one in (step.chosen, *step.top)
        }

    def _top(self, step: TokenLogprobs) -> dict[str, float]:
        """Return the logprobs of the most likely tokens at one position, and that of the chosen one, by the tokens'
        texts.
        """
        top: dict[str, float] = {}
        # Two tokens may have the same text. `setdefault` keeps the more likely one.
        for one in (*step.top, step.chosen):
            top.setdefault(self.token(one.token_id), _finite(one))
        return top

    def _bytes(self, one: TokenLogprob) -> list[int]:
        return list(self._detokenizer.token_bytes(one.token_id))


def _finite(one: TokenLogprob) -> float:
    return max(one.logprob, _MIN_LOGPROB)
