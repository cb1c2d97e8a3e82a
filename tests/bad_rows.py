"""Invalid data files for ``test_bad_input``."""

from __future__ import annotations

import gzip
import json
import os

from bad_case import DEEP, Case, file_of, folder_of

OK = '{"prompt": "a", "completion": "b", "label": true}\n'
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
    rows("UTF-16", OK.encode("utf-16"), "@x.jsonl, line 1: not UTF-8 text"),
    rows("Latin-1", OK.replace("a", "é").encode("latin-1"), "@x.jsonl, line 1: not UTF-8 text"),
    rows("NUL at the end", OK.encode() + bytes(9), "@x.jsonl, line 2: invalid JSON"),
    rows("compressed", gzip.compress(OK.encode()), "@x.jsonl, line 1: not UTF-8 text"),
    rows("compressed by name", b"", ".gz is not supported", file="x.jsonl.gz"),
    rows("text by name", OK, ".txt is not supported", file="x.txt"),
    rows("no suffix", OK, "a file without suffix is not supported", file="x"),
    rows("nested", '{"prompt": ' + "[" * DEEP + "]" * DEEP + "}\n", "@x.jsonl: cannot be read: maximum recursion"),
    rows("NaN", OK.replace("true", "NaN"), "@x.jsonl, line 1: invalid JSON: NaN is not a JSON value"),
    rows("5000 digits", OK.replace("true", "9" * 5000), "@x.jsonl, line 1: invalid JSON: Exceeds the limit"),
    rows("half a character", OK.replace('"a"', '"\\ud800"'), "@x.jsonl, line 1: a string contains an unpaired surr"),
    rows("strings", '"hello"\n', "@x.jsonl, line 1: the row is 'hello' (a string)"),
    rows("nulls", "null\n", "@x.jsonl, line 1: the row is null"),
    rows("lists", "[[1], [2]]", "@x.json, row 1: the row is [1] (a list)", file="x.json"),
    rows(
        "an object around them",
        '{"data": [1]}',
        "missing columns prompt, completion, label",
        "columns: data",
        file="x.json",
    ),
    rows("trailing comma", '[{"prompt": "a"},]', "@x.json, line 1: invalid JSON", file="x.json"),
    rows("empty list", "[]", "@x.json: contains no rows", file="x.json"),
    rows("empty objects", "{}\n{}\n", "@x.jsonl: contains no rows"),
    rows("blank lines", "\n\n", "@x.jsonl: contains no rows"),
    rows("header alone", "prompt,completion,label\n", "@x.csv: contains no rows", file="x.csv"),
    rows(
        "too few cells",
        "prompt,completion,label\na,b\n",
        "@x.csv, line 2: the row has 2 cells, but the header",
        file="x.csv",
    ),
    rows(
        "too many cells",
        "prompt,completion\na,b,c\n",
        "@x.csv, line 2: the row has 3 cells, but the header",
        file="x.csv",
    ),
    rows("header twice", "prompt,prompt\na,b\n", "@x.csv, line 1: the header contains column 'prompt'", file="x.csv"),
    rows("open quote", 'prompt,label\n"a,true\n', "@x.csv, line 2: invalid CSV", file="x.csv"),
    rows("label in a table", "prompt,completion,label\na,b,1\n", "@x.csv, line 2: label is '1'", file="x.csv"),
    rows("semicolons", "prompt;label\na;true\n", "columns: prompt;label", file="x.csv"),
    rows("torn Parquet", b"PAR1" + bytes(50), "@x.parquet: cannot be read", file="x.parquet"),
    rows("empty Parquet", b"", "@x.parquet: cannot be read", file="x.parquet"),
    rows("torn Arrow", b"ARROW1\0\0" + bytes(20), "@x.arrow: cannot be read", file="x.arrow"),
    Case(
        "rows: torn saved dataset", ("@x: cannot be read",), {"dataset_name": "@x"}, make=file_of("x/state.json", "{")
    ),
    Case("rows: folder", ("contains neither a saved dataset nor",), {"dataset_name": "@x"}, make=folder_of("x")),
    Case(
        "rows: pipe",
        ("file or folder does not exist",),
        {"dataset_name": "@x.jsonl"},
        make=lambda folder, models: os.mkfifo(folder / "x.jsonl"),
    ),
    Case("rows: no path and no name", ("cannot be read",), {"dataset_name": "a/b/c/d"}),
    Case("rows: offline", ("Couldn't reach 'nobody/nothing' on the Hub",), {"dataset_name": "nobody/nothing"}),
    Case("rows: address", ("file or folder does not exist",), {"dataset_name": "https://example.com/x.jsonl"}),
    Case("rows: no such slice", ("split 'train[:x]' is not valid",), {"dataset_train_split": "train[:x]"}),
    Case("rows: empty slice", ("(split train[:0]): contains no rows",), {"dataset_train_split": "train[:0]"}),
    Case("rows: no split", ("split '' does not exist; available: train",), {"dataset_train_split": ""}),
]

CONTENTS = [
    row("label null", "@x.jsonl, row 1: label is null", label=None),
    row("label of 400 digits", "@x.jsonl, row 1: label is ", label=int("9" * 400)),
    row("prompt null", "@x.jsonl, row 1: prompt is missing", prompt=None),
    row("prompt a number", "@x.jsonl, row 1: prompt is 5 (an integer)", prompt=5),
    row("completion null", "@x.jsonl, row 1: completion is null", completion=None),
    row("both empty", "@x.jsonl: the only row was dropped (1 × the completion is empty)", prompt="", completion=""),
    chat("prompt an object", {"role": "user"}, "prompt[0] has no content"),
    chat("message a string", ["hi"], "@x.jsonl, row 1: prompt[0] is 'hi' (a string)"),
    chat("no role", [{"content": "a"}], "@x.jsonl, row 1: prompt[0] has no role"),
    chat("role a number", [{"role": 3, "content": "a"}], "prompt[0].role is 3 (an integer)"),
    chat("no content", [{"role": "user"}], "prompt[0] has no content"),
    chat("a string beside messages", "a", "prompt is a string but completion is a list"),
    chat("tools half written", [{"role": "user", "content": "a"}], "tools is '[{' (a string), which is", tools="[{"),
    chat("tools a number", [{"role": "user", "content": "a"}], "tools is 5 (an integer)", tools=5),
    rows("half a pair", '{"prompt": "a", "chosen": "b"}\n' * 2, "CPO requires chosen and rejected", method="cpo"),
    rows("answer a list of strings", '{"chosen": ["b"], "rejected": "c"}\n', "chosen[0] is 'b'", method="cpo"),
    rows("nothing for SFT", '{"foo": 1}\n', "SFT requires prompt and completion", "foo", method="sft"),
]

ROWS = [*TEXTS, *CONTENTS]
