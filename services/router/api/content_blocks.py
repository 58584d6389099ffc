"""An answer as a row of blocks, each of text, reasoning, or one call of a tool, as both APIs see it.

A block ends where another kind of part begins. Knows no API.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from baton_serve.services.router.text.scanning.parts import Call, Content, Part, Reasoning

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """`name` is that of a called function, whose arguments are the text."""

    index: int
    kind: BlockKind
    name: str = ""
    call: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: Block


Change: TypeAlias = BlockOpened | BlockGrown | BlockClosed


class ContentBlockBuilder:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, parts: Sequence[Part]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            block = self._block_of(part, changes)
            text = part.arguments if isinstance(part, Call) else part.text
            if text:
                block.pieces.append(text)
                changes.append(BlockGrown(block, text))
        return changes

    def finish(self) -> list[Change]:
        """An answer has one block at least."""
        changes: list[Change] = [] if self.blocks else self.push([Content("")])
        self._close(changes)
        return changes

    def _block_of(self, part: Part, changes: list[Change]) -> Block:
        block, kind = self._open, _kind(part)
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
