"""Splits an answer into reasoning, content and tool calls, by the parsers in `reasoning/` and `tool_calls/`.

This module combines the formats that the router was started with (`--reasoning-parser`, `--tool-call-parser`) with the
parameters of a request. The packages `reasoning` and `tool_calls` implement the formats.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest, chat_message
from baton_serve.services.router.protocol.openai_responses import (
    ChatDelta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.grammar import FORM_PARAMETERS, GrammarSpec, read_grammar_spec
from baton_serve.services.router.text.reasoning import REASONING_FORMATS
from baton_serve.services.router.text.scanning.message_parts import Call, Content, Part, PartReader, Reasoning, merged
from baton_serve.services.router.text.served_model import SHORT_ID_CHARS
from baton_serve.services.router.text.tool_calls import Tools
from baton_serve.services.router.text.tool_choice import tool_choice_of


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole chat message, divided into content, reasoning and tool calls. `content` is None if it has only the
    others.
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]


class MessageFormat:
    """Describes how the answers to one chat request are divided into content, reasoning and tool calls. It makes a
    `MessageReader` for each of the `n` answers.

    `grammar_spec` is the grammar that the answers must follow, or None. If `ends_with_calls` is true, the finish reason
    of an answer with tool calls is `tool_calls`.
    """

    def __init__(self, settings: RouterSettings, request: ChatCompletionRequest, prompt: str) -> None:
        """Create the format for a request. The rendered chat `prompt` shows whether it already begins or ends the
        reasoning.

        Raises `BadRequestError` if the tools or the grammar of the request are not supported.
        """
        choice = tool_choice_of(request, settings, read_grammar_spec(request))
        self._calls = choice.format
        self._reasoning = REASONING_FORMATS[settings.reasoning_parser] if settings.reasoning_parser else None
        self._prompt = (
            prompt if self._reasoning is None else self._reasoning.prompt_end(prompt, _continued_text(request))
        )
        self.grammar_spec = self._after_reasoning(choice.grammar_spec)
        self.ends_with_calls = not choice.is_named
        self._functions = [tool.function for tool in request.tools or ()]
        self._is_parallel = request.parallel_tool_calls is not False
        self._shows_reasoning = request.include_reasoning is not False
        self._has_short_ids = settings.tool_call_parser == "mistral"

    def _after_reasoning(self, grammar_spec: GrammarSpec | None) -> GrammarSpec | None:
        """Return the grammar of the whole output of the model: reasoning, then an answer that follows `grammar_spec`.
        Return `grammar_spec` itself if it is None or the model does not reason.
        """
        reasoning, prompt = self._reasoning, self._prompt
        if grammar_spec is None or reasoning is None:
            return grammar_spec
        rule = grammar_spec.rule
        return GrammarSpec(lambda lark: f"{reasoning.rule(lark, prompt)} {rule(lark)}", grammar_spec.param)

    @property
    def is_plain(self) -> bool:
        """True if the whole text of an answer is content, so that no reader is needed."""
        return self._calls is None and self._reasoning is None

    @property
    def needs_special_tokens(self) -> bool:
        """True if the detokenizer must keep special tokens in the text, because the formats of tool calls or reasoning
        use them as markers.
        """
        calls, reasoning = self._calls, self._reasoning
        return (calls is not None and calls.has_special_tokens) or (
            reasoning is not None and reasoning.has_special_tokens
        )

    def reader(self) -> "MessageReader":
        """Return a new reader for one of the request's answers."""
        return MessageReader(
            self._reasoning.reader(self._prompt) if self._reasoning is not None else None,
            self._calls.reader(Tools(self._functions)) if self._calls is not None else None,
            self,
        )

    def is_wanted(self, part: Part) -> bool:
        """Return whether the client gets this part of an answer. Reasoning may be unwanted, and tool calls after the
        first one.
        """
        if isinstance(part, Reasoning):
            return self._shows_reasoning
        # With `parallel_tool_calls: false` only the first call is sent, whatever the model generates.
        return not isinstance(part, Call) or self._is_parallel or part.index == 0

    def new_id(self) -> str:
        """Return a new random id for a tool call, of a length that the model's chat template accepts."""
        if not self._has_short_ids:
            return f"call_{secrets.token_hex(12)}"
        return secrets.token_hex(SHORT_ID_CHARS)[:SHORT_ID_CHARS]


class MessageFormats:
    """Provides the `MessageFormat` for each chat request to one model. Most requests ask for plain text and share one
    format.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._plain = None if settings.reasoning_parser else MessageFormat(settings, _PLAIN_REQUEST, "")

    def of(self, request: ChatCompletionRequest, prompt: str) -> MessageFormat:
        """Return the format for a request. `prompt` is its rendered chat.

        Raises `BadRequestError` if the tools or the grammar of the request are not supported.
        """
        if self._plain is not None and _SHAPING.isdisjoint(request.model_fields_set):
            return self._plain
        return MessageFormat(self._settings, request, prompt)


_SHAPING = FORM_PARAMETERS | {"tools", "tool_choice"}
"""Parameters that need a format of their own. Without them the shared plain format is used."""

_PLAIN_REQUEST = ChatCompletionRequest(messages=[chat_message("user", "")])


def _continued_text(request: ChatCompletionRequest) -> str:
    """Return the text of the message that the answer continues (`continue_final_message`), or an empty string."""
    content = request.messages[-1].content
    if not request.continue_final_message or content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


class MessageReader:
    """Divides one answer into content, reasoning and tool calls. Reasoning is removed first; tool calls are searched in
    the rest.

    Call either `whole` once, or `delta` (or `parts`) for each new piece of text.
    """

    def __init__(self, reasoning: PartReader | None, calls: PartReader | None, format: MessageFormat) -> None:
        self.has_calls = False
        self._reasoning = reasoning
        self._calls = calls
        self._format = format

    def whole(self, text: str) -> ParsedMessage:
        """Parse the complete text of an answer, and return its content, reasoning and tool calls."""
        parts = merged([*self._push(text), *self._finish()])
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [
            ToolCall(id=self._format.new_id(), function=FunctionCall(part.name or "", part.arguments))
            for part in parts
            if isinstance(part, Call)
        ]
        return ParsedMessage(content if content or not (reasoning or calls) else None, reasoning or None, calls)

    def delta(self, text: str, *, is_last: bool) -> ChatDelta | None:
        """Parse the next piece of a streamed answer and return it as a chat delta, or None if there is nothing to send
        yet. `is_last` says that no more text follows.
        """
        parts = self.parts(text, is_last=is_last)
        if not parts:
            return None
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [self._call_delta(part) for part in parts if isinstance(part, Call)]
        return ChatDelta(
            content=content or None,
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or None,
        )

    def parts(self, text: str, *, is_last: bool) -> list[Part]:
        """Parse the next piece of a streamed answer and return the new parts (content, reasoning, tool calls) in order.
        `is_last` says that no more text follows.
        """
        return self._push(text) + (self._finish() if is_last else [])

    def _call_delta(self, call: Call) -> ToolCallDelta:
        function = FunctionDelta(call.name, call.arguments)
        # Only the first part of a call has a name, and only the first delta of a call has an id, as in OpenAI's API.
        if call.name is None:
            return ToolCallDelta(index=call.index, function=function)
        return ToolCallDelta(index=call.index, id=self._format.new_id(), type="function", function=function)

    def _push(self, text: str) -> list[Part]:
        parts: Sequence[Part] = self._reasoning.push(text) if self._reasoning is not None else [Content(text)]
        return self._read(parts)

    def _finish(self) -> list[Part]:
        parts = self._read(self._reasoning.finish() if self._reasoning is not None else [])
        return parts + (self._wanted(self._calls.finish()) if self._calls is not None else [])

    def _read(self, parts: Sequence[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            # Only content is searched for calls: a call that the model considers while reasoning is not a call.
            if isinstance(part, Content) and self._calls is not None:
                read += self._calls.push(part.text)
            elif not isinstance(part, Content) or part.text:
                read.append(part)
        return self._wanted(read)

    def _wanted(self, parts: Sequence[Part]) -> list[Part]:
        wanted = [part for part in parts if self._format.is_wanted(part)]
        self.has_calls = self.has_calls or any(isinstance(part, Call) for part in wanted)
        return wanted
