"""Canonical rows: edge cases of implicit prompts, and the errors for invalid rows."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.config.errors import DataError
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.messages import Source


def pair_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Prompt, chosen and rejected completion of a row."""
    source = PAIRS.parse(row, "row 1", {})
    return (source.prompt, *source.completions)


def labeled(row: dict[str, Any]) -> Source:
    """A row for KTO as text."""
    return UNPAIRED.parse(row, "row 1", {})


U, V = {"role": "user", "content": "hello"}, {"role": "user", "content": "bye"}
A, B = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
S = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ([U, A], [U, B], ([U], [A], [B])),
        ([S, U, A], [S, U, B], ([S, U], [A], [B])),
        ([U, A], [V, B], ([], [U, A], [V, B])),
        ([A], [B], ([], [A], [B])),
        ([A], [A, V, B], ([], [A], [A, V, B])),
        ([U, A], [U, A, V, B], ([U], [A], [A, V, B])),
        ([U, A, V, A], [U, A], ([U], [A, V, A], [A])),
    ],
)
def test_implicit_prompt_of_conversations(chosen: Any, rejected: Any, expected: Any) -> None:
    assert pair_of({"chosen": chosen, "rejected": rejected}) == expected


def test_a_string_prompt_with_conversations() -> None:
    system = {"role": "system", "content": "be kind"}
    found = pair_of({"prompt": " hello", "chosen": [system, U, A], "rejected": [system, U, B]})
    assert found == ([system, U], [A], [B])
    assert pair_of({"prompt": "hello", "chosen": [A], "rejected": [B]}) == ([U], [A], [B])
    with pytest.raises(DataError, match="prompt is a string but chosen is a list"):
        pair_of({"prompt": "bye", "chosen": [U, A], "rejected": [U, B]})


def test_explicit_prompts() -> None:
    kept = pair_of({"prompt": "a b", "chosen": "a b c", "rejected": "a b d"})
    assert kept == ("a b", "a b c", "a b d")  # strings are unchanged
    assert pair_of({"prompt": [S, U], "chosen": [S, U, A], "rejected": [B]}) == ([S, U], [A], [B])
    assert pair_of({"prompt": [A], "chosen": [A], "rejected": [B]}) == ([A], [A], [B])
    row = labeled({"prompt": [U], "completion": [U, A], "label": True})
    assert row == Source([U], ([A],), "row 1", further={"labels": [True]})


def test_nulls_are_removed_from_messages_and_template_options_are_kept() -> None:
    filled = {**U, "tool_calls": None, "name": "Ann"}
    row = {
        "prompt": [filled],
        "chosen": [A],
        "rejected": [B],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    pair = PAIRS.parse(row, "row 1", {})
    assert pair.prompt == [{**U, "name": "Ann"}]
    assert pair.template == {"enable_thinking": False, "tools": [{"type": "function"}]}


GOOD = {"prompt": "p", "completion": "c", "label": True}
BAD_UNPAIRED: list[tuple[dict[str, Any], str]] = [
    ({"label": 1}, r"label is 1 \(an integer\); expected true or false"),
    ({"label": "true"}, r"label is 'true' \(a string\)"),
    ({"completion": 3}, r"completion is 3 \(an integer\); expected a string or a list"),
    ({"completion": None}, r"completion is null"),
    ({"completion": {"speaker": "assistant", "content": "x"}}, r"completion is .* \(an object\)"),
    ({"completion": []}, r"completion is an empty list|prompt is a string but"),
    ({"completion": [A]}, r"prompt is a string but completion is a list.*remove the prompt column"),
    ({"prompt": [U]}, r"prompt is a list but completion is a string; use strings for both"),
    ({"prompt": ["hi"], "completion": [A]}, r"prompt\[0\] is 'hi' \(a string\); expected a"),
    ({"prompt": [{"role": "user"}], "completion": [A]}, r"prompt\[0\] has no content \(keys: role\)"),
    ({"prompt": [{"content": "x"}], "completion": [A]}, r"prompt\[0\] has no role"),
    ({"prompt": [U], "completion": [A, {"role": "user", "content": 3}]}, r"completion\[1\].content is 3 \(an int"),
    ({"prompt": [{"role": None, "content": "x"}], "completion": [A]}, r"prompt\[0\].role is null"),
    ({"chat_template_kwargs": "x"}, r"chat_template_kwargs is 'x'"),
    ({"tools": "x"}, r"tools is 'x'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_UNPAIRED)
def test_invalid_unpaired_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^data.jsonl, row 12: ({message})") as caught:
        UNPAIRED.parse({**GOOD, **change}, "data.jsonl, row 12", {})
    assert "\n" not in str(caught.value)
