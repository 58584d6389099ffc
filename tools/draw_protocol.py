"""Draw the states of a transfer into docs/reference/protocol.md, between two markers, from `kvtransfer.session.states`.

python -m tools.draw_protocol          rewrite the drawing
python -m tools.draw_protocol --check  fail if it is out of date
"""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from baton_serve.kvtransfer.session.states import CONSUMER, PRODUCER

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "protocol.md"
State = TypeVar("State", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)
BEGIN, END = "<!-- drawn by tools/draw_protocol.py -->\n", "<!-- end of the drawing -->\n"


def drawing() -> str:
    """Return the diagrams of both state machines as Mermaid in Markdown."""
    parts = (("Consumer", _diagram(CONSUMER)), ("Producer", _diagram(PRODUCER)))
    return "".join(f"### {title}\n\n```mermaid\n{body}```\n\n" for title, body in parts)


def with_drawing(text: str) -> str:
    """Replace the part between the markers. Raises `SystemExit` if a marker is missing."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{DOCUMENT} has lost the markers of its drawing")
    return head + BEGIN + drawing() + END + tail


def _diagram(table: Mapping[State, Mapping[Trigger, State]]) -> str:
    lines = ["stateDiagram-v2\n"]
    for state, transitions in table.items():
        lines += [f"    {state} --> {following}: {trigger}\n" for trigger, following in transitions.items()]
        if not transitions:
            lines.append(f"    {state} --> [*]\n")
    return "".join(lines)


def main() -> None:
    old = DOCUMENT.read_text()
    new = with_drawing(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            raise SystemExit(f"{DOCUMENT} is out of date: run python -m tools.draw_protocol")
    else:
        DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
