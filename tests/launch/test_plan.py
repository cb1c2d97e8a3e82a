"""The command ``plan``: what it prints for each recipe, changes that make a run fit, and bad arguments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from peft import LoraConfig
from support.helpers import exit_status
from transformers import LlamaConfig, T5Config

from alignment.cli.plan import main
from alignment.planning import activations
from alignment.planning.plan import NotPlanned
from alignment.planning.planner import Planner

pytestmark = pytest.mark.usefixtures("own_process_group")
# `kto_after_sft` continues with an adapter that another recipe has trained.
RECIPES = sorted({path.stem for path in (ROOT / "launch" / "recipes").glob("*.yaml")} - {"kto_after_sft"})
LLAMA = str(ROOT / "tools" / "documentation" / "configurations" / "Llama-3.1-8B")
OFTEN, IN_CI = ("kto_qlora_8b",), ("online_dpo_qlora_8b", "cpo", "reward")
Command = Callable[..., tuple[Any, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations without weights or tokenizers, with 1.9e9 parameters in 4 layers."""
    folder = tmp_path_factory.mktemp("plan")
    for name, labels in (("model", 2), ("classifier", 1)):
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=4,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=4096,
            num_labels=labels,
        ).save_pretrained(folder / name)
    LlamaConfig.from_pretrained(LLAMA, architectures=None, num_labels=1).save_pretrained(folder / "classifier_8b")
    T5Config().save_pretrained(folder / "t5")
    LoraConfig(r=8, target_modules=["q_proj", "v_proj"]).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``plan(recipe, *options, model="model")``: exit status, stdout and stderr. Counts are kept for this file."""
    monkeypatch.setattr(activations, "_FOLDER", folder / "counted")

    def run(recipe: str, *more: object, model: str = "model") -> tuple[Any, str, str]:
        path = folder / model if "/" not in model else model
        arguments = [recipe, "--model_name_or_path", path, *more]
        if recipe.startswith("online"):
            arguments += ["--reward_model_path", folder / ("classifier_8b" if model == LLAMA else "classifier")]
        capfd.readouterr()
        status = exit_status(main, list(map(str, arguments)))
        out, err = capfd.readouterr()
        # The first import of DeepSpeed in a process may print what a linker says about an optional library.
        return status, out, "".join(line for line in err.splitlines(True) if " ld" not in line and "/ld: " not in line)

    return run


def planned(plan: Command, *arguments: object, **more: str) -> dict[str, Any]:
    status, out, err = plan(*arguments, "--json", **more)
    assert status == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize(
    "recipe",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.ci if name in IN_CI else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_each_recipe(plan: Command, recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No dataset has to be named, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = planned(plan, recipe, "--gpu_memory", "80")
    online, refers = recipe.startswith("online"), recipe.startswith(("kto", "dpo", "online", "apo", "ipo"))
    assert result["fits"] and result["tokens"] == 1024
    expected = {"load", "train", "step", "save", "evaluate"} | ({"rollout", "score"} if online else set())
    assert set(result["gpu"]) - {"reference"} == expected and set(result["host"]) == set(result["gpu"])
    assert refers or "reference" not in result["gpu"]
    assert result["gpu_peak"] == pytest.approx(max(sum(parts.values()) for parts in result["gpu"].values()), abs=99)
    assert ("adapters" in result["gpu"]["train"]) == ("lora" in recipe)
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_the_json_says(plan: Command) -> None:
    result = planned(plan, "kto_qlora_8b")
    status, out, err = plan("kto_qlora_8b")
    assert status == 0, err
    for title, key in (("GPU memory, GB", "gpu"), ("Host memory, GB", "host")):
        head, *rows = out.partition(title)[2].partition("\n\n")[0].splitlines()
        phases = head.split()
        assert phases == list(result[key])
        *parts, total = ((row[:24].strip(), row) for row in rows)
        for phase in phases:
            end = len(title) + head.index(phase) + len(phase)
            shown = sum(float(cell) for _, row in parts if (cell := _cell(row, end)))
            assert shown == pytest.approx(sum(result[key][phase].values()) / 1e9, abs=0.06), phase
            assert float(_cell(total[1], end)) == pytest.approx(sum(result[key][phase].values()) / 1e9, abs=0.006)
    need = result["gpu_peak_with_reserve"] / 1e9
    assert f"fits: {need:.1f} of 23.8 GB on each GPU, 5% in reserve (sequences of 1024 tokens" in out
    longest = f"{result['longest']} tokens" if result["longest"] else "none"
    assert f"longest sequences that fit: {longest}" in out
    assert out.endswith("Calculated; not confirmed on a GPU.\n")


def _cell(row: str, end: int) -> str:
    return row[max(0, end - 9) : end].strip()


@pytest.mark.parametrize(
    ("recipe", "more", "model"),
    [
        pytest.param("kto", (), "model", marks=pytest.mark.ci),
        pytest.param("online_dpo_qlora_8b", ("--max_length", "4096"), "model", marks=pytest.mark.ci),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("cpo_lora_8b", ("--per_device_train_batch_size", "8", "--max_length", "4096"), "model"),
                *((recipe, (), LLAMA) for recipe in RECIPES if recipe.endswith("_8b")),
            ]
        ),
    ],
)
def test_each_change_makes_the_run_fit(plan: Command, recipe: str, more: tuple[str, ...], model: str) -> None:
    """The options are passed as they are printed."""
    asked = (*more, "--gpu_memory", "8")
    _, out, _ = plan(recipe, *asked, model=model)
    assert "does not fit: " in out
    changes = re.findall(r"^  (--.+?)  \((?:same|another) result; .+\)$", out, re.MULTILINE)
    assert 1 <= len(changes) <= 3
    for change in changes:
        result = planned(plan, recipe, *asked, *shlex.split(change), model=model)
        assert result["fits"] and result["changes"] == [], change


def test_a_saved_adapter_needs_no_weights(plan: Command, folder: Path) -> None:
    """Its rank and its modules are in its configuration."""
    result = planned(plan, "kto_after_sft", "--adapter_name_or_path", folder / "adapter")
    assert result["gpu"]["load"]["adapters"] == 2 * 4 * 8 * (2 * 4096 + 4096 + 1024)
    status, out, err = plan("kto_after_sft", "--adapter_name_or_path", folder / "nothing")
    assert (status, out) == (1, "") and err.startswith("error: adapter_name_or_path: ") and err.count("\n") == 1


@pytest.mark.ci
def test_a_reward_model_as_the_options_load_it(plan: Command) -> None:
    def loaded(*more: str) -> dict[str, Any]:
        return planned(plan, "online_dpo_qlora_8b", *more)

    packed, plain, moved = loaded(), loaded("--reward_load_in_4bit", "false"), loaded("--reward_placement", "offload")
    embeddings = 128256 * 4096 * 2
    sizes = [each["gpu"]["train"]["reward model"] - embeddings for each in (packed, plain)]
    assert sizes[0] == pytest.approx(sizes[1] / 4, rel=0.05)
    assert "reward model" not in moved["gpu"]["train"] and "reward model" in moved["host"]["train"]


@pytest.mark.ci
def test_too_little_host_memory(plan: Command) -> None:
    result = planned(plan, "kto", "--deepspeed", "zero2_offload", "--host_memory", "16")
    assert not result["fits"] and result["host_peak"] > result["host_limit"] == 16e9
    assert planned(plan, "kto", "--deepspeed", "zero2_offload", "--host_memory", "128")["fits"]


SIZE, NUMBER = "expected gigabytes, from 1 to 10000, found", "expected a number from 1 to 10000000, found"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        *(((f"--{name}", value), f"argument --{name}: {SIZE} {value}") for name, value in
          (("gpu_memory", "-3"), ("gpu_memory", "0"), ("gpu_memory", "1e9"), ("gpu_memory", "nan"),
           ("gpu_memory", "inf"), ("host_memory", "-64"), ("host_memory", "0.5"), ("host_memory", "nan"),
           ("host_memory", "inf"))),
        (("--host_memory", "much"), "argument --host_memory: invalid gigabytes value: 'much'"),
        *(((f"--{name}", value), f"argument --{name}: {NUMBER} {value}") for name, value in
          (("gpus", "0"), ("gpus", "two"), ("gpus", "nan"), ("gpus", "10000001"), ("nodes", "-1"), ("nodes", "1.5"),
           ("tokens", "0"), ("tokens", "1e3"), ("tokens", "-7"))),
        (("--gpus",), "argument --gpus: expected one argument"),
        (("--attention", "fast"), "argument --attention: invalid choice: 'fast'"),
        (("--gpu_memroy", "8"), "gpu_memroy='8': unknown option"),
        (("--use_cpu",), "use_cpu=True: plan calculates the memory of GPUs; remove it"),
        (("--tokens", "5000"), "--tokens: 5000 is too large: the model supports at most 4096 positions"),
        (("--max_length", "5000"), "max_length: 5000 is too large: the model supports at most 4096 positions"),
    ],
)  # fmt: skip
def test_bad_arguments(plan: Command, more: tuple[str, ...], expected: str) -> None:
    status, out, err = plan("kto", *more)
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/nowhere/model", "model_name_or_path: folder '/nowhere/model' does not exist"),
        ("nobody/nothing", "model_name_or_path: the configuration of 'nobody/nothing' could not be loaded"),
        ("t5", "model_name_or_path: "),
    ],
)
def test_models_that_cannot_be_planned(plan: Command, model: str, expected: str) -> None:
    status, out, err = plan("kto", model=model)
    assert (status, out) == (1, "") and err.startswith(f"error: {expected}") and err.count("\n") == 1


def test_an_architecture_that_cannot_be_counted(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotPlanned("the model cannot be computed on tensors without values: data-dependent shape")

    monkeypatch.setattr(Planner, "activations", fail)
    status, out, err = plan("kto")
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("error: model_name_or_path: the model cannot be computed on tensors without values")
    assert err.endswith("; its memory cannot be planned\n")


def test_a_launcher_is_not_needed(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.cli.plan.world_size", lambda: 2)
    status, _, err = plan("kto")
    assert status == 1 and "must run in a single process; start it without a launcher, and pass --gpus" in err
