"""Rows at their limits: implicit prompts, columns, lengths, invalid rows, and files with a byte order mark."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Json, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.config.errors import DataError
from alignment.config.fields import choices_of
from alignment.config.options_data import Truncation
from alignment.data.kinds.base import Kind
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.messages import Source
from alignment.data.readers import infer_features
from alignment.data.sources import load_split
from alignment.data.tokenization import EMPTY, NO_CONTEXT, NO_ROOM, Limits, fit


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
    assert pair_of({"chosen": chosen, "rejected": rejected}) == expected


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
    assert row == Source([U], ([A],), "row 1", further={"label": [True]})


def test_unpaired_rows() -> None:
    one = labeled({"prompt": "", "completion": "b", "label": False})
    assert one == Source("", ("b",), "row 1", further={"label": [False]})
    both = labeled({"prompt": "q", "chosen": "a", "rejected": "b"})
    assert both == Source("q", ("a", "b"), "row 1", further={"label": [True, False]})


def test_nulls_are_removed_from_messages_and_template_options_are_kept() -> None:
    filled = {**U, "tool_calls": None, "name": "Ann"}
    own = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    pair = PAIRS.parse({"prompt": [filled], "chosen": [A], "rejected": [B], **own}, "row 1", {})
    assert pair.prompt == [{**U, "name": "Ann"}]
    assert pair.template == {"enable_thinking": False, "tools": [{"type": "function"}]}


GOOD = {"prompt": "p", "completion": "c", "label": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"label": 1}, r"label is 1 \(an integer\); expected true or false"),
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
BAD_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"rejected": None}, "rejected is missing"),
    ({"rejected": 3}, r"rejected is 3 \(an integer\)"),
    ({"rejected": [B]}, "chosen is a string but rejected is a list"),
    ({"chosen": [], "rejected": [B]}, "chosen is an empty list"),
    ({"prompt": "p", "chosen": [U, A], "rejected": [U, B]}, "prompt is a string but chosen is a list"),
    ({"prompt": 7, "rejected": "b"}, r"prompt is 7 \(an integer\)"),
]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        *((UNPAIRED, GOOD | row, said) for row, said in BAD),
        *((PAIRS, {"chosen": "a"} | row, said) for row, said in BAD_PAIRS),
    ],
)
def test_invalid_rows(kind: Kind, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^data.jsonl, row 12: ({message})") as caught:
        kind.parse(row, "data.jsonl, row 12", {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        (["prompt", "completion", "label"], PAIRS, "missing columns chosen, rejected; .*; columns: prompt, comp"),
        (["prompt", "chosen"], PAIRS, "missing column rejected; training requires .*; columns: prompt, chosen"),
        (["prompt", "completion"], UNPAIRED, "missing column label;"),
        ([], UNPAIRED, "columns: none"),
    ],
)
def test_missing_columns(columns: list[str], kind: Kind, message: str) -> None:
    with pytest.raises(DataError, match=f"^data.jsonl: .*{message}"):
        kind.check_columns(columns, columns, "data.jsonl", "training")


MODES = choices_of(Truncation)
LENGTH = st.one_of(st.none(), st.integers(1, 9))
TOKENS = st.integers(0, 9).map(lambda count: list(range(100, 100 + count)))


@settings(max_examples=300)
@given(
    prompt=TOKENS, completions=st.lists(TOKENS, min_size=1, max_size=2), longest=LENGTH, prompt_most=st.integers(1, 9),
    completion_most=LENGTH, mode=st.sampled_from(MODES), head=st.integers(0, 2), alone=st.booleans()
)  # fmt: skip
def test_every_limit_holds_and_nothing_else_is_cut(
    prompt: list[int], completions: list[list[int]], longest: int | None, prompt_most: int,
    completion_most: int | None, mode: str, head: int, alone: bool
) -> None:  # fmt: skip
    """The prompt is cut first, then each completion to the space that is left."""
    fitted = fit(prompt, completions, Limits(longest, prompt_most, completion_most, mode), head, alone)
    kept = fitted.prompt
    assert len(kept) == min(len(prompt), prompt_most) and fitted.prompt_cut == (len(kept) < len(prompt))
    first = len(kept) if mode == "keep_start" else min(head, len(kept))
    assert kept[:first] == prompt[:first] and kept[first:] == prompt[len(prompt) - len(kept) + first :]
    room = 99 if longest is None else longest - len(kept)
    most = room if completion_most is None else min(room, completion_most)
    for given_ids, found, cut, reason in zip(completions, fitted.completions, fitted.cut, fitted.reasons, strict=True):
        assert found == ([] if reason else given_ids[:most]) and cut == (0 < len(found) < len(given_ids))
        assert reason == (
            EMPTY if not given_ids else NO_CONTEXT if not (kept or alone) else NO_ROOM if room < 1 else None
        )


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv"])
def test_a_byte_order_mark_is_no_text(suffix: str, tmp_path: Path) -> None:
    """Notepad and Excel write one."""
    path, row = tmp_path / f"rows.{suffix}", {"prompt": "é", "completion": "b", "label": True}
    texts = {"json": json.dumps([row]), "jsonl": json.dumps(row) + "\n", "csv": "prompt,completion,label\né,b,TRUE\n"}
    path.write_text(texts[suffix], encoding="utf-8-sig")
    assert load_split(str(path), None, "train").to_list() == [row]


@pytest.mark.parametrize(
    ("value", "plain"), [(2**63 - 1, True), (2**63, False), (-(2**63), True), (-(2**63) - 1, False)]
)
def test_integers_beyond_64_bits_are_stored_as_json(value: int, plain: bool) -> None:
    feature = infer_features([("line 1", {"n": value}), ("line 2", {"n": None})])["n"]
    assert feature == Value("int64") if plain else isinstance(feature, Json)


def test_the_columns_that_each_kind_of_rows_needs() -> None:
    """Every set of columns."""
    known = ("prompt", "completion", "label", "chosen", "rejected", "messages", "text")
    for chosen in itertools.product((False, True), repeat=len(known)):
        names = {name for name, there in zip(known, chosen) if there}
        pair, answered = {"chosen", "rejected"} <= names, {"prompt", "completion"} <= names or "messages" in names
        fits = {
            PAIRS: pair,
            SCORED_PAIRS: pair,
            UNPAIRED: pair or ("label" in names and answered),
            COMPLETIONS: answered or "text" in names,
            PROMPTS: "prompt" in names,
        }
        for kind, enough in fits.items():
            with contextlib.nullcontext() if enough else pytest.raises(DataError, match="^data: "):
                kind.check_columns(names, sorted(names), "data", "training")
