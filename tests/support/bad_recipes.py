"""Invalid recipes and command lines for ``test_bad_input``, such as unintended effects of YAML, editors and shells."""

from __future__ import annotations

import os

from support.bad_case import Case, file_of, folder_of

RECIPE = {"recipe": "@recipe.yaml"}
NO_FILE = "no such file, neither as a path nor in launch/recipes"


def recipe(name: str, content: str | bytes, *says: str, **options: str | None) -> Case:
    """A recipe with this content."""
    return Case(f"recipe: {name}", says, {**RECIPE, **options}, make=file_of("recipe.yaml", content))


def other(name: str, *says: str, make: object = None, given: str = "@recipe.yaml") -> Case:
    """A file that is not a recipe."""
    return Case(f"recipe: {name}", says, {"recipe": given}, make=make)  # type: ignore[arg-type]


YAML = [
    recipe("tabs", "training:\n\tbeta: 0.1\n", "@recipe.yaml, line 2: invalid YAML", "indent with spaces"),
    recipe("unclosed quote", 'run_name: "kto\nbeta: 1\n', "invalid YAML: found unexpected end of stream"),
    recipe("key twice", "beta: 0.1\nbeta: 0.2\n", "@recipe.yaml, line 2: duplicate key 'beta'"),
    recipe("option in two sections", "a:\n  beta: 0.1\nb:\n  beta: 0.2\n", "beta=0.2: duplicate option"),
    recipe("one word", "kto\n", "expected a mapping, found str"),
    recipe("code", "beta: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    recipe("list as a key", "? [a, b]\n: 1\n", "@recipe.yaml, line 1: the key ['a', 'b'] must be a string"),
    recipe("mapping as a key", "? {a: b}\n: 1\n", "@recipe.yaml, line 1: the key {'a': 'b'} must be a string"),
    recipe("number as a key", "3: 1\n", "the key 3 must be a string"),
    recipe("alias within itself", "model_init_kwargs: &a {b: *a}\n", "found unconstructable recursive node"),
    recipe("nested blocks", "".join(" " * i + "a:\n" for i in range(1000)), "nested too deeply"),
    recipe("NUL", "run_name: a\0b\n", "invalid YAML: unacceptable character"),
    recipe("NUL as an escape", 'output_dir: "a\\0b"\n', "output_dir='a\\x00b': contains a NUL", output_dir=None),
    recipe("number of 5000 digits", "save_steps: " + "9" * 5000, "@recipe.yaml: cannot be read", "4300 digits"),
    recipe("null for a number", "learning_rate:\n", "learning_rate=None: must be a valid number"),
    recipe("truth for a number", "save_steps: yes\n", "save_steps=True: must be a valid number"),
    recipe("recipe as a method", "method: simpo\n", "method='simpo': unknown method; it is a recipe", method=None),
    recipe("list of methods", "method: [kto]\n", "@recipe.yaml: method=", "unknown method", method=None),
    recipe("binary", bytes(range(256)), "@recipe.yaml: cannot be read ('utf-8' codec can't decode"),
    recipe("byte order mark and CRLF", b"\xef\xbb\xbfbetta: 0.1\r\n", "betta=0.1: unknown option"),
    recipe("large", "# " + "x" * 1_100_000, "@recipe.yaml: too large", "if it is a data file"),
    other("data file", "@data.jsonl, line 2: invalid YAML", given="@data.jsonl"),
    other("folder", NO_FILE, make=folder_of("recipe.yaml")),
    other("pipe", NO_FILE, make=lambda folder, models: os.mkfifo(folder / "recipe.yaml")),
    other("absent", NO_FILE, "launch/recipes: alphapo", given="@none.yaml"),
    other("torn JSON", "@r.json, line 1: invalid YAML", make=file_of("r.json", '{"beta": 0.1'), given="@r.json"),
]

COMMAND_LINES = [
    Case("command line: nothing", ("no recipe and no --method",), arguments=()),
    Case("command line: one dash", (f"'-': {NO_FILE}",), arguments=("-",)),
    Case(
        "command line: a dash of a text processor", ("'–beta' belongs to no option",), arguments=("kto", "–beta", "1")
    ),
    Case("command line: a long name", ("unknown option",), arguments=("kto", "--" + "x" * 9000, "1")),
    Case("command line: a line break", ("a b='1': unknown option",), arguments=("kto", "--a\nb", "1")),
    Case("command line: a name too long", ("File name too long",), arguments=("a" * 300 + ".yaml",)),
    Case("command line: half a character", ("dataset_name=", "UTF-8"), {"dataset_name": "\udcff.jsonl"}),
    Case("value: other digits", ("save_steps='١٢': must be a valid number",), {"save_steps": "١٢"}),
    Case("value: beyond all floats", ("learning_rate='1e999': must be a finite",), {"learning_rate": "1e999"}),
    Case("value: too large a seed", ("seed='4294967296': must be",), {"seed": str(2**32)}),
    Case("value: NUL", ("dataset_name='a\\x00b': contains a NUL",), {"dataset_name": "a\0b"}),
]
