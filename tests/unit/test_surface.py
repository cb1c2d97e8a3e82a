"""Members of trainers that need no engine: rows, collation, positional arguments, overridden methods."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

import alignment
from alignment import (
    CPOConfig,
    CPOTrainer,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    OnlineDPOConfig,
    RewardTrainer,
    SFTTrainer,
)
from alignment.config.errors import OptionError
from alignment.data.shown.rows import (
    Collator,
    as_labeled_pairs,
    as_language_modeling,
    as_scored_pairs,
    as_stored,
)
from alignment.training.arguments import check_collator
from alignment.training.surface.accelerator import Accelerator
from alignment.training.surface.overrides import NEVER_CALLED, check_overrides, check_saving
from alignment.training.surface.positional import Order, arguments, online_arguments
from alignment.training.surface.trainer_surface import TrainerSurface
from alignment.training.trainer import AlignmentTrainer

PAIRS: dict[str, list[Any]] = {
    "prompt_ids": [[1, 2], [3]],
    "chosen_ids": [[4], [5, 6]],
    "rejected_ids": [[7, 8], [9]],
    "margin": [0.0, 0.5],
    "row": [0, 1],
}


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_pairs_of_each_method_have_trls_column_names() -> None:
    pairs = {name: values for name, values in PAIRS.items() if name != "margin"}
    assert as_stored(pairs) == {name: PAIRS[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
    assert as_scored_pairs(PAIRS) == {
        "chosen_ids": [[1, 2, 4], [3, 5, 6]],
        "rejected_ids": [[1, 2, 7, 8], [3, 9]],
        "margin": [0.0, 0.5],
    }
    shown = as_labeled_pairs(PAIRS)
    assert shown["prompt_input_ids"] == PAIRS["prompt_ids"] and shown["prompt_attention_mask"] == [[1, 1], [1]]
    assert shown["rejected_input_ids"] == [[1, 2, 7, 8], [3, 9]] and shown["chosen_labels"][0] == [-100, -100, 4]


def test_prompt_and_completion_as_one_sequence() -> None:
    shown = as_language_modeling({"prompt_ids": [[1, 2], []], "completion_ids": [[3], [4, 5]], "row": [0, 1]})
    assert shown == {
        "input_ids": [[1, 2, 3], [4, 5]],
        "completion_mask": [[0, 0, 1], [1, 1]],
        "labels": [[-100, -100, 3], [4, 5]],
    }
    assert lists(Collator(0)(rows_of(shown))) == {
        "input_ids": [[1, 2, 3], [4, 5, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "completion_mask": [[0, 0, 1], [1, 1, 0]],
        "labels": [[-100, -100, 3], [4, 5, -100]],
    }


def test_a_batch_of_labeled_completions_with_mismatched_ones() -> None:
    rows = [
        {"prompt_ids": [1, 2], "completion_ids": [3], "label": True, "KL_completion_ids": [6, 7]},
        {"prompt_ids": [5], "completion_ids": [6, 7], "label": False, "KL_completion_ids": [3]},
    ]
    assert lists(Collator(9)(rows)) == {
        "input_ids": [[1, 2, 3], [5, 6, 7]],
        "attention_mask": [[1, 1, 1], [1, 1, 1]],
        "completion_mask": [[0, 0, 1], [0, 1, 1]],
        "KL_input_ids": [[1, 2, 6, 7], [5, 3, 9, 9]],
        "KL_attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "KL_completion_mask": [[0, 0, 1, 1], [0, 1, 0, 0]],
        "label": [True, False],
    }


def test_batches_of_pairs_have_chosen_completions_first() -> None:
    stored = as_stored({name: values for name, values in PAIRS.items() if name != "margin"})
    assert lists(Collator(0)(rows_of(stored)))["input_ids"] == [[1, 2, 4, 0], [3, 5, 6, 0], [1, 2, 7, 8], [3, 9, 0, 0]]
    scored = lists(Collator(0)(rows_of(as_scored_pairs(PAIRS))))
    assert scored["margin"] == [0.0, 0.5] and scored["input_ids"] == lists(Collator(0)(rows_of(stored)))["input_ids"]
    labeled = lists(Collator(0)(rows_of(as_labeled_pairs(PAIRS))))
    assert labeled["chosen_labels"] == [[-100, -100, 4], [-100, 5, 6]]
    assert labeled["rejected_attention_mask"] == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_prompts_are_padded_on_the_left() -> None:
    batch = lists(Collator(0)([{"prompt_ids": [1], "topic": "x"}, {"prompt_ids": [2, 3], "topic": "y"}]))
    assert batch["prompt_input_ids"] == [[0, 1], [2, 3]] and batch["prompt_attention_mask"] == [[0, 1], [1, 1]]
    assert batch["topic"] == ["x", "y"]


@pytest.mark.parametrize("name", sorted(NEVER_CALLED))
def test_overriding_a_method_that_is_never_called_is_refused(name: str) -> None:
    owner = type("Own", (KTOTrainer,), {name: lambda self: None})
    for trainer in (
        owner,
        type("Derived", (owner,), {}),
        type("Mixed", (type("Mixin", (), {name: len}), KTOTrainer), {}),
    ):
        with pytest.raises(OptionError, match=rf"\.{name}: never called, so it would be ignored; \w"):
            check_overrides(trainer, AlignmentTrainer)


def test_overriding_methods_that_are_called_is_allowed() -> None:
    own = {name: lambda self: None for name in ("log", "evaluate", "save_model", "train", "losses_of_mine")}
    check_overrides(type("Own", (SFTTrainer,), own), AlignmentTrainer)
    check_overrides(RewardTrainer, AlignmentTrainer)
    with pytest.raises(OptionError, match=r"Own.compute_loss: .*override losses\(\), see docs/guides/extending.md"):
        type("Own", (KTOTrainer,), {"compute_loss": lambda self: None})()


def test_overriding_save_model_is_refused_if_checkpoints_are_saved() -> None:
    owner = type("Own", (KTOTrainer,), {"save_model": lambda self, folder: None})
    for trainer in (owner, type("Derived", (owner,), {})):
        check_saving(trainer, AlignmentTrainer, saves=False)
        with pytest.raises(OptionError, match=r"^Own.save_model: checkpoints do not call it.*on_save"):
            check_saving(trainer, AlignmentTrainer, saves=True)
    check_saving(KTOTrainer, AlignmentTrainer, saves=True)
    with pytest.raises(OptionError, match=r"^Own.save_model"):
        owner("model", args=KTOConfig("out", save_strategy="best", eval_strategy="epoch"))


def test_every_method_of_transformers_trainer_works_or_cannot_be_overridden() -> None:
    public = {
        name
        for name, value in vars(transformers.Trainer).items()
        if callable(value) and not name.startswith("_") and name not in NEVER_CALLED
    }
    missing = {name for name in public if not hasattr(AlignmentTrainer, name)}
    assert not missing, "transformers' Trainer has methods that the table does not list"


OPTIONS, DATA, ROWS = CPOConfig("out"), Dataset.from_list([{"prompt": "a"}]), [{"a": 1}]
TOKENIZER, PADS, ALL = object(), Collator(0), ROWS.copy  # the last is a function that returns rows
LORA = type("LoraConfig", (), {"peft_type": "LORA"})()
HEARD, PAIR = [object()], (object(), None)  # callbacks and optimizers
NAMED = {"args": OPTIONS, "train_dataset": DATA, "eval_dataset": ROWS, "processing_class": TOKENIZER}
LATER = {"callbacks": HEARD, "optimizers": PAIR, "peft_config": LORA}
PADDED = {"data_collator": PADS, **NAMED}


@pytest.mark.parametrize(
    ("order", "positional", "named"),
    [
        # CPO; SFT and reward models of 0.20 and later; those of main, with quantization_config before peft_config
        ("PLAIN", (OPTIONS, PADS, DATA, ROWS, TOKENIZER, None, HEARD, PAIR, None, LORA), PADDED | LATER),
        ("PLAIN", (OPTIONS, PADS, DATA, ROWS, TOKENIZER, None, None, HEARD, PAIR, None, None, LORA), PADDED | LATER),
        ("PLAIN", (OPTIONS, None, DATA, ROWS, TOKENIZER), NAMED),
        ("PLAIN", (OPTIONS, None, DATA), {"args": OPTIONS, "train_dataset": DATA}),
        ("PLAIN", (OPTIONS, DATA, ROWS), {"args": OPTIONS, "train_dataset": DATA, "eval_dataset": ROWS}),
        ("PLAIN", (None, None, DATA), {"train_dataset": DATA}),
        ("PLAIN", (None, None, None, ROWS), {"eval_dataset": ROWS}),
        ("PLAIN", (None, OPTIONS, DATA, ROWS, TOKENIZER), NAMED),  # as in all trainers of this package
        # DPO of 0.20 and later, KTO of main
        (
            "REFERENCE",
            ("ref", OPTIONS, PADS, DATA, ROWS, TOKENIZER, None, HEARD, PAIR, None, LORA),
            {"ref_model": "ref", **PADDED, **LATER},
        ),
        ("EITHER", ("ref", OPTIONS, PADS, DATA, ROWS, TOKENIZER), {"ref_model": "ref", **PADDED}),
        ("REFERENCE", (None, OPTIONS, None, DATA), {"args": OPTIONS, "train_dataset": DATA}),
        ("REFERENCE", (None, OPTIONS, None, DATA, None, TOKENIZER), {k: NAMED[k] for k in NAMED if k[0] != "e"}),
        ("REFERENCE", (None, None, None, DATA), {"train_dataset": DATA}),
        ("REFERENCE", ("ref",), {"ref_model": "ref"}),
        # KTO of 0.12 to 1.6
        (
            "EITHER",
            ("ref", OPTIONS, DATA, ROWS, TOKENIZER, PADS, None, HEARD),
            {"ref_model": "ref", **PADDED, "callbacks": HEARD},
        ),
        ("EITHER", (None, OPTIONS, None, DATA, ROWS), {k: NAMED[k] for k in NAMED if k[0] != "p"}),
        ("EITHER", (None, OPTIONS, None, ROWS, TOKENIZER), {k: NAMED[k] for k in NAMED if k[0] != "t"}),
        ("EITHER", (None, OPTIONS, None, None, None), {"args": OPTIONS}),
        ("REFERENCE", (None, OPTIONS, ALL, DATA), {"args": OPTIONS, "train_dataset": ALL, "eval_dataset": DATA}),
    ],
)  # fmt: skip
def test_positional_arguments_in_the_orders_of_trls_releases(order: str, positional: Any, named: Any) -> None:
    found = arguments(positional, Order[order])
    assert found.keys() == named.keys() and all(
        found[name] is value or found[name] == value for name, value in named.items()
    )


@pytest.mark.parametrize(
    ("order", "positional", "said"),
    [
        ("EITHER", (None, OPTIONS, None, DATA), "^train_dataset, eval_dataset: rows after None by position"),
        ("PLAIN", (None, OPTIONS, None, DATA), "^train_dataset, eval_dataset: rows after None by position"),
        ("PLAIN", (OPTIONS, OPTIONS), "multiple values for argument 'args'"),
        ("EITHER", (None, OPTIONS, PADS, DATA, ROWS, None, PADS), "multiple values for argument 'data_collator'"),
        ("REFERENCE", (None, 0.1, 0.0, "sigmoid", OPTIONS), "args is positional argument 6"),  # DPO of 0.12
        ("PLAIN", (OPTIONS, None, DATA, None, None, len), "positional argument 7, of type builtin"),
        ("PLAIN", (OPTIONS, None, DATA, None, None, None, (dict, {})), "positional argument 8, of type tuple"),
    ],
)
def test_ambiguous_positional_arguments_are_refused(order: str, positional: Any, said: str) -> None:
    with pytest.raises((TypeError, OptionError), match=said):
        arguments(positional, Order[order])


def test_an_argument_cannot_be_passed_twice() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'train_dataset'"):
        KTOTrainer("m", None, OPTIONS, DATA, train_dataset=DATA)  # type: ignore[arg-type]
    orders = {cls.order.name for cls in (CPOTrainer, SFTTrainer, RewardTrainer)}
    assert orders == {"PLAIN"} and (KTOTrainer.order, DPOTrainer.order) == (Order.EITHER, Order.REFERENCE)


def test_positional_arguments_of_online_dpo() -> None:
    options, data = OnlineDPOConfig("out"), [{"prompt": "a"}]
    named = {"reward_funcs": len, "args": options, "data_collator": None, "train_dataset": data}
    assert online_arguments((len, options, None, data), "tokenizers") == named
    assert online_arguments((len, "judge", options, None, data), "tokenizers") == {**named, "judge": "judge"}
    assert online_arguments((len, "judge"), "tokenizers") == {"reward_funcs": len, "judge": "judge"}
    everything = online_arguments((len, options, None, data, None, "pc", "rpc", "lora"), "tokenizers")
    assert everything["tokenizers"] == "rpc" and everything["peft_config"] == "lora"
    for positional in ((len, None, None, options), (len, options, *[None] * 7), (len, None, None, None, data)):
        with pytest.raises(TypeError, match="positional argument"):
            online_arguments(positional, "tokenizers")


def test_options_set_after_the_trainer_was_created() -> None:
    given = KTOConfig("out", logging_steps=4)
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
    check_collator(Collator(0))
    check_collator(padding)
    masking = transformers.DataCollatorForLanguageModeling.__new__(transformers.DataCollatorForLanguageModeling)
    for collator in (masking, lambda rows: rows, type("DataCollatorWithPadding", (), {})()):
        with pytest.raises(OptionError, match="data_collator: .* would not be called"):
            check_collator(collator)


def test_metrics_are_printed_and_saved_as_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    surface = TrainerSurface()
    surface.output_dir = tmp_path
    surface.log_metrics("train", {"train_runtime": 61.257, "train_loss": 0.123456, "epoch": 2})
    assert capsys.readouterr().out == (
        "***** train metrics *****\n  epoch         =          2\n  train_loss    =     0.1235\n"
        "  train_runtime = 0:01:01.25\n"
    )
    surface.log_metrics("eval", {})
    assert capsys.readouterr().out == "***** eval metrics *****\n"
    assert (
        surface.metrics_format({"eval_runtime": 3.0})["eval_runtime"]
        == transformers.Trainer.metrics_format({"eval_runtime": 3.0})["eval_runtime"]
    )
    surface.save_metrics("train", {"train_loss": 0.5})
    surface.save_metrics("eval", {"eval_loss": 0.25})
    surface.save_metrics("test", {"test_loss": 1.0}, combined=False)
    read = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert read["all_results.json"] == {"eval_loss": 0.25, "train_loss": 0.5}
    assert read["eval_results.json"] == {"eval_loss": 0.25} and read["test_results.json"] == {"test_loss": 1.0}


def test_properties_of_the_arguments_that_scripts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    options = CPOConfig("out", warmup_ratio=0.1, use_cpu=True)
    theirs = transformers.TrainingArguments("out", warmup_steps=0.1, use_cpu=True, report_to="none")
    assert [options.get_warmup_steps(n) for n in (11, 15)] == [theirs.get_warmup_steps(n) for n in (11, 15)] == [2, 2]
    assert CPOConfig("out", warmup_steps=3).get_warmup_steps(11) == 3
    assert options.get_process_log_level() == theirs.get_process_log_level()
    assert options.device.type == theirs.device.type == "cpu" and options.should_save and options.should_log
    with options.main_process_first(desc="map"), options.main_process_first(local=False):
        pass
    monkeypatch.setenv("RANK", "1")
    assert options.get_process_log_level() == logging.WARNING and not options.should_save and not options.should_log


@pytest.mark.parametrize(
    ("place", "main", "local", "last"),
    [((0, 0), True, True, False), ((2, 0), False, True, False), ((3, 1), False, False, True)],
)
def test_the_ranks_of_accelerate(
    place: tuple[int, int], main: bool, local: bool, last: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in {"RANK": place[0], "LOCAL_RANK": place[1], "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    found = Accelerator()
    assert (found.is_main_process, found.is_local_main_process, found.is_last_process) == (main, local, last)
    assert (found.state.process_index, found.state.local_process_index, found.state.num_processes) == (*place, 4)
    assert found.state.distributed_type == found.distributed_type == "DEEPSPEED"
    found.print("a", 1, sep="-")
    assert capsys.readouterr().out == ("a-1\n" if local else "")
    layer = torch.nn.Linear(1, 1)
    assert found.unwrap_model(layer) is layer
    layer.module = torch.nn.ReLU()
    assert found.unwrap_model(layer) is layer.module


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(alignment.__all__) <= set(dir(alignment)) and dir(alignment) == sorted(dir(alignment))
