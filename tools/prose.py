#!/usr/bin/env python3
"""Find prose that must be read twice by people to whom English is foreign.

`python -m tools.prose [--count] [PATH ...]` reads docstrings, comments and help texts of Python files, and Markdown.
CONTRIBUTING.md asks to avoid these forms. A finding is a place to look at; `tests/structure/test_house.py`
keeps the number of findings within a budget that only shrinks.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.reading import read

ROOT = Path(__file__).resolve().parents[1]
FORMS = {
    "tell or hear instead of report, log, notify": r"\b(told|tells?|telling|hears? of|is heard)\b",
    "of late": r"\bof late\b",
    "so many ... as": r"\bso (many|long|often|much)\b.{0,40}\b(as|times)\b",
    "'is no' as a negation": r"\b(is|are|was|were) no\b",
    "those that, those who": r"\bthose (that|who|which)\b",
    "lest, had better, whereof, anew": r"\b(lest|had better|whereof|thereof|anew)\b",
    "writers and readers instead of decode and prefill": (
        r"\b(those who (write|read)|who (writes|reads)|(one|two|its|a|first|second) readers?)\b"
    ),
    "promise instead of SLO": r"\bpromis(e|ed|es)\b",
    "by turns, in turns": r"\b(by turns|in turns)\b",
}
"""Regular expressions that ignore case, by the name of the form."""
RELATIVE_SUBJECT = re.compile(r"(^|[.:;] )(Who|Whoever|What|Where)\b(?![^.?]*\?)")
FRAGMENT = re.compile(
    r"(Of|As|To|By|In|With|Where|From|That|Whether|So|If|For|At|Until|Also|Both|Likewise|Those|Only|Not|None|Then|And|Or)\b"
)
INDEFINITE = re.compile(r"(All|Those|Whatever|Whoever|Nothing|Nobody)\b")
EXCEPTION_ONLY = re.compile(r"Raises [`\w., or]+\.?$")


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    form: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.form}: {' '.join(self.text.split())[:140]}"


@dataclass(frozen=True, slots=True)
class _Text:
    line: int
    text: str
    is_docstring: bool = False


def findings_in(path: Path) -> list[Finding]:
    """Return the findings in one Python or Markdown file."""
    source = path.read_text(encoding="utf-8", errors="replace")
    texts = _markdown(source) if path.suffix == ".md" else _python(source)
    return [Finding(path, text.line, form, text.text) for text in texts for form in _forms_of(text)]


def product_files() -> list[Path]:
    """Return the tracked Python files of the product, without tests, tools and benchmarks."""
    return [path for path in tracked_files("*.py") if _is_product(path)]


def supporting_files() -> list[Path]:
    """Return the tracked Python files of benchmarks, tools and tests."""
    folders = ("baton_serve/bench", "tools", "tests")
    return [path for path in tracked_files("*.py") if str(path.relative_to(ROOT)).startswith(folders)]


def _is_product(path: Path) -> bool:
    first = path.relative_to(ROOT).parts[:2]
    return first[0] in ("services", "kvtransfer", "baton_serve") and first != ("baton_serve", "bench")


def tracked_files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split() if (path := ROOT / name).is_file() and not path.is_symlink()]


def _forms_of(text: _Text) -> Iterator[str]:
    for name, form in FORMS.items():
        if re.search(form, text.text, re.IGNORECASE):
            yield name
    if RELATIVE_SUBJECT.search(text.text):
        yield "a relative clause as a subject"
    if text.is_docstring:
        yield from _docstring_forms(text.text.strip())


def _docstring_forms(text: str) -> Iterator[str]:
    if FRAGMENT.match(text) and not re.search(r"[,:] \w+ \w+", text.split(". ")[0]):
        yield "a fragment instead of a sentence"
    if EXCEPTION_ONLY.match(text):
        yield "names the exception, not what the function does"
    if INDEFINITE.match(text):
        yield "starts with All, Those, Whatever, Nothing"
    if len(text.split()) <= 3 and not text.startswith("`"):
        yield "three words or fewer"


def _markdown(source: str) -> Iterator[_Text]:
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        in_code ^= line.startswith("```")
        if not in_code and line.strip():
            yield _Text(number, line)


def _python(source: str) -> Iterator[_Text]:
    reading = read(source)
    for line, text in reading.docstrings:
        yield _Text(line, text, is_docstring=True)
    for line, text in reading.helps:
        yield _Text(line, text)
    for line, text in reading.comments:
        yield _Text(line, text.lstrip("# "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files to read; default: the product")
    parser.add_argument("--count", action="store_true", help="print the number of findings of each form")
    options = parser.parse_args()
    found = [finding for path in options.paths or product_files() for finding in findings_in(path)]
    if options.count:
        for form, count in Counter(finding.form for finding in found).most_common():
            print(f"{count:6} {form}")
        print(f"{len(found):6} in all")
    else:
        sys.stdout.writelines(f"{finding}\n" for finding in found)


if __name__ == "__main__":
    main()
