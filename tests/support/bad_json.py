"""Invalid JSON for ``test_bad_input``: DeepSpeed configurations and options."""

from __future__ import annotations

from support.bad_case import DEEP, Case, file_of, folder_of

NESTED = '{"a":' * DEEP + "1" + "}" * DEEP
ZERO = '{"zero_optimization": %s}'


def deepspeed(name: str, content: str | bytes, *says: str) -> Case:
    """A DeepSpeed configuration with this content."""
    return Case(f"DeepSpeed: {name}", says, {"deepspeed": "@d.json"}, make=file_of("d.json", content))


def option(name: str, key: str, value: str, *says: str, **options: str | None) -> Case:
    """An option with a mapping."""
    return Case(f"JSON in an option: {name}", says, {key: value, **options})


JSON = [
    deepspeed("empty", "", "@d.json: cannot be read (", "at line 1"),
    deepspeed("binary", bytes(range(256)), "@d.json: cannot be read ('utf-8' codec can't decode"),
    deepspeed("nested", NESTED, "@d.json: cannot be read (recursion limit"),
    deepspeed("NaN", '{"gradient_clipping": NaN}', "@d.json: cannot be read ("),
    deepspeed(
        "number of 5000 digits", '{"steps_per_print": %s}' % ("9" * 5000), "@d.json: cannot be read (number out"
    ),
    deepspeed("key twice", '{"bf16": 1, "bf16": 2}', "@d.json: cannot be read (bf16=2: duplicate key"),
    deepspeed("section as a number", ZERO % "2", "zero_optimization=2", "expected an object"),
    deepspeed(
        "negative size", ZERO % '{"stage": 2, "reduce_bucket_size": -5}', "reduce_bucket_size=-5: Input should be gr"
    ),
    deepspeed("word for a number", '{"steps_per_print": "often"}', "steps_per_print='often': expected an integer"),
    Case(
        "DeepSpeed: folder",
        ("no such file, neither as a path nor in ds_configs",),
        {"deepspeed": "@d"},
        make=folder_of("d"),
    ),
    option("nested", "model_init_kwargs", NESTED, "model_init_kwargs=", "recursion limit"),
    option("key twice", "column_map", '{"prompt": "a", "prompt": "b"}', "prompt='b': duplicate key"),
    option(
        "negative weight", "dataset_mixture", '{"@data.jsonl": -1}', "weight=-1: must be greater", dataset_name=None
    ),
]
