"""Bad input: one line that names key and value, exit status 1, before weights are loaded, and nothing is written."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_case import CHAT, Case
from bad_commands import CASES, command, in_folder, write_models
from conftest import ROOT
from data_tokenizers import PLAIN, char_tokenizer
from datasets import IterableDataset
from helpers import POSITIONS, make_model, tiny_config, unpaired_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment import CPOConfig, KTOConfig, KTOTrainer
from alignment.cli.train import main
from alignment.config.errors import AlignmentError, OptionError
from alignment.training.arguments import model_sources

pytestmark = pytest.mark.usefixtures("own_process_group")


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_bad_command_prints_one_line_and_changes_nothing(
    case: Case,
    models: Path,
    loads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = command(case, tmp_path, models)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    line = the_error(capfd.readouterr().err)
    assert leaving.value.code == 1
    for said in case.says:
        assert in_folder(said, tmp_path) in line
    assert loads == []
    assert tree(tmp_path) == before


def test_the_recorder_detects_loading(models: Path, loads: list[Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(command(Case("good", ()), tmp_path, models))
    assert leaving.value.code == 1
    assert loads == [(str(models / "good"),)]


def test_weights_that_lack_a_tensor_are_not_completed_at_random(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(command(Case("more layers", (), model="more-layers"), tmp_path, models))
    assert leaving.value.code == 1
    assert "the checkpoint has no weights for model.layers.2.input_layernorm.weight and 8 more" in the_error(
        capfd.readouterr().err
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["status.json"]


def test_good_commands_run_in_one_process_even_after_a_bad_one(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = []
    for name, method, options in (
        ("first", "kto", {}),
        ("bad", "kto", {"beta": "0"}),
        ("second", "kto", {}),
        ("late", "kto", {"max_length": str(POSITIONS + 1)}),
        ("third", "cpo", {}),
    ):
        case = Case(name, (), {"output_dir": f"@{name}", **options}, method=method)
        with pytest.raises(SystemExit) as leaving:
            main(command(case, tmp_path, models))
        outcomes.append((name, leaving.value.code, (tmp_path / name / "model.safetensors").is_file()))
    assert outcomes == [
        ("first", 0, True),
        ("bad", 1, False),
        ("second", 0, True),
        ("late", 1, False),
        ("third", 0, True),
    ], capfd.readouterr().err


@pytest.mark.parametrize("name", ["unknown option", pytest.param("torn file", marks=pytest.mark.ci)])
def test_the_real_command_prints_the_same(
    name: str,
    models: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    launch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    argv = command(next(case for case in CASES if case.name == name), tmp_path, models)
    before = tree(tmp_path)
    done = launch(ROOT / "launch" / "train.py", *argv, launcher="python", cwd=tmp_path)
    assert done.returncode == 1
    with pytest.raises(SystemExit):
        main(argv)
    assert the_error(done.stderr) == the_error(capfd.readouterr().err)
    assert tree(tmp_path) == before


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"callbacks": [print]}, "callbacks: builtin_function_or_method is not a transformers TrainerCallback"),
        ({"peft_config": {"r": 8}}, "peft_config: dict is not a PEFT configuration"),
        ({"compute_metrics": len}, "compute_metrics: not supported"),
        ({"preprocess_logits_for_metrics": len}, "preprocess_logits_for_metrics: not supported"),
        ({"data_collator": len}, "data_collator: "),
        ({"model_init": len}, "model_init: not supported"),
        ({"args": CPOConfig("out")}, "args: KTOTrainer expects a KTOConfig, not a CPOConfig"),
        ({"model": None}, "model: KTOTrainer has no model"),
        ({"model": 7}, "model_name_or_path: int is neither a path nor a transformers model"),
        ({"processing_class": "gpt2"}, "processing_class: str is not a transformers tokenizer"),
        ({"optimizers": (object(), None)}, "optimizers: requires a live model"),
        ({"train_dataset": []}, "dataset is an empty list"),
        ({"train_dataset": {"train": unpaired_rows(4)}}, "dataset is a dictionary of splits (train)"),
        (
            {"train_dataset": IterableDataset.from_generator(lambda: iter(unpaired_rows(4)))},
            "may be endless; set max_steps",
        ),
        ({"train_dataset": [{**CHAT, "label": "yes"}]}, "train_dataset, row 1: label is 'yes' (a string)"),
    ],
)
def test_arguments_of_the_constructor(
    arguments: dict[str, Any], says: str, kto: Callable[..., KTOTrainer], loads: list[Any], tmp_path: Path
) -> None:
    assert says in refusal(lambda: kto(**{"train_dataset": unpaired_rows(4), **arguments}))
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


def test_misspelled_arguments_are_python_errors(kto: Callable[..., KTOTrainer]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'train_datasets'"):
        kto(train_datasets=unpaired_rows(4))


def test_calls_with_missing_requirements(kto: Callable[..., KTOTrainer], loads: list[Any], tmp_path: Path) -> None:
    assert refusal(kto).startswith("`train_dataset` is required; for evaluation only, pass eval_dataset")
    judged, full = kto(eval_dataset=unpaired_rows(4)), kto(train_dataset=unpaired_rows(4))
    assert refusal(judged.train).startswith("train_dataset: required for training")
    assert refusal(full.evaluate).startswith("eval_dataset: required for evaluation")
    said = refusal(functools.partial(full.train, resume_from_checkpoint="checkpoint-4"))
    assert said.startswith("resume_from_checkpoint='checkpoint-4': no such folder")
    assert "label is 3 (an integer)" in refusal(
        lambda: full.evaluate([{"prompt": "ab", "completion": "cd", "label": 3}])
    )
    assert refusal(lambda: full.evaluate(unpaired_rows(2), ignore_keys=["logits"])).startswith("ignore_keys=")
    assert refusal(full.push_to_hub).startswith("push_to_hub: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set")
    assert refusal(lambda: full.add_callback(3)).startswith("callbacks: int is not a transformers TrainerCallback")
    assert loads == []
    assert not any(tmp_path.iterdir())
