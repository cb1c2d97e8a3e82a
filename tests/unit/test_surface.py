"""What TRL scripts use besides options: members of trainers that need no engine, TRL's names, functions for pairs."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from support.data_tokenizers import word_tokenizer
from support.helpers import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import alignment
from alignment.checkpoint.saving import written_folder
from alignment.compat.trl.overrides import check_attributes, check_overrides, check_saving
from alignment.compat.trl.scripts import NAMES, RELEASES
from alignment.compat.trl.surface import Accelerator, TrainerSurface
from alignment.config.errors import DataError, OptionError
from alignment.methods.cpo import CPOMethod
from alignment.methods.reward import RewardMethod
from alignment.methods.sft import SFTMethod
from alignment.online.arguments import is_of
from alignment.training.arguments import check_collator, reference_of, with_arguments

PAIRS: dict[str, list[Any]] = {
    "prompt_ids": [[1, 2], [3]],
    "chosen_ids": [[4], [5, 6]],
    "rejected_ids": [[7, 8], [9]],
    "margin": [0.0, 0.5],
    "row": [0, 1],
}


def test_pairs_as_they_are_shown() -> None:
    """Rewards are of complete sequences; other methods show the columns as they are stored."""
    stored = {name: values for name, values in PAIRS.items() if name != "margin"}
    shown = CPOMethod(alignment.CPOConfig("out")).shown(stored)
    assert shown == {name: PAIRS[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
    assert RewardMethod(alignment.RewardConfig("out")).shown(PAIRS) == {
        "chosen_ids": [[1, 2, 4], [3, 5, 6]],
        "rejected_ids": [[1, 2, 7, 8], [3, 9]],
        "margin": [0.0, 0.5],
    }


def test_prompt_and_completion_as_one_sequence() -> None:
    rows = {"prompt_ids": [[1, 2], []], "completion_ids": [[3], [4, 5]], "row": [0, 1]}
    expected = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, -100, 3], [4, 5]]}
    assert SFTMethod(alignment.SFTConfig("out")).shown(rows) == expected


@pytest.mark.parametrize(
    "name",
    ["compute_loss", "create_optimizer", "get_train_dataloader", "kto_loss", "tokenize_row", "concatenated_forward"],
)
def test_overriding_a_method_that_is_never_called_is_refused(name: str) -> None:
    owner = type("Own", (alignment.KTOTrainer,), {name: lambda self: None})
    for trainer in (
        owner,
        type("Derived", (owner,), {}),
        type("Mixed", (type("Mixin", (), {name: len}), alignment.KTOTrainer), {}),
    ):
        with pytest.raises(OptionError, match=rf"\.{name}: never called, so it would be ignored; \w"):
            check_overrides(trainer)


def test_overriding_methods_that_are_called_is_allowed() -> None:
    own = {name: lambda self: None for name in ("log", "evaluate", "save_model", "train", "losses_of_mine")}
    check_overrides(type("Own", (alignment.SFTTrainer,), own))
    check_overrides(alignment.RewardTrainer)
    with pytest.raises(OptionError, match=r"Own.compute_loss: .*override losses\(\), see docs/guides/extending.md"):
        type("Own", (alignment.KTOTrainer,), {"compute_loss": lambda self: None})()


@pytest.mark.parametrize("loss", [lambda *_: 0, functools.partial(max, 0)])
def test_a_method_assigned_to_a_trainer_is_refused(loss: Any) -> None:
    trainer = object.__new__(alignment.CPOTrainer)
    check_attributes(trainer)
    vars(trainer)["compute_loss"] = loss
    with pytest.raises(OptionError, match=r"trainer\.compute_loss: .* override losses\(\)"):
        trainer.train()


def test_overriding_save_model_is_refused_if_checkpoints_are_saved() -> None:
    owner = type("Own", (alignment.KTOTrainer,), {"save_model": lambda self, folder: None})
    for trainer in (owner, type("Derived", (owner,), {})):
        check_saving(trainer, saves=False)
        with pytest.raises(OptionError, match=r"^Own.save_model: checkpoints do not call it.*on_save"):
            check_saving(trainer, saves=True)
    check_saving(alignment.KTOTrainer, saves=True)
    with pytest.raises(OptionError, match=r"^Own.save_model"):
        owner("model", args=alignment.KTOConfig("out", save_strategy="best", eval_strategy="epoch"))


def test_arguments_by_position() -> None:
    for trainer in (alignment.CPOTrainer, alignment.SFTTrainer, alignment.RewardTrainer):
        with pytest.raises(TypeError, match=rf"^{trainer.__name__}: arguments after model are passed by keyword"):
            trainer("m", None)
    for other in (alignment.KTOTrainer, alignment.DPOTrainer, alignment.OnlineDPOTrainer):
        with pytest.raises(TypeError, match="arguments after model and ref_model are passed by keyword.*args="):
            other("m", None, other.config_class("out"))
        with pytest.raises(TypeError, match="passed by keyword"):
            other("m", "r", "s")
    assert reference_of("T", ("r",), None, True) == "r" and reference_of("T", (), "r", False) == "r"


def test_options_set_after_the_trainer_was_created() -> None:
    given = alignment.KTOConfig("out", logging_steps=4)
    args = given.sealed()
    args.logging_steps, args.learning_rate, args.do_eval, args.run_name = "3", 1e-5, True, None  # type: ignore[assignment]
    assert (args.logging_steps, args.learning_rate, given.logging_steps, given.learning_rate) == (3, 1e-5, 4, 1e-6)
    for name, value, said in (
        ("max_length", 8, "^max_length=8: too late to take effect after the trainer was created"),
        ("max_seq_length", 8, "^max_length=8: too late"),
        ("learning_rate", "fast", "^learning_rate='fast'.*a number"),
        ("logging_steps", 0, "^logging_steps=0: must be greater than 0"),
    ):
        with pytest.raises(OptionError, match=said):
            setattr(args, name, value)
    args.engines_built()
    with pytest.raises(OptionError, match="^learning_rate=2e-05: too late .* after the trainer built its engines"):
        args.learning_rate = 2e-5
    args.metric_for_best_model = "accuracy"
    assert args.greater_is_better is True
    args.load_best_model_at_end = True
    with pytest.raises(OptionError, match="^load_best_model_at_end=True: requires evaluations"):
        args.check_late()


def test_collators_that_only_pad_are_accepted() -> None:
    padding = transformers.DataCollatorWithPadding.__new__(transformers.DataCollatorWithPadding)
    check_collator(None)
    check_collator(padding)
    masking = transformers.DataCollatorForLanguageModeling.__new__(transformers.DataCollatorForLanguageModeling)
    for collator in (masking, lambda rows: rows, type("DataCollatorWithPadding", (), {})()):
        with pytest.raises(OptionError, match="data_collator: .* would not be called"):
            check_collator(collator)


def test_metrics_are_printed_and_saved_as_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    surface = TrainerSurface()
    surface.args = SimpleNamespace(output_dir=str(tmp_path))  # type: ignore[assignment]
    surface.log_metrics("train", {"train_runtime": 61.257, "train_loss": 0.123456, "epoch": 2})
    assert "train_runtime = 0:01:01.25\n" in capsys.readouterr().out
    surface.save_metrics("train", {"train_loss": 0.5})
    surface.save_metrics("eval", {"eval_loss": 0.25})
    read = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert read["all_results.json"] == {"eval_loss": 0.25, "train_loss": 0.5}
    assert read["eval_results.json"] == {"eval_loss": 0.25}


def test_properties_of_the_arguments_that_scripts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    options = alignment.CPOConfig("out", warmup_ratio=0.1, use_cpu=True)
    theirs = transformers.TrainingArguments("out", warmup_steps=0.1, use_cpu=True, report_to="none")
    assert [options.get_warmup_steps(n) for n in (11, 15)] == [theirs.get_warmup_steps(n) for n in (11, 15)] == [2, 2]
    assert alignment.CPOConfig("out", warmup_steps=3).get_warmup_steps(11) == 3
    assert options.get_process_log_level() == theirs.get_process_log_level()
    assert options.device.type == theirs.device.type == "cpu" and options.should_save and options.should_log
    with options.main_process_first(desc="map"), options.main_process_first(local=False):
        pass
    barriers: list[int] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append(0))
    with pytest.raises(OSError, match="full"), options.main_process_first():
        raise OSError("full")
    assert barriers, "the other ranks do not wait for one that failed"
    monkeypatch.setenv("RANK", "1")
    assert options.get_process_log_level() == logging.WARNING and not options.should_save and not options.should_log


@pytest.mark.parametrize(
    ("place", "main", "local"), [((0, 0), True, True), ((2, 0), False, True), ((3, 1), False, False)]
)
def test_the_ranks_of_accelerate(
    place: tuple[int, int], main: bool, local: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in {"RANK": place[0], "LOCAL_RANK": place[1], "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    found = Accelerator()
    assert (found.is_main_process, found.is_local_main_process) == (main, local)
    assert (found.state.process_index, found.state.local_process_index, found.state.num_processes) == (*place, 4)
    found.print("a", 1, sep="-")
    assert capsys.readouterr().out == ("a-1\n" if local else "")
    layer = torch.nn.Linear(1, 1)
    assert found.unwrap_model(layer) is layer
    layer.module = torch.nn.ReLU()
    assert found.unwrap_model(layer) is layer.module


WORDS = "a b c"
with_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


def fresh_model() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config("tied"))


@pytest.mark.parametrize("found", [None, "0.23.1", "2.0.0"])
def test_without_a_supported_release_the_error_names_both(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("alignment.compat.trl.scripts.version", version)
    there = f"trl {found} is installed" if found else "it is not installed"
    for name in NAMES:
        with pytest.raises(ImportError, match=rf"^alignment.{name}: requires trl>=0.24,<2, and {there}; run pip"):
            getattr(alignment, name)
    with pytest.raises(AttributeError):
        alignment.ORPOTrainer  # noqa: B018


def test_the_extra_installs_a_supported_release() -> None:
    text = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    assert f'"trl": ["trl{RELEASES}"' in text


@with_trl
def test_names_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    assert alignment.ModelConfig is trl.ModelConfig and alignment.TrlParser is trl.TrlParser
    monkeypatch.setattr("alignment.compat.trl.scripts._PLACES", ())
    with pytest.raises(ImportError, match=r"^alignment.get_peft_config: trl .* has no such name"):
        alignment.get_peft_config  # noqa: B018


def test_the_common_prompt_of_pairs() -> None:
    user, good, bad = ([{"role": role, "content": role}] for role in ("user", "assistant", "tool"))
    pair = {"prompt": user, "chosen": good, "rejected": bad}
    assert alignment.extract_prompt({"chosen": user + good, "rejected": user + bad}) == pair
    texts = {"prompt": "It is", "chosen": " blue", "rejected": " red"}
    assert alignment.extract_prompt({"chosen": "It is blue", "rejected": "It is red"}) == texts
    with pytest.raises(DataError, match="identical"):
        alignment.extract_prompt({"chosen": "a", "rejected": "a"})


def test_pairs_become_labeled_rows() -> None:
    pairs = Dataset.from_dict({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"], "id": [3]})
    rows = alignment.unpair_preference_dataset(pairs)
    found = [tuple(row[key] for key in ("prompt", "completion", "label", "id")) for row in rows]
    assert found == [("p", "a", True, 3), ("p", "b", False, 3)]


def test_quantization_of_a_model_given_by_name(tmp_path: Path) -> None:
    weights = BitsAndBytesConfig(load_in_4bit=True)
    options = alignment.KTOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs={"revision": "main"})
    changed = with_arguments(options, "model", weights)
    assert changed.model_init_kwargs == {"revision": "main", "quantization_config": weights}
    assert options.model_init_kwargs == {"revision": "main"} and with_arguments(options, "model", None) is options
    with pytest.raises(OptionError, match="also set in model_init_kwargs"):
        with_arguments(changed, "model", weights)
    with pytest.raises(OptionError, match="cannot be applied to a live model"):
        with_arguments(options, fresh_model(), weights)


def test_a_reward_model_loaded_from_its_option_is_recognized(tmp_path: Path) -> None:
    fresh_model().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_of(loaded, str(tmp_path)) and is_of(str(tmp_path), str(tmp_path))
    assert not is_of(loaded, "another") and not is_of(len, str(tmp_path)) and not is_of(None, None)


def test_a_tokenizer_loaded_with_the_models_keywords_can_be_saved(tmp_path: Path) -> None:
    word_tokenizer(WORDS).save_pretrained(tmp_path / "given")
    keywords = {"dtype": torch.float32, "quantization_config": None}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "given", padding_side="left", **keywords)
    with written_folder(tmp_path / "written", tokenizer):
        pass
    assert AutoTokenizer.from_pretrained(tmp_path / "written").padding_side == "left"
