"""The verdicts of `tools/sweep_families.py` about every family of transformers, kept in model_verdicts.json."""

from pathlib import Path
from typing import Any

import msgspec

RESULT = Path(__file__).with_name("model_verdicts.json")
COMPARED = Path(__file__).parents[1] / "baton_serve" / "engine" / "loading" / "compared_classes.py"
_MODULE = '''"""Lists the classes of transformers that `make sweep` has compared with it and found equal.

`tools/model_verdicts.py` writes this file from tools/model_verdicts.json whenever a sweep ends.
"""

TRANSFORMERS_VERSION = "{version}"
"""The version of transformers that was compared."""
CLASSES = frozenset(
    {{
{lines}    }}
)
"""Models of these classes are served without a comparison at load (`miniature.py`)."""
'''
VERDICTS = ("equal", "refused", "not built", "different", "crash")
"""The verdicts, of which the last two are defects of the product."""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one family.

    `why` explains every verdict but `equal`: for `refused` in the words of the product, without the model's folder.
    """

    verdict: str
    why: str = ""
    model_class: str = ""
    layers: str = ""
    """`fused`, or `transformers` for the model's own layers."""
    attention: str = ""
    window: str = ""
    """The verdict of the config with a window, of families whose default config switches it off; else empty."""
    ranks: str = ""
    """The verdict on two tensor-parallel ranks, of families that are equal on one."""
    stages: str = ""
    """The verdict on two pipeline stages, of families that are equal on one."""
    why_divided: str = ""
    """Explains both, unless they are `equal`."""
    wide: dict[str, str] = {}
    """The verdicts on more than two processes, by their division such as "4 ranks"."""
    why_wide: str = ""
    """Explains them, unless they are `equal`."""


class Verdicts(msgspec.Struct, frozen=True):
    """The results of a sweep over all families, by model type, and the version of transformers."""

    transformers: str
    families: dict[str, Verdict]


def read_verdicts() -> Verdicts:
    """Read the stored results."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Verdicts)


def write_verdicts(verdicts: Verdicts) -> None:
    """Replace the stored results."""
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts), indent=1) + b"\n")
    COMPARED.write_text(compared_classes(verdicts))


def compared_classes(verdicts: Verdicts) -> str:
    """Return the product's list of the classes that are equal, as a Python module."""
    names = sorted({verdict.model_class for verdict in verdicts.families.values() if verdict.verdict == "equal"})
    lines = "".join(f'        "{name}",\n' for name in names)
    return _MODULE.format(version=verdicts.transformers, lines=lines)


def generating_families() -> dict[str, str]:
    """Return all model types with which the installed transformers generates text, and their classes.

    Where a type has two classes, that of the whole model counts, of which the other one is the text part.
    """
    # Takes seconds, which readers of the stored results should not pay.
    from transformers.models.auto import modeling_auto as mappings

    named: dict[str, Any] = {}
    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        named |= getattr(mappings, mapping)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in sorted(named.items())}
