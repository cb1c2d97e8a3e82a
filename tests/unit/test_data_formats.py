"""Rows at their limits: implicit prompts, columns and column_map, lengths, invalid rows, and a byte order mark."""

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
from support.data_tokenizers import PLAIN, char_tokenizer
from support.prepared import prepared

from alignment.cli.parsing import parse
from alignment.config.errors import DataError
from alignment.config.fields import choices_of
from alignment.config.options_data import Truncation, mixture_parts
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
from alignment.methods.kto_options import KTOConfig


def pair_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Prompt, chosen and rejected completion of a row."""
    source = PAIRS.parse(row, "row 1", {})
    return (source.prompt, *source.completions)


U, V = {"role": "user", "content": "hello"}, {"role": "user", "content": "bye"}
A, B = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
S = {"role": "system", "content": "be brief"}
MARK = "\n\nAssistant:"
HH = f"\n\nHuman: hi{MARK}"


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
        (f"{HH} I am well", f"{HH} I am not", (HH, " I am well", " I am not")),
        (f"{HH} b{HH} d", f"{HH} b{HH} e", (f"{HH} b{HH}", " d", " e")),
        # The later marker would leave the first completion empty.
        (f"{HH} b{MARK}", f"{HH} b{MARK} c", (HH, f" b{MARK}", f" b{MARK} c")),
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


def test_explicit_prompts() -> None:
    kept = pair_of({"prompt": "a b", "chosen": "a b c", "rejected": "a b d"})
    assert kept == ("a b", "a b c", "a b d")  # strings are unchanged
    assert pair_of({"prompt": [S, U], "chosen": [S, U, A], "rejected": [B]}) == ([S, U], [A], [B])
    assert pair_of({"prompt": [A], "chosen": [A], "rejected": [B]}) == ([A], [A], [B])
    row = UNPAIRED.parse({"prompt": [U], "completion": [U, A], "label": True}, "row 1", {})
    assert row == Source([U], ([A],), "row 1", further={"label": [True]})


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


ALPACA = {"prompt": "instruction", "query": "input", "completion": "output", "label": "kto_tag"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
ROW = {"instruction": "do", "input": "it", "output": "ok", "kto_tag": True}


def texts(
    rows: Any, column_map: dict[str, str] | None, folder: Path, kind: Any = UNPAIRED, **options: Any
) -> list[list[str]]:
    """Return the decoded columns of every prepared row."""
    tokenizer = char_tokenizer(template=PLAIN)
    dataset = prepared(rows, kind, folder, tokenizer, column_map=column_map, **options).dataset
    columns = [name for name in dataset.column_names if name.endswith("_ids")]
    return [[tokenizer.decode(row[name]) for name in columns] for row in dataset]


def test_a_mapped_column_replaces_a_column_of_the_same_name(tmp_path: Path) -> None:
    row = {"prompt": "aa", "question": "cc", "chosen": "d", "rejected": "e", "query": "ff", "system": "g"}
    # query and system are only used if they are mapped.
    assert texts([row], None, tmp_path, PAIRS) == [["aa", "d</s>", "e</s>"]]
    assert texts([row], {"prompt": "question"}, tmp_path, PAIRS) == [["cc", "d</s>", "e</s>"]]
    swapped = {"chosen": "rejected", "rejected": "chosen"}
    assert texts([row], swapped, tmp_path, PAIRS) == [["aa", "e</s>", "d</s>"]]
    assert texts([row], {"prompt": "prompt", "query": "query"}, tmp_path, PAIRS) == [["aa\nff", "d</s>", "e</s>"]]


def test_system_column(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "oh"}]
    names = {"messages": "conversations", "system": "system", "label": "kto_tag"}
    rows = [{"conversations": turns, "system": system, "kto_tag": True} for system in ("be brief", "", None)]
    headed = ["system: be brief\nuser: hi\nassistant:", " oh\n</s>"]
    assert texts(rows, names, tmp_path) == [headed, *[["user: hi\nassistant:", " oh\n</s>"]] * 2]
    twice = [{"conversations": [{"from": "system", "value": "x"}, *turns], "system": "y", "kto_tag": True}]
    with pytest.raises(DataError, match="^data, row 1: system is set, but .* already start with a system message"):
        texts(twice, names, tmp_path)
    with pytest.raises(DataError, match="^data, row 1: system requires a conversation"):
        texts([{**ROW, "system": "y"}], {**ALPACA, "system": "system"}, tmp_path)


def test_labels_of_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("instruction,input,output,kto_tag\ndo,it,ok,True\ndo,,no,false\n")
    data = load_split(str(path), None, "train")
    assert prepared(data, UNPAIRED, tmp_path, column_map=ALPACA).dataset["label"][:] == [True, False]
    path.write_text("instruction,input,output,kto_tag\ndo,it,ok,yes\n")
    said = r"^data, row 1: label is 'yes' \(a string\); .* \(column_map: .*label: kto_tag"
    with pytest.raises(DataError, match=said):
        texts(load_split(str(path), None, "train"), ALPACA, tmp_path)


def test_labels_are_mapped(tmp_path: Path) -> None:
    """The text of a value counts, not its case; true and false need no entry. The map is part of the data's key."""
    given = ["Up", " down", 1, 0.0, True, "👎", " True", "FALSE"]
    data = [{"prompt": "a", "completion": "b", "label": label} for label in given]
    for down in (False, True):
        label_map = {"up": True, "down": down, "1": True, "0": False, "👎": False}
        made = prepared(data, UNPAIRED, tmp_path, label_map=label_map).dataset
        assert made["label"][:] == [True, down, True, False, True, False, True, False]
    assert len(list(tmp_path.iterdir())) == 2


def test_strings_as_turns(tmp_path: Path) -> None:
    """With ``apply_chat_template``, strings are one user turn and one assistant turn; messages do not change."""
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d", "system": "e", "query": "f"}
    asked = "user: a\nassistant:"
    said = {"prompt": "a", "completion": "b", "label": True}
    pair = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    for kind, rows, expected in [
        (UNPAIRED, [said, pair], [[asked, " b\n</s>"], [asked, " c\n</s>"], [asked, " d\n</s>"]]),
        (UNPAIRED, [{"messages": TURNS, "label": True}], [[asked, " c\n</s>"]]),
        (PAIRS, [row], [[asked, " c\n</s>", " d\n</s>"]]),
        (COMPLETIONS, [row], [[asked, " b\n</s>"]]),
        (PROMPTS, [row], [[asked]]),
    ]:
        assert texts(rows, None, tmp_path, kind, apply_chat_template=True) == expected
    mapped = {name: name for name in ("system", "query")}
    headed = [["system: e\nuser: a\nf\nassistant:", " c\n</s>", " d\n</s>"]]
    assert texts([row], mapped, tmp_path, PAIRS, apply_chat_template=True) == headed
    assert texts([row], None, tmp_path, PAIRS) == [["a", "c</s>", "d</s>"]]  # the option is part of the key
    begun = {"prompt": [], "completion": TURNS[1:], "label": True}
    opened = texts([{**begun, "prompt": "", "completion": "c"}], None, tmp_path, apply_chat_template=True)
    assert opened == texts([begun], None, tmp_path) == [["assistant: ", "c\n</s>"]]
    assert texts([said, {**said, "completion": ""}], None, tmp_path, apply_chat_template=True) == [[asked, " b\n</s>"]]
    with pytest.raises(DataError, match="^data, row 1: prompt is missing, so apply_chat_template"):
        texts([{"text": "a"}], None, tmp_path, COMPLETIONS, apply_chat_template=True)


def test_query_requires_strings() -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "query": "b", "completion": "c", "label": True}
    for prompt in (row["prompt"], None):
        with pytest.raises(DataError, match="^row 1: query is 'b' .* and prompt is .*; expected strings"):
            UNPAIRED.parse({**row, "prompt": prompt}, "row 1", {})


MAPPED_IN_VAIN = [
    (UNPAIRED, {"messages": TURNS, "label": True, "query": "b"}, "query is 'b' .* the row has messages"),
    (COMPLETIONS, {"messages": TURNS, "query": "b"}, "query is 'b' .* the row has messages"),
    (COMPLETIONS, {"text": "a", "query": "b"}, "query is 'b' .* the row has text"),
    (COMPLETIONS, {"text": "a", "system": "b"}, "system is 'b' .* the row has text"),
]


@pytest.mark.parametrize(("kind", "row", "said"), MAPPED_IN_VAIN)
def test_a_mapped_text_is_never_ignored(kind: Any, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^row 1: {said} .*; remove (query|system) from column_map$"):
        kind.parse(row, "row 1", {})
    assert kind.parse({**row, "query": "", "system": None}, "row 1", {})  # an empty value adds nothing


def test_column_map_from_every_source_of_options(tmp_path: Path) -> None:
    recipe, names = tmp_path / "a.yaml", {"prompt": "question"}
    options = {"method": "kto", "model_name_or_path": "m", "dataset_name": "d", "column_map": names}
    recipe.write_text(json.dumps(options))
    assert parse([str(recipe)]).column_map == names
    assert parse([str(recipe), "--column_map", json.dumps({"prompt": "other"})]).column_map == {"prompt": "other"}
    assert KTOConfig("o", column_map=names).column_map == names
    short = ["--column_map", "prompt=question, completion = a b", "--label_map", "Up=true,0=false"]
    parsed = parse([str(recipe), *short])
    assert parsed.column_map == {"prompt": "question", "completion": "a b"}
    labels = {"up": True, "0": False}
    assert parsed.label_map == labels == KTOConfig("o", label_map={"Up": True, 0: False}).label_map
    part = mixture_parts([{"dataset_name": "d", "label_map": "up=true,0=false", "column_map": "prompt=question"}])[0]
    assert (part.label_map, part.column_map) == (labels, names)


def test_rows_of_both_kinds_in_one_dataset() -> None:
    nulls = dict.fromkeys(("prompt", "completion", "label", "chosen", "rejected"))
    pair = UNPAIRED.parse({**nulls, "prompt": "p", "chosen": "a", "rejected": "b"}, "row 1", {})
    assert (pair.completions, pair.further) == (("a", "b"), {"label": [True, False]})
    single = UNPAIRED.parse({**nulls, "prompt": "p", "completion": "c", "label": False}, "row 1", {})
    assert (single.completions, single.further) == (("c",), {"label": [False]})
    both = {"prompt": "p", "completion": "c", "label": True, "chosen": "a", "rejected": "b"}
    for row, said in (
        (both, "both completion, label and chosen, rejected are set; keep one of the two"),
        ({**nulls, "prompt": "p"}, "label is null"),
        ({**nulls, "prompt": "p", "completion": "c"}, "label is null; expected true or false"),
        ({**nulls, "prompt": "p", "chosen": "c", "label": True}, "rejected is missing"),
    ):
        with pytest.raises(DataError, match=f"^row 1: {said}"):
            UNPAIRED.parse(row, "row 1", {})
