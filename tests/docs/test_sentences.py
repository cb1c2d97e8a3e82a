"""``sentences.yaml``: the sentences of guides and help texts, and the tests that fail if one becomes false.

A sentence that is reworded gets its new words there; one that now says something else gets another test.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES: dict[str, list[list[str]]] = yaml.safe_load(
    Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8")
)
TEST = re.compile(r"(\S+::)?test_\w+")
NAMES = Counter(
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for test in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    for name in (test, f"{path.relative_to(ROOT)}::{test}")
)


def in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_is_on_its_page_and_has_a_test(page: str) -> None:
    text = in_one_line((ROOT / page).read_text(encoding="utf-8"))
    for entry in PAGES[page]:
        tests = [one for one in entry if TEST.fullmatch(one)]
        quotes = [in_one_line(one) for one in entry if one not in tests]
        assert quotes and [quote for quote in quotes if text.count(quote) != 1] == [], "not on the page, or repeated"
        assert tests and [test for test in tests if NAMES[test] != 1] == [], "no such test, or several of this name"
