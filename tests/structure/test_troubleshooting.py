"""docs/guide/troubleshooting.md quotes messages that the code still has."""

import ast
import re
from pathlib import Path

from tools.prose import product_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
SIGNS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and "(from " not in line]


def test_every_quoted_message_is_in_the_code() -> None:
    texts = set()
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.add(text)
                case ast.JoinedStr():
                    texts.add("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
    written = "\n".join(texts)
    quoted = [text for sign in SIGNS for text in re.findall(r"`([^`]*)`", sign) if " " in text]
    assert len(quoted) > 20
    assert [text for text in quoted if text not in written] == []
