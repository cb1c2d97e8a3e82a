"""Prompts without completions, and pairs with a margin: stored columns, dropped rows, and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from datasets import Array2D, Dataset, Features, Image, IterableDataset, List, Value
from support.data_tokenizers import CHATML, char_tokenizer
from support.prepared import prepared

from alignment.config.errors import DataError
from alignment.config.options_data import COLUMNS
from alignment.data.columns import arranged, used_columns
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.prompts import PROMPTS, PromptRow, prompt_row
from alignment.data.kinds.scored_pairs import SCORED_PAIRS, margin_of
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.prepare import Prepared
from alignment.data.sources import from_stream
from alignment.data.tokenization import Limits

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def made(data: Any, folder: Path, kind: Any = PROMPTS, limits: Limits | None = None, **options: Any) -> Prepared:
    """Prepare a dataset or a list of rows."""
    tokenizer = options.pop("tokenizer", None) or char_tokenizer(before=("<s>",), template=CHATML)
    return prepared(data, kind, folder, tokenizer, limits, **options)


def columns_of(found: Prepared) -> list[Any]:
    """Return the additional columns of every row."""
    return [prompt_row(found.dataset, index).columns for index in range(len(found.dataset))]


def test_other_columns_are_stored_with_prompts(tmp_path: Path) -> None:
    when = datetime(2024, 5, 1, 12, 30, tzinfo=UTC)
    first = {"answer": {"x": 1, "y": None}, "when": "2024-05-01T12:30:00+00:00", "label": 3, "system": "é"}
    second = {"answer": {"x": None, "y": [2.5]}, "when": None, "label": 4, "system": ""}
    rows = [{"prompt": "ab c", **first, "when": when}, {"prompt": "", **second}]
    found = made(Dataset.from_list(rows), tmp_path)
    assert found.dataset.features == PROMPTS.features
    tokenizer = char_tokenizer(before=("<s>",))
    assert [tokenizer.decode(ids) for ids in found.dataset["prompt_ids"]] == ["<s>ab c", "<s>"]
    expected = [PromptRow(0, "ab c", {}, first), PromptRow(1, "", {}, second)]
    assert [prompt_row(found.dataset, index) for index in range(2)] == expected
    report = found.report
    assert (report.rows_in, report.rows_out, report.prompts_cut, report.desirable + report.undesirable) == (2, 2, 0, 0)


def test_messages_template_variables_and_mapped_columns(tmp_path: Path) -> None:
    row = {"question": [USER], "system": "be brief", "prompt": "taken over", "tools": TOOLS, "query": "q", "goal": "g"}
    found = made([row], tmp_path, column_map={"prompt": "question", "system": "system"})
    assert prompt_row(found.dataset, 0) == PromptRow(
        0, [{"role": "system", "content": "be brief"}, USER], {"tools": TOOLS}, {"query": "q", "goal": "g"}
    )
    renamed = made([{"prompt": "a", "output": "b"}], tmp_path, column_map={"completion": "output"})
    assert columns_of(renamed) == [{"completion": "b"}]


def test_a_prompt_that_is_too_long_is_dropped_and_never_truncated(tmp_path: Path) -> None:
    rows = [{"prompt": "abcde"}, {"prompt": "a b c"}, {"prompt": "a b cd"}]  # 5, 6 and 7 tokens with BOS
    found = made(rows, tmp_path, limits=Limits(max_prompt_length=6))
    assert found.dataset["row"][:] == [0, 1]
    assert [len(ids) for ids in found.dataset["prompt_ids"]] == [5, 6]
    assert found.report.dropped == {"prompt longer than 6 tokens": 1}
    assert found.report.summary().startswith("2 of 3 rows kept, 1 dropped: 1 × prompt longer than 6 tokens")
    with pytest.raises(DataError, match=r"^data: 1 of 3 rows would be dropped \(1 × prompt longer than 6 tokens\)"):
        made(rows, tmp_path, limits=Limits(max_prompt_length=6), strict=True)
    with pytest.raises(DataError, match=r"^data: all 3 rows were dropped .*; increase max_length \(and decrease max"):
        made(rows, tmp_path, limits=Limits(max_prompt_length=4))


def test_an_empty_prompt_needs_a_first_token(tmp_path: Path) -> None:
    rows = [{"prompt": ""}, {"prompt": "a"}]
    for options, ids in (({}, [0]), ({"bos": None}, [1])):
        assert made(rows, tmp_path, tokenizer=char_tokenizer(**options)).dataset[0]["prompt_ids"] == ids
    found = made(rows, tmp_path, tokenizer=char_tokenizer(bos=None, eos=None))
    assert found.dataset["row"][:] == [1]
    [reason] = found.report.dropped
    assert reason.startswith("no tokens to start from (empty prompt")


NAN = float("nan")


def test_additional_columns_never_make_a_dataset_invalid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "score": Value("float32"), "seen": List(Value("float64")), "image": Image(),
        "packed": List({"raw": Value("binary")}), "price": Value("decimal128(5, 2)"),
        "took": Value("duration[s]"), "grid": Array2D((1, 2), "float32")
    }  # fmt: skip
    row: dict[str, Any] = {"score": 0.5, "seen": [1.0, -math.inf], "packed": [{"raw": b"x"}], "price": Decimal("1.50")}
    row |= {"prompt": "a", "took": timedelta(seconds=3), "grid": [[1.0, NAN]], "image": None}
    rows = [row, {**row, "score": NAN}]
    data = Dataset.from_list(rows, features=Features({"prompt": Value("string"), **given}))
    expected = {"seen": [1.0, None], "grid": [[1.0, None]]}
    assert columns_of(made(data, tmp_path)) == [{"score": 0.5, **expected}, {"score": None, **expected}]
    (said,) = [record.getMessage() for record in caplog.records if "dropped, because" in record.getMessage()]
    assert said.startswith("data: dropped, ") and said.endswith(": column image, packed, price, took")


def test_further_columns_of_a_list(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "x", "gap": 1, "deep": {"y": NAN}, "when": datetime(2024, 5, 1)},
        {"prompt": "b", "answer": NAN, "gap": NAN, "deep": None, "when": None},
    ]
    assert columns_of(made(rows, tmp_path)) == [
        {"answer": "x", "gap": 1.0, "deep": {"y": None}, "when": "2024-05-01T00:00:00"},
        {"answer": None, "gap": None, "deep": None, "when": None},
    ]
    with pytest.raises(DataError, match="^dataset, row 2: raw is b'x'.*, which cannot be stored"):
        made([{"prompt": "a", "raw": 1}, {"prompt": "a", "raw": b"x"}], tmp_path)
    pairs = [{**PAIR, "gap": 1}, {**PAIR, "gap": NAN}]
    with pytest.raises(DataError, match="^data, row 2: margin is nan"):
        made(pairs, tmp_path, SCORED_PAIRS, column_map={"margin": "gap"})


def dated() -> Iterator[dict[str, Any]]:
    """Rows of a stream."""
    yield {"prompt": "a", "when": datetime(2024, 5, 1), "answer": [1, None]}
    yield {"prompt": "b", "when": None, "answer": "two"}


def test_a_stream_keeps_every_column_of_prompts_only(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(dated)
    data = from_stream(stream, 5, used_columns(PROMPTS, None), "data", tmp_path)
    assert columns_of(made(data, tmp_path)) == [
        {"when": "2024-05-01T00:00:00", "answer": [1, None]},
        {"when": None, "answer": "two"},
    ]
    assert used_columns(SCORED_PAIRS, {"prompt": "answer"}) == {*COLUMNS, "answer", *SCORED_PAIRS.tokens.names}
    assert "margin" not in (used_columns(PAIRS, None) or set())


PAIR = {"prompt": "ab", "chosen": "c", "rejected": "d"}


def test_pairs_with_margins(tmp_path: Path) -> None:
    rows = [{**PAIR, "margin": 1.5}, {**PAIR, "margin": None}, {**PAIR, "chosen": "d", "prompt": None}, PAIR]
    found = made(rows, tmp_path, SCORED_PAIRS)
    assert found.dataset.features == SCORED_PAIRS.features
    assert found.dataset["margin"][:] == [1.5, 0.0, 0.0] and found.dataset["row"][:] == [0, 1, 3]
    assert found.report.dropped == {"chosen and rejected are identical": 1}
    assert made([PAIR], tmp_path, SCORED_PAIRS).dataset["margin"][:] == [0.0]
    assert "margin" not in arranged(Dataset.from_list(rows), {}, PAIRS, "data")[0].column_names


@pytest.mark.parametrize("kind", [SCORED_PAIRS, PAIRS, UNPAIRED])
def test_pairs_with_equal_completions_are_dropped(tmp_path: Path, kind: Any) -> None:
    pairs = [("c", "c"), ("ab c", "ab d"), ("c", "d"), ("", "")]
    rows = [{"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    tokenizer = char_tokenizer(eos=None)  # without it an empty answer is empty
    limits = Limits(max_completion_length=2)
    found, each = made(rows, tmp_path, kind, limits, tokenizer=tokenizer), 1 + (kind == UNPAIRED)
    assert found.dataset["row"][:] == [2] * each
    assert found.report.dropped == {
        "chosen and rejected are identical": 2 * each,
        "chosen and rejected are identical after truncation": each,
    }


@pytest.mark.parametrize("kind", [SCORED_PAIRS, PAIRS, UNPAIRED])
def test_equal_completions_of_conversations_are_dropped(tmp_path: Path, kind: Any) -> None:
    """Otherwise, KTO would see a completion as desirable and as undesirable."""
    answer, other = ({"role": "assistant", "content": text} for text in ("a", "b"))
    same = [(None, [USER, answer]), (None, [answer]), ([USER], [answer]), ([USER], [USER, answer]), ("hi", [answer])]
    rows: list[dict[str, Any]] = [{"prompt": prompt, "chosen": said, "rejected": said} for prompt, said in same]
    found = made([*rows, {"prompt": [USER], "chosen": [answer], "rejected": [other]}], tmp_path, kind)
    each = 1 + (kind is UNPAIRED)
    assert found.dataset["row"][:] == [len(same)] * each
    assert found.report.dropped == {"chosen and rejected are identical": len(same) * each}


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), 1e39, 10**400, True, "wide", [1.0, 2.0], {"a": 1}])
def test_a_margin_is_a_finite_number(margin: Any) -> None:
    with pytest.raises(DataError, match="^data, row 3: margin is .*; expected a finite number or null$"):
        margin_of({**PAIR, "margin": margin}, "data, row 3")
    assert margin_of({**PAIR, "margin": [-0.5]}, "data, row 3") == -0.5
