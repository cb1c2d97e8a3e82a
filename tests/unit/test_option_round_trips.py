"""Properties: options written as a recipe or on a command line are read as the same options."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.cli.parsing import parse
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS

pytestmark = pytest.mark.usefixtures("one_process")
RATE = st.floats(0, 0.9, allow_subnormal=False)
TEXT = st.text(alphabet="aé1 :#'\"\\,[{", min_size=1, max_size=6).map(lambda text: f"x{text}x")
NAMES = st.lists(st.sampled_from(["q_proj", "k_proj", "v_proj", "1"]), min_size=2, max_size=3, unique=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | RATE | st.sampled_from([1e-7, -2e20]) | TEXT,
    lambda inner: st.lists(inner, max_size=2),
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "learning_rate": RATE,
    "warmup_steps": st.integers(1, 9),
    "max_steps": st.sampled_from([-1, 5]),
    "max_grad_norm": st.sampled_from([0.0, 1e-7, 0.1, 1.0, 2.5e20]),
    "seed": st.integers(0, 2**32 - 1),
    "max_length": st.one_of(st.none(), st.integers(600, 9000)),
    "disable_dropout": st.booleans(),
    "run_name": TEXT,
    "save_strategy": st.sampled_from(["no", "steps", "epoch"]),
    "model_init_kwargs": st.dictionaries(TEXT, JSON, min_size=1, max_size=2),
    "column_map": TEXT.map(lambda name: {"prompt": name}),
}
PEFT = {"lora_target_modules": NAMES, "lora_alpha": st.integers(1, 9), "lora_dropout": RATE}
NEEDED = {"output_dir": "out", "model_name_or_path": "m", "dataset_name": "d", "use_cpu": True}
GIVEN = st.fixed_dictionaries({}, optional=OPTIONS) | st.fixed_dictionaries({"use_peft": st.just(True), **PEFT})


def written(value: Any) -> list[str]:
    """Return the value as arguments of a command line."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, str) else str(value) if isinstance(value, float) else json.dumps(value)]


def values(options: AlignmentConfig) -> dict[str, Any]:
    return json.loads(options.to_json_string())


@settings(max_examples=25)
@given(options=GIVEN, method=st.sampled_from(["kto", "cpo", "dpo", "sft"]))
def test_a_recipe_and_a_command_line_mean_the_same(options: dict[str, Any], method: str) -> None:
    made = METHODS[method](**NEEDED, **options)
    assert {name: getattr(made, name) for name in options} == options
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({"method": method, **NEEDED, **options}))
        assert values(parse([str(recipe)])) == values(made)
        recipe.write_text(made.to_json_string())
        assert values(parse([str(recipe)])) == values(made)
    line = [part for name, value in (NEEDED | options).items() for part in (f"--{name}", *written(value))]
    assert values(parse(["--method", method, *line])) == values(made)
