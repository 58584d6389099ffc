"""The verdicts of the sweep cover every family of the installed transformers, and its page shows them."""

import re
from pathlib import Path

from tools.model_verdicts import COMPARED, VERDICTS, compared_classes, generating_families, read_verdicts

ROOT = Path(__file__).resolve().parents[2]
SWEPT = read_verdicts()
PAGE = ROOT / "docs" / "reference" / "models.md"


def test_every_family_of_the_installed_transformers_has_a_verdict() -> None:
    missing = set(generating_families()) - set(SWEPT.families)
    assert not missing, f"run `make sweep`: transformers generates text with {sorted(missing)}"


def test_no_family_answers_differently_from_transformers_or_ends_in_an_unknown_error() -> None:
    assert {kind: found.why for kind, found in SWEPT.families.items() if found.verdict in VERDICTS[3:]} == {}
    assert {found.verdict for found in SWEPT.families.values()} <= set(VERDICTS)


def test_every_refusal_says_why_and_what_to_use_instead() -> None:
    refused = {kind: found.why for kind, found in SWEPT.families.items() if found.verdict == "refused"}
    assert len(refused) > 50
    assert {kind for kind, why in refused.items() if "docs/reference/models.md" not in why} == set()
    # The type of an exception in the sentence means that nobody has looked at the cause.
    assert {kind: why for kind, why in refused.items() if re.search(r"[a-z]Error:", why)} == {}


def test_the_page_has_the_verdict_of_every_family() -> None:
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| `\w*` \| ([a-z ]+) \|", PAGE.read_text(), re.MULTILINE))
    assert rows == {kind: found.verdict for kind, found in SWEPT.families.items()}


def test_the_product_lists_the_classes_that_are_equal() -> None:
    assert COMPARED.read_text() == compared_classes(read_verdicts())
