"""Converts the tokens of one sequence to pieces of the answer: text up to a stop string, logprobs, finish reason."""

import msgspec

from baton_serve.contracts.messages import FinishReason, TokenLogprobs
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.sampling_params import TextRules
from baton_serve.services.router.text.stop_strings import StopStrings
from baton_serve.services.router.text.token_sequence import TokenUpdate


class TextDelta(msgspec.Struct):
    """A piece of one choice of an answer: its new tokens and its new text.

    Text whose last character is incomplete, or that may be the beginning of a stop string, is held back and comes with
    a later piece. So `text` may be shorter or longer than the text of `token_ids`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_logprobs(self) -> int:
        """The number of logprobs of its tokens, alternatives included. All tokens have the same number of
        alternatives.
        """
        return len(self.logprobs) * (len(self.logprobs[0].top) + 1) if self.logprobs else 0


class TextAccumulator:
    """Joins all text deltas of one choice to its complete text, for an answer that is not streamed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._piece = TextDelta("", [])

    def add(self, text_delta: TextDelta) -> None:
        """Append the next delta. The finish reason is that of the last one."""
        whole = self._piece
        # Texts are joined once, at the end: appending to a string for each token would copy it each time.
        self._texts.append(text_delta.text)
        whole.token_ids += text_delta.token_ids
        if text_delta.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs += text_delta.logprobs
        whole.finish_reason = text_delta.finish_reason
        whole.stop_reason = text_delta.stop_reason

    def whole(self) -> TextDelta:
        """Return all deltas joined as one."""
        self._piece.text = "".join(self._texts)
        return self._piece


class SequenceWriter:
    """Converts the tokens of one sequence to text deltas, and ends the sequence at a stop string. It is used on the
    event loop.
    """

    # There is one object for each running sequence, and `push` runs for each token.
    __slots__ = ("_rules", "_stops", "_stream", "is_finished", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, rules: TextRules) -> None:
        self.num_tokens = 0
        self.is_finished = False
        self._rules = rules
        self._stream = detokenizer.stream(
            skip_special_tokens=rules.skip_special_tokens,
            spaces_between_special_tokens=rules.spaces_between_special_tokens,
        )
        self._stops = StopStrings(rules.stop, include=rules.include_stop_str_in_output)

    @property
    def may_end_early(self) -> bool:
        """True if the sequence may end at a stop string. Instances do not know stop strings, so the router must stop
        them.
        """
        return bool(self._rules.stop)

    def push(self, new: TokenUpdate) -> TextDelta:
        """Convert the next tokens to a text delta.

        If it has a finish reason that `new` does not have, a stop string has ended the sequence, and the caller must
        stop its generation on the instance.
        """
        visible = new.token_ids
        # The text of a stop token is not part of the answer unless the client asks for it.
        if new.stop_token_id is not None and not self._rules.include_stop_str_in_output:
            visible = visible[:-1]
        if not self._rules.stop:
            self.num_tokens += len(new.token_ids)
            text_delta = TextDelta(self._stream.push(visible), new.token_ids, new.logprobs)
        else:
            text_delta = self._search(new, len(visible))
        if new.finish_reason is not None and text_delta.finish_reason is None:
            self._end(text_delta, new)
        self.is_finished = text_delta.finish_reason is not None
        return text_delta

    def _search(self, new: TokenUpdate, num_visible: int) -> TextDelta:
        """Convert tokens one by one and search for stop strings, so that tokens after a stop string are neither
        returned nor counted. The text of the first ones, `num_visible` of them, may be returned.
        """
        text: list[str] = []
        for i, token_id in enumerate(new.token_ids):
            self.num_tokens += 1
            added = self._stream.push([token_id]) if i < num_visible else ""
            cut = self._stops.push(added, is_active=self.num_tokens > self._rules.min_tokens)
            text.append(cut.text)
            if cut.matched is not None:
                logprobs = new.logprobs[: i + 1] if new.logprobs is not None else None
                return TextDelta("".join(text), new.token_ids[: i + 1], logprobs, "stop", cut.matched)
        return TextDelta("".join(text), new.token_ids, new.logprobs)

    def _end(self, text_delta: TextDelta, new: TokenUpdate) -> None:
        # The end of the stream may release an incomplete character, and that text may complete a stop string.
        cut = self._stops.push(self._stream.finish(), is_active=self.num_tokens > self._rules.min_tokens)
        text_delta.text += cut.text
        if cut.matched is not None:
            text_delta.finish_reason, text_delta.stop_reason = "stop", cut.matched
            return
        text_delta.text += self._stops.finish()
        text_delta.finish_reason = new.finish_reason
        # As in vLLM, the stop reason names a stop token of the request, but not the model's end of sequence.
        if new.stop_token_id in self._rules.stop_token_ids:
            text_delta.stop_reason = new.stop_token_id
