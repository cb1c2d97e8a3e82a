"""Properties and boundary rows of data: lengths at their limits, common prefixes, files with a byte order mark."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
from datasets import Json, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.config.errors import DataError
from alignment.config.fields import choices_of
from alignment.config.options_data import Truncation
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.kinds.pairs import HH_TURN, PAIRS, split_texts
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.readers import infer_features
from alignment.data.sources import load_split
from alignment.data.tokenization import EMPTY, NO_CONTEXT, NO_ROOM, Limits, fit

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


WORDS = st.text(alphabet="ab \n", max_size=8)


@settings(max_examples=300)
@given(common=WORDS, one=WORDS, other=WORDS, turns=st.integers(0, 2))
def test_a_common_prompt_is_the_longest_that_splits_no_word(common: str, one: str, other: str, turns: int) -> None:
    chosen, rejected = (common + HH_TURN * turns + text for text in (one, other))
    if chosen == rejected:
        return
    prompt, *completions = split_texts(chosen, rejected)
    assert [prompt + completion for completion in completions] == [chosen, rejected]
    assert all(completions) or not (chosen and rejected)
    shared = next(i for i in range(99) if chosen[: i + 1] != rejected[: i + 1])
    ends = [
        i + len(HH_TURN) for i in range(shared + 1) if chosen.startswith(HH_TURN, i) and i + len(HH_TURN) <= shared
    ]
    if usable := [end for end in ends if end < min(len(chosen), len(rejected))]:
        assert len(prompt) == usable[-1]
        return
    gaps = [
        i for i in range(min(shared + 1, len(chosen), len(rejected))) if chosen[i].isspace() and rejected[i].isspace()
    ]
    starts = [i for i in gaps if i == 0 or not chosen[i - 1].isspace()]
    assert len(prompt) == (starts[-1] if starts else 0)


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
