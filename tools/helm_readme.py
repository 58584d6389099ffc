#!/usr/bin/env python3
"""Writes helm/README.md: a table of every key of values.yaml with its default and the comment above it.

Fails if a key has no comment. `--check` only says whether the file is current.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "helm"
HEAD = """# The chart `baton`

```
helm install llm ./helm --set model.source.download.repository=Qwen/Qwen3-8B
helm test llm
```

A router Deployment, a Deployment for each pool (`prefill`, `decode` and, if wanted, `unified`), one Redis for the
registry. The guide says how to [install and upgrade](../docs/guide/deploy.md), [scale](../docs/guide/scale.md) and
[debug](../docs/guide/debug.md); [sizing](../docs/reference/sizing.md) how many cards a model needs. `ci/` has complete
examples: {variants}.

`decode` and `unified` take the keys of `prefill`; `unified` has 0 replicas unless told otherwise. Made by
`tools/helm_readme.py` from the comments in `values.yaml`: change those.

| key | default | |
|---|---|---|
"""
KEY = re.compile(r"^( *)([A-Za-z]+):(.*)$")
COMMENT = re.compile(r"^ *# ?(.*)$")


@dataclass(frozen=True, slots=True)
class Row:
    path: str
    default: Any
    description: str


def rows() -> Iterator[Row]:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    comment: list[str] = []
    parents: list[str] = []
    for line in text.splitlines():
        if found := COMMENT.match(line):
            comment.append(found[1])
            continue
        key = KEY.match(line)
        if key:
            depth = len(key[1]) // 2
            parents[depth:] = [key[2]]
            opens_block = not key[3].split("#")[0].strip() or key[3].strip().startswith("&")
            if not opens_block or comment:
                path = ".".join(parents)
                yield Row(path, None if opens_block else value_at(values, parents), " ".join(comment))
        comment = []


def value_at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def described_by_parent(row: Row, found: list[Row]) -> bool:
    parents = [other for other in found if row.path.startswith(other.path + ".")]
    return any(parent.description for parent in parents)


def build() -> str:
    found = list(rows())
    silent = [row.path for row in found if not row.description and not described_by_parent(row, found)]
    assert not silent, f"no comment above {', '.join(silent)}"
    variants = ", ".join(path.stem for path in sorted((CHART / "ci").glob("*.yaml")))
    lines = []
    for row in found:
        default = "" if row.default is None and row.description else f"`{json.dumps(row.default)}`"
        lines.append(f"| `{row.path}` | {default} | {row.description.replace('|', chr(92) + '|')} |")
    return HEAD.replace("{variants}", variants) + "\n".join(lines) + "\n"


def main() -> int:
    target = CHART / "README.md"
    if "--check" in sys.argv:
        return int(not target.exists() or target.read_text() != build())
    target.write_text(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
