"""Divide an answer into content blocks (text, reasoning, tool calls) for the Messages and Responses APIs.

The Messages and the Responses API both see an answer like this; this module knows neither of them. A block ends where a
part of another kind, or another tool call, begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.services.router.text.scanning.message_parts import Call, Content, Part, Reasoning

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """One content block of an answer: a text, reasoning, or one tool call. Blocks are compared and hashed by identity,
    so that they can be keys of a dict.
    """

    index: int
    """Position in the answer, from 0."""
    kind: BlockKind
    name: str = ""
    """Name of the called function; empty for other kinds."""
    call: int = 0
    """Number of the tool call in the answer; 0 for other kinds."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens of a text, if the request asked for them."""

    @property
    def text(self) -> str:
        """The text of the block so far. For a tool call it is its arguments as JSON."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """Reports that a new block of an answer has begun; it has no text yet."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """Reports that the new `text` was added to the end of a block. `logprobs` are those of its tokens, if the request
    asked for them.
    """

    block: Block
    text: str
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """Reports that a block of an answer is complete."""

    block: Block


Change: TypeAlias = BlockOpened | BlockGrown | BlockClosed


class ContentBlockBuilder:
    """Collects the parts of one answer (text, reasoning, tool calls) into content blocks, and reports each change. At
    most one block is open at a time.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._held_logprobs: list[TokenLogprobs] = []
        """Of tokens whose text is held back, because it is incomplete or may become a tool call."""

    def push(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprobs] = ()) -> list[Change]:
        """Add the next parts of the answer to its blocks, and return how the blocks have changed, in order.

        `logprobs` are those of the tokens that came with the parts. Only blocks of text keep them.
        """
        changes: list[Change] = []
        self._held_logprobs += logprobs
        for part in parts:
            block = self._block_of(part, changes)
            text = part.arguments if isinstance(part, Call) else part.text
            if text:
                block.pieces.append(text)
                changes.append(BlockGrown(block, text, self._take_logprobs(block)))
        return changes

    def finish(self) -> list[Change]:
        """Close the open block, and return how the blocks have changed. Call it after the last part; an answer without
        any part gets one empty text block.
        """
        changes: list[Change] = [] if self.blocks else self.push([Content("")])
        # The last tokens, such as the end of sequence, may have no text.
        if self._open is not None and (last := self._take_logprobs(self._open)):
            changes.append(BlockGrown(self._open, "", last))
        self._close(changes)
        return changes

    def _take_logprobs(self, block: Block) -> Sequence[TokenLogprobs]:
        """Return the logprobs of all tokens since the last call, after adding them to `block`. Only a block of text
        gets them; for another block return nothing.
        """
        # The markup of a call or of reasoning has no place in the text, so its logprobs are dropped with it.
        taken, self._held_logprobs = self._held_logprobs, []
        if block.kind != "text":
            return ()
        block.logprobs += taken
        return taken

    def _block_of(self, part: Part, changes: list[Change]) -> Block:
        block, kind = self._open, _kind(part)
        # Only the first part of a tool call carries its name, so a name always starts a new block.
        name, call = (part.name, part.index) if isinstance(part, Call) else (None, 0)
        if block is not None and (block.kind, block.call) == (kind, call) and name is None:
            return block
        self._close(changes)
        self._open = Block(len(self.blocks), kind, name or "", call)
        self.blocks.append(self._open)
        changes.append(BlockOpened(self._open))
        return self._open

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(BlockClosed(self._open))
            self._open = None


def _kind(part: Part) -> BlockKind:
    match part:
        case Content():
            return "text"
        case Reasoning():
            return "reasoning"
        case Call():
            return "call"
