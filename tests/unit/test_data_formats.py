"""Canonical rows: edge cases of implicit prompts, and the errors for invalid rows."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.config.errors import DataError
from alignment.data.columns import check_columns
from alignment.data.formats import Preference, UnpairedPreference, preference_row, unpaired_rows
from alignment.data.messages import IDENTICAL, DropRow

U, V = {"role": "user", "content": "hello"}, {"role": "user", "content": "bye"}
A, B = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
S = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("say it well", "say it badly", ("say it", " well", " badly")),
        ("say it wellness", "say it welled", ("say it", " wellness", " welled")),  # no word is split
        ("say so well", "say sooner", ("say", " so well", " sooner")),  # not even if only one completion continues it
        ("Q: why?\n\nA", "Q: why?\n\nB", ("Q: why?", "\n\nA", "\n\nB")),  # whitespace belongs to the completions
        ("one two", "one two three", ("one", " two", " two three")),  # one completion is a prefix of the other
        ("one two three", "one two", ("one", " two three", " two")),
        ("one", "one two", ("", "one", "one two")),
        ("one ", "one two", ("one", " ", " two")),
        ("one\ntwo", "one two", ("one", "\ntwo", " two")),  # the boundary is between two kinds of whitespace
        ("abc", "abd", ("", "abc", "abd")),
        ("abc", "xyz", ("", "abc", "xyz")),
        (" abc", " abd", ("", " abc", " abd")),
        ("", "abc", ("", "", "abc")),
        (
            "\n\nHuman: hi\n\nAssistant: I am well",
            "\n\nHuman: hi\n\nAssistant: I am not",
            ("\n\nHuman: hi\n\nAssistant:", " I am well", " I am not"),
        ),
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e",
            ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d", " e"),
        ),
        (  # the later marker would leave the first completion empty
            "\n\nHuman: a\n\nAssistant: b\n\nAssistant:",
            "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c",
            ("\n\nHuman: a\n\nAssistant:", " b\n\nAssistant:", " b\n\nAssistant: c"),
        ),
    ],
)
def test_implicit_prompt_of_strings(chosen: str, rejected: str, expected: tuple[str, str, str]) -> None:
    assert preference_row({"chosen": chosen, "rejected": rejected}, "row 1") == Preference(*expected)


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
    assert preference_row({"chosen": chosen, "rejected": rejected}, "row 1") == Preference(*expected)


@pytest.mark.parametrize("same", ["one two", "", [A], [U, A]])
def test_identical_completions_without_prompt_are_dropped(same: Any) -> None:
    for convert in (preference_row, unpaired_rows):
        with pytest.raises(DropRow) as caught:
            convert({"chosen": same, "rejected": same, "prompt": None}, "row 1")
        assert caught.value.reason == IDENTICAL


@pytest.mark.parametrize(("prompt", "same"), [("a", "b"), ([U], [A]), ([U], [U, A]), ("hello", [A])])
def test_identical_completions_of_a_prompt_are_dropped(prompt: Any, same: Any) -> None:
    """Otherwise, KTO would see a completion as desirable and as undesirable."""
    for convert in (preference_row, unpaired_rows):
        with pytest.raises(DropRow) as caught:
            convert({"prompt": prompt, "chosen": same, "rejected": same}, "row 1")
        assert caught.value.reason == IDENTICAL


def test_a_string_prompt_with_conversations() -> None:
    system = {"role": "system", "content": "be kind"}
    found = preference_row({"prompt": " hello", "chosen": [system, U, A], "rejected": [system, U, B]}, "row 1")
    assert (found.prompt, found.chosen, found.rejected) == ([system, U], [A], [B])
    alone = preference_row({"prompt": "hello", "chosen": [A], "rejected": [B]}, "row 1")
    assert (alone.prompt, alone.chosen, alone.rejected) == ([U], [A], [B])
    with pytest.raises(DataError, match="prompt is a string but chosen is a list"):
        preference_row({"prompt": "bye", "chosen": [U, A], "rejected": [U, B]}, "row 1")


def test_explicit_prompts() -> None:
    kept = preference_row({"prompt": "a b", "chosen": "a b c", "rejected": "a b d"}, "row 1")
    assert kept == Preference("a b", "a b c", "a b d")  # strings are unchanged
    repeated = preference_row({"prompt": [S, U], "chosen": [S, U, A], "rejected": [B]}, "row 1")
    assert repeated == Preference([S, U], [A], [B])
    assert preference_row({"prompt": [A], "chosen": [A], "rejected": [B]}, "row 1") == Preference([A], [A], [B])
    [row] = unpaired_rows({"prompt": [U], "completion": [U, A], "label": True}, "row 1")
    assert row == UnpairedPreference([U], [A], True)


def test_unpaired_rows() -> None:
    assert unpaired_rows({"prompt": "", "completion": "b", "label": False}, "row 1") == [
        UnpairedPreference("", "b", False)
    ]
    assert unpaired_rows({"prompt": "q", "chosen": "a", "rejected": "b"}, "row 1") == [
        UnpairedPreference("q", "a", True),
        UnpairedPreference("q", "b", False),
    ]


def test_nulls_are_removed_from_messages_and_template_options_are_kept() -> None:
    filled = {**U, "tool_calls": None, "name": "Ann"}
    row = {
        "prompt": [filled],
        "chosen": [A],
        "rejected": [B],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    pair = preference_row(row, "row 1")
    assert pair.prompt == [{**U, "name": "Ann"}]
    assert pair.template == {"enable_thinking": False, "tools": [{"type": "function"}]}


GOOD = {"prompt": "p", "completion": "c", "label": True}
BAD_UNPAIRED: list[tuple[dict[str, Any], str]] = [
    ({"label": 1}, r"label is 1 \(an integer\); expected true or false"),
    ({"label": 0}, r"label is 0 \(an integer\)"),
    ({"label": "true"}, r"label is 'true' \(a string\)"),
    ({"label": None}, r"label is null"),
    ({"label": 1.0}, r"label is 1.0 \(a number\)"),
    ({"completion": 3}, r"completion is 3 \(an integer\); expected a string or a list"),
    ({"completion": None}, r"completion is null"),
    ({"completion": {"speaker": "assistant", "content": "x"}}, r"completion is .* \(an object\)"),
    ({"completion": []}, r"completion is an empty list|prompt is a string but"),
    ({"prompt": None}, r"prompt is missing"),
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
        unpaired_rows({**GOOD, **change}, "data.jsonl, row 12")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": None}, "rejected is missing"),
        ({"chosen": "a", "rejected": 3}, r"rejected is 3 \(an integer\)"),
        ({"chosen": "a", "rejected": [B]}, "chosen is a string but rejected is a list"),
        ({"chosen": [], "rejected": [B]}, "chosen is an empty list"),
        ({"prompt": "p", "chosen": [U, A], "rejected": [U, B]}, "prompt is a string but chosen is a list"),
        ({"prompt": 7, "chosen": "a", "rejected": "b"}, r"prompt is 7 \(an integer\)"),
    ],
)
def test_invalid_pairs(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^row 3: {message}"):
        preference_row(row, "row 3")


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(DataError) as caught:
        unpaired_rows({**GOOD, "label": "x\n" * 500}, "row 1")
    assert len(str(caught.value)) < 150
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        (
            ["prompt", "completion", "label"],
            "preference",
            "training requires chosen and rejected, but the columns are prompt, comp",
        ),
        (["prompt", "completion", "label"], "preference", "use a method for unpaired data"),
        (
            ["prompt", "chosen"],
            "preference",
            "missing column rejected; training requires chosen and rejected; columns: prompt, chosen",
        ),
        (["text"], "preference", "missing columns chosen, rejected; .*; columns: text"),
        (["prompt", "completion"], "unpaired_preference", r"missing column label \(label is true"),
        (
            ["completion", "label"],
            "unpaired_preference",
            "missing column prompt; training requires prompt, completion and label",
        ),
        (["prompt", "rejected"], "unpaired_preference", "missing column chosen"),
        (["text"], "unpaired_preference", "missing columns prompt, completion, label .* columns: text"),
        ([], "unpaired_preference", "columns: none"),
    ],
)
def test_missing_columns(columns: list[str], kind: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^data.jsonl: .*{message}"):
        check_columns(columns, kind, "data.jsonl")


def test_sufficient_columns() -> None:
    check_columns(["prompt", "completion", "label", "extra"], "unpaired_preference", "x")
    check_columns(["chosen", "rejected"], "unpaired_preference", "x")
    check_columns(["chosen", "rejected", "completion"], "preference", "x")
