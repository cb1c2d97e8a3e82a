"""Invalid data files for ``test_bad_input``."""

from __future__ import annotations

import json
import os

from support.bad_case import DEEP, Case, file_of

LABELED = {"prompt": "a", "completion": "b", "label": True}
CHAT_END = [{"role": "assistant", "content": "b"}]


def rows(name: str, content: str | bytes, *says: str, file: str = "x.jsonl", method: str = "kto") -> Case:
    """A data file with this content."""
    return Case(f"rows: {name}", says, {"dataset_name": f"@{file}"}, method=method, make=file_of(file, content))


def row(name: str, *says: str, **values: object) -> Case:
    """A KTO row in which these values replace valid ones."""
    return rows(name, json.dumps({**LABELED, **values}) + "\n", *says)


def chat(name: str, prompt: object, *says: str, **more: object) -> Case:
    """A conversation with this prompt."""
    return row(name, *says, prompt=prompt, completion=CHAT_END, **more)


TEXTS = [
    rows("compressed by name", b"", ".gz is not supported", file="x.jsonl.gz"),
    rows("nested", '{"prompt": ' + "[" * DEEP + "]" * DEEP + "}\n", "@x.jsonl: cannot be read: maximum recursion"),
    rows("strings", '"hello"\n', "@x.jsonl, line 1: the row is 'hello' (a string)"),
    rows("lists", "[[1], [2]]", "@x.json, row 1: the row is [1] (a list)", file="x.json"),
    rows("byte order mark alone", b"\xef\xbb\xbf", "@x.jsonl: contains no rows"),
    rows("empty list", "[]", "@x.json: contains no rows", file="x.json"),
    rows("torn Parquet", b"PAR1" + bytes(50), "@x.parquet: cannot be read", file="x.parquet"),
    rows("torn Arrow", b"ARROW1\0\0" + bytes(20), "@x.arrow: cannot be read", file="x.arrow"),
    Case(
        "rows: torn saved dataset", ("@x: cannot be read",), {"dataset_name": "@x"}, make=file_of("x/state.json", "{")
    ),
    Case(
        "rows: pipe",
        ("file or folder does not exist",),
        {"dataset_name": "@x.jsonl"},
        make=lambda folder, models: os.mkfifo(folder / "x.jsonl"),
    ),
    Case("rows: no path and no name", ("cannot be read",), {"dataset_name": "a/b/c/d"}),
    Case(
        "rows: offline",
        ("nobody/nothing, split train: cannot be read: there is no such file or folder, and the Hub cannot be",),
        {"dataset_name": "nobody/nothing"},
    ),
    rows(
        "an object of splits",
        '{\n"train": [{"prompt": "a"}]\n}',
        "@x.json: missing columns prompt, completion, label",
        "columns: train",
        file="x.json",
    ),
    rows(
        "semicolons",
        "prompt;completion\na;b;c\n",
        "x.csv, line 2: the row has 3 cells",
        "with semicolons",
        file="x.csv",
    ),
    Case("rows: empty slice", ("(split train[:0]): contains no rows",), {"dataset_train_split": "train[:0]"}),
]

CONTENTS = [
    rows(
        "labels of two words",
        "".join(json.dumps({**LABELED, "label": label}) + "\n" for label in ("up", "down", "👍")),
        "row 1: label is 'up' (a string); expected true or false",
        "; set label_map, for example 'up=true,down=false,👍=true'",
    ),
    rows(
        "labels of words, and a row without",
        "".join(json.dumps({**LABELED, "label": label}) + "\n" for label in ("up", "down", None)),
        "row 1: label is 'up'",
        "; set label_map, for example 'up=true,down=false'",
    ),
    rows("row without a label", json.dumps({**LABELED, "label": ""}), "row 1: label is ''", "; remove rows without"),
    rows(
        "ratings",
        "".join(json.dumps({**LABELED, "label": label}) + "\n" for label in range(3)),
        "row 1: label is 0 (an integer)",
        "; set label_map, for example '0=true|false,1=true|false,2=true|false'",
    ),
    rows(
        "many labels",
        "".join(json.dumps({**LABELED, "label": label}) + "\n" for label in range(20)),
        "label is 0 (an integer); expected true or false; the column has 20 different values; map them",
    ),
    Case(
        "rows: label that the map lacks",
        ("row 1: label is 'so' (a string)", "set label_map, for example '1=true,so=true|false'"),
        {"label_map": "1=true"},
        data=[{**LABELED, "label": "so"}],
    ),
    Case(
        "rows: turns without a prompt",
        ("row 1: prompt is missing, so apply_chat_template cannot tell the user's turn",),
        {"apply_chat_template": "true"},
        method="cpo",
        data=[{"chosen": "a b", "rejected": "a c"}],
    ),
    Case(
        "rows: turns without a template",
        ("@data.jsonl, row 1: the row is conversational, but", "has no chat template", "without apply_chat_template"),
        {"apply_chat_template": "true"},
        model="no-template",
    ),
    Case(
        "rows: turns of tokens",
        ("@data.jsonl: apply_chat_template=True: the rows are already tokenized; remove it",),
        {"apply_chat_template": "true"},
        data=[{"prompt_ids": [5], "completion_ids": [6], "label": True}],
    ),
    row("both empty", "@x.jsonl: the only row was dropped (1 × the completion is empty)", prompt="", completion=""),
    chat("prompt an object", {"role": "user"}, "prompt[0] has no content"),
    chat("role a number", [{"role": 3, "content": "a"}], "prompt[0].role is 3 (an integer)"),
    chat("tools half written", [{"role": "user", "content": "a"}], "tools is '[{' (a string), which is", tools="[{"),
    rows("half a pair", '{"prompt": "a", "chosen": "b"}\n' * 2, "CPO requires chosen and rejected", method="cpo"),
    rows("nothing for SFT", '{"foo": 1}\n', "SFT requires prompt and completion", "foo", method="sft"),
]

ROWS = [*TEXTS, *CONTENTS]
