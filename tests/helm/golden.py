"""Rendered charts kept in the repository, so that a change of a template shows as a diff.

`python -m tests.helm.golden` writes them again.
"""

import re
from pathlib import Path

from tests.helm.chart import texts, values_of, variant

FOLDER = Path(__file__).parent / "golden"
VARIANTS = {"defaults": None, "cpu-minimal": variant("cpu-minimal"), "keda": variant("keda")}
_RANDOM = re.compile(r"^(  (?:API_KEYS|REDIS_PASSWORD|CLUSTER_KEY): ).+$", re.MULTILINE)
_BLANK = re.compile(r"^\s*\n", re.MULTILINE)


def golden(name: str) -> str:
    """Return all rendered templates in order, without random values and blank lines."""
    parts = []
    for path, text in sorted(texts(values_of(VARIANTS[name])).items()):
        if text.strip():
            parts.append(f"# {path.split('/templates/')[-1]}\n{text.strip()}")
    return _BLANK.sub("", _RANDOM.sub(r"\1(random)", "\n---\n".join(parts))) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in VARIANTS:
        (FOLDER / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    main()
