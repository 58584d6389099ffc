"""Tokens of one sequence to pieces of the answer: text up to a stop string, logprobs, and why it ended."""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.messages import FinishReason, TokenLogprobs
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.sampling_params import TextRules
from baton_serve.services.router.text.token_sequence import TokenUpdate


class StopSearchResult(msgspec.Struct, frozen=True):
    """`text` may be sent. `matched` is the stop string that ended it."""

    text: str
    matched: str | None = None


class StopStrings:
    """One sequence's search. `include` keeps the stop string in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""

    def push(self, text: str, *, is_active: bool = True) -> StopSearchResult:
        """Text that comes while `is_active` is false (too few tokens yet) cannot end the sequence."""
        if not self._stops:
            return StopSearchResult(text)
        if not is_active:
            sent, self._held = self._held + text, ""
            return StopSearchResult(sent)
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, stop = min(found, key=lambda match: match[0])
            return StopSearchResult(text[: at + len(stop)] if self._include else text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return StopSearchResult(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back: the stop string never came."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextDelta(msgspec.Struct):
    """`text` may be empty although tokens came: a character or a stop string may be incomplete."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextAccumulator:
    """The pieces of one choice as one."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._piece = TextDelta("", [])

    def add(self, text_delta: TextDelta) -> None:
        whole = self._piece
        self._texts.append(text_delta.text)
        whole.token_ids += text_delta.token_ids
        if text_delta.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs += text_delta.logprobs
        whole.finish_reason = text_delta.finish_reason
        whole.stop_reason = text_delta.stop_reason

    def whole(self) -> TextDelta:
        self._piece.text = "".join(self._texts)
        return self._piece


class SequenceWriter:
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
        """Where its tokens do not say so: at a stop string."""
        return bool(self._rules.stop)

    def push(self, new: TokenUpdate) -> TextDelta:
        """When the piece has a finish reason that `new` has not, the text ended here and the rest is not wanted."""
        visible = new.token_ids
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
        """Token by token, so that nothing after a stop string is counted."""
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
        cut = self._stops.push(self._stream.finish(), is_active=self.num_tokens > self._rules.min_tokens)
        text_delta.text += cut.text
        if cut.matched is not None:
            text_delta.finish_reason, text_delta.stop_reason = "stop", cut.matched
            return
        text_delta.text += self._stops.finish()
        text_delta.finish_reason = new.finish_reason
        if new.stop_token_id in self._rules.stop_token_ids:
            text_delta.stop_reason = new.stop_token_id
