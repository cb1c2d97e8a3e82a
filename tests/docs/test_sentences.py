"""``sentences.yaml``: the sentences of guides and help texts, and the tests that fail if one becomes false.

A sentence that is reworded gets its new words there; one that now says something else gets another test.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES: dict[str, list[dict[str, list[str]]]] = yaml.safe_load(
    Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8")
)


@cache
def names_in(file: str) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def in_one_line(text: Any) -> str:
    return re.sub(r"\s+", " ", str(text))


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_is_on_its_page_and_has_a_test(page: str) -> None:
    text = in_one_line((ROOT / page).read_text(encoding="utf-8"))
    for group in PAGES[page]:
        quotes = [in_one_line(quote) for quote in group["sentences"]]
        assert [quote for quote in quotes if text.count(quote) != 1] == [], "not on the page, or more than once"
        named = [test.partition("::")[::2] for test in group["tests"]]
        assert named and [test for test in named if test[1] not in names_in(test[0])] == [], "no such test"
