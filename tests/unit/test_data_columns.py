"""``column_map``: how columns are mapped, and the errors for missing columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.data_tokenizers import PLAIN, char_tokenizer

from alignment.cli.parsing import parse
from alignment.config.errors import DataError
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.prepare import load_prepared, prepare
from alignment.data.sources import dataset_from_python, load_split
from alignment.data.tokenization import Limits
from alignment.methods.kto_options import KTOConfig

ALPACA = {"prompt": "instruction", "query": "input", "completion": "output", "label": "kto_tag"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
ROW = {"instruction": "do", "input": "it", "output": "ok", "kto_tag": True}


def texts(rows: Any, column_map: dict[str, str] | None, folder: Path, kind: Any = UNPAIRED) -> list[list[str]]:
    """Return the decoded columns of every prepared row."""
    tokenizer = char_tokenizer(template=PLAIN)
    data = rows if isinstance(rows, Dataset) else dataset_from_python(rows)
    path = prepare(data, kind, tokenizer, Limits(), "data", folder, column_map=column_map, progress=False)
    dataset = load_prepared(path).dataset
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
    dataset = load_split(str(path), None, "train")
    made = prepare(dataset, UNPAIRED, char_tokenizer(), Limits(), "data", tmp_path, column_map=ALPACA, progress=False)
    assert load_prepared(made).dataset["label"][:] == [True, False]
    path.write_text("instruction,input,output,kto_tag\ndo,it,ok,yes\n")
    said = r"^data, row 1: label is 'yes' \(a string\); .* \(column_map: .*label: kto_tag"
    with pytest.raises(DataError, match=said):
        texts(load_split(str(path), None, "train"), ALPACA, tmp_path)


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
