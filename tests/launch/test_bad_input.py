"""Bad input: one line that names key and value, exit status 1, before weights are loaded, and nothing is written."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import IterableDataset
from support.bad_case import CHAT, Case
from support.bad_commands import COMMANDS, command, in_folder, write_models
from support.bad_environment import ENVIRONMENT, FOLDERS, MANIFESTS
from support.bad_json import JSON
from support.bad_models import MODELS, TOKENIZERS
from support.bad_recipes import COMMAND_LINES, YAML
from support.bad_rows import ROWS
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import POSITIONS, exit_status, make_model, tiny_config, unpaired_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment import CPOConfig, KTOConfig, KTOTrainer
from alignment.cli.train import main
from alignment.config.errors import AlignmentError, OptionError
from alignment.training.arguments import model_sources
from tools.ranks.client import LAUNCHER_VARIABLES

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")
CASES: list[Case] = [*COMMANDS, *ENVIRONMENT, *FOLDERS, *MANIFESTS, *JSON, *MODELS, *TOKENIZERS]
CASES += [*COMMAND_LINES, *YAML, *ROWS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of the cases."""
    return write_models(tmp_path_factory.mktemp("models"))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything in a folder, with the contents of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def the_error(stderr: str) -> str:
    """Return the last line after checking that it is the only error."""
    lines = stderr.splitlines()
    assert "Traceback" not in stderr
    assert lines[-1].startswith("error: ")
    assert [line for line in lines if line.startswith("error:")] == lines[-1:]
    return lines[-1]


def left(
    capfd: pytest.CaptureFixture[str], argv: list[str], command: Callable[..., None] = main
) -> tuple[object, str, str]:
    """Run a command; return its exit status and what it printed."""
    return exit_status(command, argv), *capfd.readouterr()


def named(case: Case) -> str:
    return re.sub(r"[^\w:.]+", "-", case.name)[:70]


def set_environment(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the case's variables. If it has any, remove all other launcher variables."""
    if not case.environment:
        return
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # the group of an earlier case
    for name in [*os.environ]:
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "ALIGNMENT_")):
            monkeypatch.delenv(name)
    for name, value in case.environment.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_bad_command_prints_one_line_and_changes_nothing(
    case: Case,
    models: Path,
    loads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each takes less than 0.1 s."""
    argv = command(case, tmp_path, models)
    if case.make is not None:
        case.make(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    set_environment(case, monkeypatch)
    before, start = tree(tmp_path), time.monotonic()
    code, _, err = left(capfd, argv, importlib.import_module(case.command).main)
    line = the_error(err)
    assert code == 1 and time.monotonic() - start < 20
    for said in case.says:
        assert in_folder(said, tmp_path) in line
    assert len(line) < 1000 and "(this is a bug" not in line
    assert loads == []
    assert tree(tmp_path) == before


def test_a_cache_that_cannot_be_written(
    models: Path, loads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", Path("/proc/self/cache")):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        code, _, err = left(capfd, command(Case("cache", ()), tmp_path, models))
        line = the_error(err)
        assert code == 1 and f"{cache}: the datasets cache cannot be written" in line
        assert "HF_DATASETS_CACHE" in line and loads == []


def test_rows_that_the_terminal_cannot_show(
    models: Path, loads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that its encoding does not support are escaped."""
    (tmp_path / "r…ws.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    options = {"dry_run": "true", "dataset_name": "@r…ws.jsonl"}
    status = exit_status(main, command(Case("odd letters", (), options), tmp_path, models))
    shown = out.buffer.getvalue().decode("latin-1")  # type: ignore[attr-defined]
    assert status == 0 and "r\\u2026ws.jsonl: 1 of 1 rows kept" in shown


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("more-layers", "the checkpoint has no weights for model.layers.2.input_layernorm.weight and 8 more"),
        (
            "wider",
            "model.layers.0.mlp.down_proj.weight and 5 more: the checkpoint has the shape [32, 48], but config.json "
            "describes [32, 96]; use the config.json that was saved with these weights",
        ),
    ],
)
def test_weights_that_do_not_fit_are_not_completed_at_random(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, said: str
) -> None:
    code, _, err = left(capfd, command(Case(model, (), model=model), tmp_path, models))
    assert code == 1 and said in the_error(err)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["status.json"]


# The Python API raises the same errors ------------------------------------------------------------------------------


@pytest.fixture
def kto(models: Path, tmp_path: Path, loads: list[Any]) -> Callable[..., KTOTrainer]:
    """Return a KTO trainer of the good model with the test's arguments."""

    def make(**arguments: Any) -> KTOTrainer:
        options = KTOConfig(str(tmp_path / "out"), max_length=POSITIONS, max_prompt_length=None)
        return KTOTrainer(**{"model": str(models / "good"), "args": options, **arguments})

    return make


def refusal(call: Callable[[], Any]) -> str:
    """Return the error message of a call; one line."""
    with pytest.raises(AlignmentError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def live_model() -> PreTrainedModel:
    """Return a small model in memory with its tokenizer's vocabulary."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("tied"), dtype=torch.float32)


UNSUPPORTED = ("compute_metrics", "preprocess_logits_for_metrics", "data_collator", "model_init")
ENDLESS = IterableDataset.from_generator(lambda: iter(unpaired_rows(4)))


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"callbacks": [print]}, "callbacks: builtin_function_or_method"),
        ({"peft_config": {"r": 8}}, "peft_config: dict"),
        *(({name: len}, f"{name}: ") for name in UNSUPPORTED),
        ({"args": CPOConfig("out")}, "args: KTOTrainer expects a KTOConfig"),
        ({"model": None}, "model: "),
        ({"model": 7}, "model_name_or_path: int"),
        ({"processing_class": "gpt2"}, "processing_class: str"),
        ({"optimizers": (object(), None)}, "optimizers: requires a live model"),
        ({"train_dataset": {"train": unpaired_rows(4)}}, "dataset is a dictionary of splits"),
        ({"train_dataset": ENDLESS}, "train_dataset: .*max_steps"),
        ({"train_dataset": [{**CHAT, "label": "yes"}]}, "train_dataset, row 1: label is 'yes'"),
    ],
)
def test_arguments_of_the_constructor(
    arguments: dict[str, Any], place: str, kto: Callable[..., KTOTrainer], loads: list[Any], tmp_path: Path
) -> None:
    assert re.match(place, refusal(lambda: kto(**{"train_dataset": unpaired_rows(4), **arguments})))
    assert loads == []
    assert not any(tmp_path.iterdir())


def test_the_reference_cannot_be_the_policy_itself(kto: Callable[..., KTOTrainer]) -> None:
    model, tokenizer = live_model(), char_tokenizer(template=PLAIN)
    said = refusal(
        lambda: kto(model=model, ref_model=model, processing_class=tokenizer, train_dataset=unpaired_rows(4))
    )
    assert said.startswith("ref_model: is the same object as model")


def test_arguments_of_the_reference_default_to_those_of_the_policy(tmp_path: Path) -> None:
    folder, other, third = make_model(tmp_path / "model"), {"initializer_range": 0.5}, {"initializer_range": 0.25}
    both: dict[str, Any] = {"model_init_kwargs": other, "ref_model_init_kwargs": other}
    for given, reference, expected in (
        ({"model_init_kwargs": other}, folder, 0.5),
        ({"model_init_kwargs": other, "ref_model_init_kwargs": third}, folder, 0.25),
        (both, None, 0.5),  # as scripts written for TRL pass them
    ):
        policy, loaded = model_sources(folder, reference, KTOConfig("out", max_length=POSITIONS, **given), True)
        assert (policy.config.initializer_range, loaded.config.initializer_range) == (0.5, expected)
    with pytest.raises(OptionError, match="^ref_model_init_kwargs=.*: has no effect .* set ref_model_name_or_path$"):
        model_sources(folder, None, KTOConfig("out", ref_model_init_kwargs=other), True)
    with pytest.raises(OptionError, match="^ref_model: cpo has no reference model; remove it"):
        model_sources(folder, folder, CPOConfig("out"), False)


def test_calls_with_missing_requirements(kto: Callable[..., KTOTrainer], loads: list[Any], tmp_path: Path) -> None:
    judged, full = kto(eval_dataset=unpaired_rows(4)), kto(train_dataset=unpaired_rows(4))
    wrong = [{"prompt": "ab", "completion": "cd", "label": 3}]
    calls: dict[str, Callable[[], Any]] = {
        "`train_dataset` is required": kto,
        "train_dataset: ": judged.train,
        "eval_dataset: ": full.evaluate,
        "resume_from_checkpoint='checkpoint-4': ": lambda: full.train(resume_from_checkpoint="checkpoint-4"),
        ".*label is 3": lambda: full.evaluate(wrong),
        "ignore_keys=": lambda: full.evaluate(unpaired_rows(2), ignore_keys=["logits"]),
        "push_to_hub: ": full.push_to_hub,
        "callbacks: int": lambda: full.add_callback(3),  # type: ignore[arg-type]
    }
    for place, call in calls.items():
        assert re.match(place, refusal(call)), place
    assert loads == []
    assert not any(tmp_path.iterdir())
