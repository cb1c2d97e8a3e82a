"""Invalid JSON for ``test_bad_input``: DeepSpeed configurations and options."""

from __future__ import annotations

from bad_case import DEEP, Case, file_of, folder_of

NESTED = '{"a":' * DEEP + "1" + "}" * DEEP
ZERO = '{"zero_optimization": %s}'


def deepspeed(name: str, content: str | bytes, *says: str) -> Case:
    """A DeepSpeed configuration with this content."""
    return Case(f"DeepSpeed: {name}", says, {"deepspeed": "@d.json"}, make=file_of("d.json", content))


def option(name: str, key: str, value: str, *says: str, **options: str | None) -> Case:
    """An option with a mapping."""
    return Case(f"JSON in an option: {name}", says, {key: value, **options})


JSON = [
    deepspeed("list", "[1]", "@d.json: expected a JSON object with DeepSpeed keys, found list"),
    deepspeed("null", "null", "@d.json: expected a JSON object with DeepSpeed keys, found NoneType"),
    deepspeed("empty", "", "@d.json, line 1: invalid JSON: Expecting value"),
    deepspeed("binary", bytes(range(256)), "@d.json: cannot be read ('utf-8' codec can't decode"),
    deepspeed("UTF-16", "{}".encode("utf-16"), "@d.json: cannot be read ('utf-8' codec can't decode"),
    deepspeed("byte order mark", b"\xef\xbb\xbf{", "@d.json, line 1: invalid JSON: Expecting property name"),
    deepspeed("comment", '{\n// stage\n"bf16": {}}', "@d.json, line 2: invalid JSON"),
    deepspeed("trailing comma", '{"bf16": {},}', "@d.json, line 1: invalid JSON"),
    deepspeed("single quotes", "{'bf16': {}}", "@d.json, line 1: invalid JSON"),
    deepspeed("YAML", "zero_optimization:\n  stage: 2\n", "@d.json, line 1: invalid JSON"),
    deepspeed("nested", NESTED, "@d.json: the JSON is nested too deeply"),
    deepspeed("NaN", '{"gradient_clipping": NaN}', "@d.json: NaN is not a JSON value"),
    deepspeed("number of 5000 digits", '{"steps_per_print": %s}' % ("9" * 5000), "@d.json: Exceeds the limit"),
    deepspeed("key twice", '{"bf16": 1, "bf16": 2}', "@d.json: bf16=2: duplicate key"),
    deepspeed("section as a list", ZERO % "[2]", "zero_optimization=[2]", "expected an object"),
    deepspeed("section as a number", ZERO % "2", "zero_optimization=2", "expected an object"),
    deepspeed("section as a truth", '{"bf16": true}', "bf16=True in the DeepSpeed JSON: expected an object"),
    deepspeed("stage as text", ZERO % '{"stage": "3"}', "zero_optimization.stage='3': set 0, 1, 2 or 3"),
    deepspeed("stage as a truth", ZERO % '{"stage": true}', "zero_optimization.stage=True: set 0, 1, 2 or 3"),
    deepspeed("stage as a fraction", ZERO % '{"stage": 2.5}', "zero_optimization.stage=2.5: set 0, 1, 2 or 3"),
    deepspeed("no such stage", ZERO % '{"stage": 7}', "zero_optimization.stage=7: set 0, 1, 2 or 3"),
    deepspeed(
        "device as text", ZERO % '{"stage": 2, "offload_optimizer": "cpu"}', "offload_optimizer='cpu': expected"
    ),
    deepspeed(
        "no such device",
        ZERO % '{"stage": 2, "offload_optimizer": {"device": "gpu"}}',
        "device='gpu': set cpu or none",
    ),
    deepspeed(
        "negative size", ZERO % '{"stage": 2, "reduce_bucket_size": -5}', "reduce_bucket_size=-5: Input should be gr"
    ),
    deepspeed("word for a number", '{"steps_per_print": "often"}', "steps_per_print='often': expected an integer"),
    deepspeed("word for a truth", '{"wall_clock_breakdown": "yes"}', "wall_clock_breakdown='yes': expected a boolean"),
    deepspeed("list for a mapping", '{"flops_profiler": [1]}', "flops_profiler=[1]: expected an object"),
    deepspeed("no key", '{"": 1}', "@d.json: =1: DeepSpeed has no such key"),
    Case(
        "DeepSpeed: folder",
        ("no such file, neither as a path nor in ds_configs",),
        {"deepspeed": "@d"},
        make=folder_of("d"),
    ),
    option("torn", "deepspeed", '{"zero_optimization": {', "expected a string or a mapping"),
    option("nested", "model_init_kwargs", NESTED, "model_init_kwargs=", "nested too deeply"),
    option("NaN", "model_init_kwargs", '{"a": NaN}', "model_init_kwargs=", "NaN is not a JSON value"),
    option("list", "model_init_kwargs", "[1]", "model_init_kwargs='[1]': expected a mapping"),
    option("key twice", "column_map", '{"prompt": "a", "prompt": "b"}', "prompt='b': duplicate key"),
    option("null", "column_map", '{"prompt": null}', "column_map=", "expected a mapping"),
    option(
        "the same column twice", "column_map", '{"prompt": "a", "completion": "a"}', "'a' is mapped to both prompt and"
    ),
    option("empty mixture", "dataset_mixture", "{}", "dataset_mixture is empty", dataset_name=None),
    option(
        "negative weight", "dataset_mixture", '{"@data.jsonl": -1}', "weight=-1: must be greater", dataset_name=None
    ),
    option("word as weight", "dataset_mixture", '{"@data.jsonl": "x"}', "weight='x': expected a", dataset_name=None),
]
