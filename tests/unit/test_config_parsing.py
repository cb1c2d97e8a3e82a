"""The command line and recipes: grammar, sections, precedence, and every message with file, key and value."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.cli.parsing import parse, without_local_rank
from alignment.compat.trl.verdicts import judged_names
from alignment.config.errors import OptionError
from alignment.config.lookup import packaged, packaged_names
from alignment.config.options import AlignmentConfig
from alignment.config.options_model import loading_keywords
from alignment.config.registry import METHODS, option_names
from alignment.methods.kto_options import KTOConfig

pytestmark = pytest.mark.usefixtures("one_process")
NEEDED = ["--output_dir", "out", "--dataset_name", "rows.jsonl", "--model_name_or_path", "m"]


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(argv: list[str]) -> str:
    with pytest.raises(OptionError) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_recipe_flat_and_in_sections(tmp_path: Path) -> None:
    flat = write(tmp_path, "method: kto\nlearning_rate: 5e-7\nbeta: '0.2'\nsave_strategy: no\n", "flat.yaml")
    text = "method: kto\ntraining:\n  learning_rate: 5e-7\n  beta: 0.2\nsaving:\n  save_strategy: no\nlogging:\n"
    first, second = parse([flat, *NEEDED]), parse([write(tmp_path, text), *NEEDED])
    assert first == second
    assert (first.learning_rate, first.beta, first.save_strategy) == (5e-7, 0.2, "no")


WRITTEN: dict[str, list[dict[str, Any]]] = {
    "kto": [
        {"learning_rate": 1e-6, "max_length": None, "logging_steps": 0.5, "report_to": ["tensorboard"]},
        {"deepspeed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e16}, "gradient_clipping": 1e-5}},
        {"dataset_name": None, "dataset_mixture": [{"dataset_name": "ü 🚀.jsonl", "weight": 1e-7}]},
        *({"run_name": name} for name in ("no", "1e-6", "null", "{a}", "é 🚀", "a: b # c")),
        {"use_peft": True, "lora_target_modules": ["q_proj"], "output_dir": "~/a b/é 🚀"},
    ],
    "online_dpo": [{"beta": [0.1, 1e-7], "reward_funcs": ["rewards.py:ü"], "reward_weights": [1e-7]}],
}


@pytest.mark.parametrize(("method", "given"), [(name, one) for name, several in WRITTEN.items() for one in several])
def test_the_options_of_a_run_are_a_recipe(method: str, given: dict[str, Any], tmp_path: Path) -> None:
    needed = {"model_name_or_path": "m", "dataset_name": "rows.jsonl"}
    options = METHODS[method](**(needed | given))
    again = parse([write(tmp_path, options.to_json_string(), "options.json")])
    assert again.to_dict() == options.to_dict() and again == options


def test_a_masked_token_in_the_options_of_a_run_is_not_a_token(tmp_path: Path) -> None:
    given = {"token": "hf_a", "revision": "b"}
    first = KTOConfig("out", model_name_or_path="m", dataset_name="d", model_init_kwargs=given)
    again = parse([write(tmp_path, first.to_json_string(), "options.json")])
    assert loading_keywords(first.model_init_kwargs) == given
    assert loading_keywords(again.model_init_kwargs) == {"revision": "b"}


@pytest.mark.parametrize("given", [["--local_rank=1"], ["--local-rank", "0"], []])
def test_the_local_rank_before_a_command_and_a_recipe(given: list[str]) -> None:
    assert without_local_rank([*given, "train", "x", "--local_rank=2"]) == ["train", "x", "--local_rank=2"]
    assert parse([*given, "kto", *NEEDED, "--beta=0.3", "--max_seq_length", "9"]).max_length == 9


def test_command_line_forms(tmp_path: Path) -> None:
    recipe = write(tmp_path, "method: kto\nbeta: 0.1\nbf16: false\n")
    argv = [recipe, *NEEDED, "--beta", "0.5", "--bf16", "--use_cpu", "true", "--max_steps", "-1"]
    argv += ["--model_init_kwargs", '{"a": {"b": 1}}', "--run_name=a=b", "--report_to", "none"]
    options = parse(argv)
    assert (options.beta, options.bf16, options.use_cpu, options.max_steps) == (0.5, True, True, -1)
    assert options.model_init_kwargs == {"a": {"b": 1}} and options.run_name == "a=b"


def test_the_last_of_repeated_options_is_used(tmp_path: Path) -> None:
    """And the command line's method instead of the recipe's."""
    recipe = write(tmp_path, "method: cpo\nmax_seq_length: 300\n")
    options = parse([recipe, *NEEDED, "--beta", "0.1", "--method=kto", "--beta=0.3"])
    assert (options.method, options.beta, options.max_length) == ("kto", 0.3, 300)
    online = ["--method", "online_dpo", *NEEDED, "--reward_funcs", "a.py:a", "b.py:b", "--reward_funcs", "c.py:c"]
    assert parse(online).reward_funcs == "c.py:c"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ("--betta 0.1", "betta='0.1'.*did you mean 'beta'"),
        ("--evaluation_strategy steps", "eval_strategy='steps'"),
        ("--max_seq_length 8 --max_length 9", "max_seq_length='8' and max_length='9'"),
        ("--method ktoo", "method='ktoo'.*did you mean 'kto'"),
        ("--eval_on_start", "eval_on_start=True"),
        ("--config r.yaml", "config='r.yaml': write the recipe first"),  # as in TRL's scripts
        ("--beta -2", "beta='-2': "),  # it does not name the recipe, whose value is replaced
    ],
)
def test_bad_command_lines(tmp_path: Path, arguments: str, place: str) -> None:
    message = refused([write(tmp_path, "method: kto\nbeta: 0.1\n"), *NEEDED, *arguments.split()])
    assert re.match(place, message), message


@pytest.mark.parametrize("name", packaged_names("recipes"))
def test_packaged_recipes(name: str) -> None:
    scorer = ["--judge", "judges.py:Judge"] if name == "online_dpo" else []
    options = parse([f"{name}.yaml", "--output_dir", "out", "--dataset_name", "rows.jsonl", *scorer])
    assert options.window_size == 32 and options.load_in_4bit == ("qlora" in name)
    assert (options.dtype, options.bf16, options.fp16) == (None, None, None), "decided by the GPUs: fp16 on Turing"
    if options.use_peft or options.adapter_name_or_path:
        assert options.gradient_checkpointing and options.per_device_train_batch_size == 1
    else:
        assert str(options.model_name_or_path).startswith("Qwen/Qwen2.5-0.5B")
    lines = packaged("recipes", name).read_text(encoding="utf-8").splitlines()
    assert f"deepspeed launch/train.py {name} " in lines[2] and max(map(len, lines)) <= 119
    for value in ("per_device_train_batch_size", "max_length", "gradient_checkpointing", "deepspeed", "save_strategy"):
        assert any(line.strip().startswith(value) and "#" in line for line in lines), f"{value} says what it costs"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpo", {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
        ("ipo", {"loss_type": "ipo", "cpo_alpha": 0.0, "beta": 1.0}),
        ("simpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0}),
        ("cpo_simpo", {"loss_type": "simpo", "cpo_alpha": 0.05, "simpo_gamma": 1.0}),
        ("alphapo", {"loss_type": "alphapo", "cpo_alpha": 0.0, "alpha": 0.25}),
        ("reward", {"center_rewards_coefficient": 0.01, "num_train_epochs": 1}),
        ("online_dpo_qlora_8b", {"load_in_4bit": True, "reward_load_in_4bit": True}),
    ],
)
def test_values_of_recipes_in_the_guides(name: str, expected: dict[str, Any]) -> None:
    options = parse([name, "--output_dir", "out", "--dataset_name", "rows.jsonl"])
    assert {key: getattr(options, key) for key in expected} == expected


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for cls in METHODS.values():
        for name in option_names(cls) - judged_names(cls):
            assert f"--{name} " in text, name
    assert "--remove_unused_columns" not in text and "--vllm_group_port" not in text
    assert "(--method kto)" in text and "(--method cpo)" in text and "[1e-06]" in text


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        ("cpo\nloss_type: simpo\nsimpo_gamma: 1.0", "--gamma_beta_ratio 0.5 --beta 3", {"simpo_gamma": 1.5}),
        ("cpo\nloss_type: simpo\ngamma_beta_ratio: 0.2", "--simpo_gamma null --beta 3", {"simpo_gamma": 0.2 * 3.0}),
        ("kto\nwarmup_ratio: 0.1", "--warmup_steps 10", {"warmup_steps": 10, "warmup_ratio": 0.0}),
        ("kto\nbf16: true", "--fp16 0", {"bf16": True, "fp16": False}),
        ("kto\nbf16: true", "--dtype float32", {"bf16": None, "dtype": "float32"}),
        ("kto\ndataset_mixture: [a, b]", "--dataset_config c", {"dataset_mixture": None}),
        ("kto\noverwrite_output_dir: true", "--resume_from_checkpoint latest", {"overwrite_output_dir": False}),
        ("kto\noverwrite_output_dir: true", "--resume_from_checkpoint false", {"overwrite_output_dir": True}),
        ("kto\nuse_peft: true\nlora_r: 4", "--adapter_name_or_path a", {"use_peft": True, "lora_r": 16}),
        ("kto\nuse_peft: true\nlora_r: 4", "--use_peft no", {"use_peft": False}),
        ("online_dpo\nreward_model_path: a", "--judge b.py:c", {"judge": "b.py:c", "reward_model_path": None}),
    ],
)
def test_an_option_replaces_its_counterpart_in_a_recipe(
    recipe: str, given: str, expected: dict[str, object], tmp_path: Path
) -> None:
    options = parse([write(tmp_path, f"method: {recipe}\n"), *NEEDED, *given.split()])
    assert {name: getattr(options, name) for name in expected} == expected


def test_counterparts_from_the_same_source_are_refused(tmp_path: Path) -> None:
    recipe = write(tmp_path, "method: cpo\nloss_type: simpo\nsimpo_gamma: 1.0\ngamma_beta_ratio: 0.3\n")
    assert f"{recipe}: gamma_beta_ratio=0.3 and simpo_gamma=1.0: both" in refused([recipe, *NEEDED])
    both = ["--gamma_beta_ratio", "0.3", "--simpo_gamma", "0.5"]  # the default, but set
    assert "gamma_beta_ratio=0.3 and simpo_gamma=0.5: both" in refused(["simpo", *NEEDED, *both])
    twice = write(tmp_path, "method: cpo\ngamma: 1.0\nsimpo_gamma: 0.3\n")
    assert f"{twice}: gamma=1.0 and simpo_gamma=0.3 contradict" in refused([twice, *NEEDED])


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
ALWAYS = {"output_dir": "out", "model_name_or_path": "m", "dataset_name": "d", "use_cpu": True}
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
    made = METHODS[method](**ALWAYS, **options)
    assert {name: getattr(made, name) for name in options} == options
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({"method": method, **ALWAYS, **options}))
        assert values(parse([str(recipe)])) == values(made)
        recipe.write_text(made.to_json_string())
        assert values(parse([str(recipe)])) == values(made)
    line = [part for name, value in (ALWAYS | options).items() for part in (f"--{name}", *written(value))]
    assert values(parse(["--method", method, *line])) == values(made)
