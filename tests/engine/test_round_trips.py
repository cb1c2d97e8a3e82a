"""What a run writes is read by its own readers and, in the layout of another library, by that library and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from support.data_tokenizers import MARKED, char_tokenizer
from support.helpers import make_classifier, make_model, options, paired_rows, train_and_close, unpaired_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerState

import alignment
from alignment.checkpoint.export import export
from alignment.cli.parsing import parse
from alignment.config.errors import ModelError
from alignment.config.options_export import ExportOptions
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.sources import load_split
from alignment.run.status_file import read_status
from alignment.training.trainer import AlignmentTrainer

TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "é 🚀"}}}}]
LONG, EMPTY = {"prompt": "xy" * 30}, {"prompt": ""}
PAIRS = [
    *paired_rows(4),
    LONG | {"chosen": "c" * 50, "rejected": "d"},
    LONG | {"chosen": "c", "rejected": "cd" * 30},
    EMPTY | {"chosen": "c", "rejected": "cc"},
    EMPTY | {"chosen": "", "rejected": "c"},
]
LABELED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(row["chosen"])} for row in PAIRS]
ASKED = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
MARGINS = (0.1, None, -1e-7, 1 / 3, 0.0, 5e30, 1.0, 2.0)
# Method, rows and options; in long rows, prompts and completions are truncated.
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "kto": ("KTO", [*LABELED, *paired_rows(2), *unpaired_rows(2)], {}),
    "cpo": ("CPO", PAIRS, {}),
    "dpo": ("DPO", PAIRS, {}),
    "reward": ("Reward", [row | {"margin": margin} for row, margin in zip(PAIRS, MARGINS)], {}),
    "sft: completions": ("SFT", ASKED, {}),
    "sft: complete rows": ("SFT", ASKED, {"completion_only_loss": False}),
    "sft: conversations": ("SFT", [{"messages": TURNS * number} for number in (1, 2, 3)], {}),
    "sft: turns": ("SFT", [{"messages": TURNS * number} for number in (1, 2, 3)], {"assistant_only_loss": True}),
    "sft: packs": ("SFT", ASKED, {"packing": True, "packing_strategy": "wrapped"}),
    "online": (
        "OnlineDPO",
        [
            {"prompt": TURNS[:1], "tools": TOOLS, "topic": "é 🚀", "more": {"a": [1, None], "b": 1e-7}},
            {"prompt": TURNS + TURNS[:1], "tools": None, "topic": None, "more": None},
        ],
        {},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    policy = make_model(folder / "policy")
    char_tokenizer(template=MARKED).save_pretrained(policy)
    return {"policy": policy, "classifier": make_classifier(folder / "classifier")}


def trainer_of(method: str, models: dict[str, str], folder: Path, rows: Any, **more: Any) -> AlignmentTrainer:
    """Return a trainer that has tokenized its rows."""
    given = options(folder) | more
    arguments: dict[str, Any] = {}
    if method in ("Reward", "SFT", "OnlineDPO"):
        given.pop("max_prompt_length")
    if method == "OnlineDPO":
        given = {"max_new_tokens": 8} | given
        if "reward_model_path" not in given:
            arguments["reward_funcs"] = lambda completions, **columns: [float(len(text)) for text in completions]
    args = getattr(alignment, f"{method}Config")(**given)
    model = models["classifier" if method == "Reward" else "policy"]
    return getattr(alignment, f"{method}Trainer")(model, args=args, train_dataset=rows, eval_dataset=rows, **arguments)


def sequences(trainer: AlignmentTrainer) -> list[dict[str, Any]]:
    """Return the tokenized rows without the numbers of their source rows, and without the hash of the whole prompt.

    Reward models score complete sequences; which of their tokens are the prompt has no effect.
    """
    rows = []
    for row in trainer.data.train.dataset:
        without = ("row", "prompt_key", "prompt_cut", "completions_cut")
        sides: dict[str, Any] = {name: value for name, value in row.items() if name not in without}
        if trainer.method.kind == SCORED_PAIRS:
            prompt = sides.pop("prompt_ids")
            sides |= {name: prompt + sides[name] for name in ("chosen_ids", "rejected_ids")}
        rows.append(sides)
    return rows


@pytest.mark.parametrize("case", CASES)
def test_tokenized_rows_are_read_again(case: str, models: dict[str, str], tmp_path: Path) -> None:
    method, rows, more = CASES[case]
    first = trainer_of(method, models, tmp_path, rows, **more)
    shown = first.train_dataset if isinstance(first.train_dataset, Dataset) else Dataset.from_list(first.train_dataset)
    shown.save_to_disk(tmp_path / "arrow")
    shown.to_parquet(tmp_path / "rows.parquet")
    shown.to_json(tmp_path / "rows.jsonl")
    stored = (tmp_path / "arrow", tmp_path / "rows.parquet", tmp_path / "rows.jsonl")
    for data in (shown, *(load_split(str(path), None, "train") for path in stored)):
        again = trainer_of(method, models, tmp_path, data, **more)
        if "packing" not in more:  # each pack is then one row
            assert sequences(again) == sequences(first) and len(sequences(first)) > 1
        assert again.train_dataset[:] == shown[:] and again.eval_dataset[:] == shown[:]
        again.close()
    first.close()


STORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "KTO": (
        {
            "prompt": "ab",
            "completion": "c",
            "label": False,
            "prompt_ids": [0, 3, 4],
            "completion_ids": [5, 1],
            "KL_completion_ids": [9, 9, 1],
        },
        {"prompt_ids": [0, 3, 4], "completion_ids": [5, 1], "label": False},
    ),
    "DPO": (
        {"prompt": "ab", "prompt_ids": [0, 3], "chosen_ids": [4, 5, 1], "rejected_ids": [1], "ref_chosen_logps": -1.5},
        {"prompt_ids": [0, 3], "chosen_ids": [4, 5, 1], "rejected_ids": [1]},
    ),
    "SFT": (
        {"input_ids": [3, 4, 5, 6, 1], "completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]},
        {"prompt_ids": [3, 4], "completion_ids": [5, 6, 1], "scored": [True, False, True], "first": False},
    ),
    "Reward": (
        {"chosen": "ab", "rejected": "c", "chosen_ids": [3, 4, 5], "rejected_ids": [3], "margin": 0.5},
        {"chosen_ids": [3, 4, 5], "rejected_ids": [3], "margin": 0.5},
    ),
}


@pytest.mark.parametrize("layout", STORED)
def test_rows_that_trl_stored_are_trained_on_as_there(layout: str, models: dict[str, str], tmp_path: Path) -> None:
    """The columns of TRL 1.16 after tokenization; they also contain the text."""
    stored, expected = STORED[layout]
    trainer = trainer_of(layout.split()[0], models, tmp_path, Dataset.from_list([stored] * 4))
    assert sequences(trainer) == [expected] * 4
    trainer.close()


@pytest.fixture(scope="module")
def run(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlignmentTrainer]:
    """A finished run with adapters, whose head is saved too although the base model ties it, in an odd folder."""
    more = {"max_steps": 2, "learning_rate": 0.1, "use_peft": True, "lora_modules_to_save": ["lm_head"]}
    more |= {"eval_strategy": "steps", "report_to": ["tensorboard"], "run_name": "no", "bf16": True}
    folder = tmp_path_factory.mktemp("a b") / "é 🚀 #1"
    trainer = trainer_of("KTO", models, folder, unpaired_rows(8), save_strategy="steps", save_steps=1, **more)
    trainer.train()
    trainer.log({"mine/nan": float("nan"), "mine/é": 1e-7})
    trainer.save_model()
    trainer.save_state()
    yield trainer
    trainer.close()


def test_the_records_of_a_run(run: AlignmentTrainer) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, history = run.output_dir, run.state.log_history
    assert TrainerState.load_from_json(str(folder / "trainer_state.json")) == run.state
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (folder / "log.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in line.items() if name != "time"} for line in lines if "event" not in line]
    assert logged == history and logged[-1] == {"mine/nan": None, "mine/é": 1e-7, "step": 2, "epoch": 1.0}
    status = read_status(folder)
    assert status is not None and (status.state, status.step, status.checkpoint) == ("finished", 2, "checkpoint-2")
    named = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "dataset_test_split": "test"}  # given in Python
    again = parse([str(folder / "options.json"), *(f"--{name}={value}" for name, value in named.items())])
    assert again.to_dict() == run.args.to_dict() | named
    first, *_ = sorted((folder / "runs").rglob("events.*"))  # what is logged after the run has a file of its own
    scalars = EventAccumulator(str(first)).Reload().Scalars("train/loss")
    assert [(one.step, one.value) for one in scalars] == [
        (one["step"], pytest.approx(one["loss"], rel=1e-6)) for one in history if "loss" in one
    ]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([[0, 5, 6, 7, 8, 9]])).logits.float()


def test_the_adapters_of_a_run(run: AlignmentTrainer, models: dict[str, str], tmp_path: Path) -> None:
    """PEFT reads them, they are read again as PEFT saves them, under a name of its own, and training continues."""
    loss = run.evaluate()["eval_loss"]
    base = AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.bfloat16)
    untrained = logits(base)
    theirs = PeftModel.from_pretrained(base, run.output_dir, adapter_name="mine")
    assert (logits(theirs) - untrained).abs().max() > 0.1
    theirs.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.bfloat16)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path / "saved" / "mine")), logits(theirs))
    reference = {"ref_model_name_or_path": models["policy"], "ref_placement": "replica"}
    for folder in (run.output_dir, run.output_dir / "checkpoint-2", tmp_path / "saved" / "mine"):
        rows, more = unpaired_rows(8), {"adapter_name_or_path": str(folder), "bf16": True, **reference}
        continued = trainer_of("KTO", models, tmp_path, rows, **more)
        assert continued.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6), folder
        continued.close()
    export(run.output_dir, tmp_path / "merged", ExportOptions(dtype="float32"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    wide = AutoModelForCausalLM.from_pretrained(models["policy"])
    assert (logits(merged) - logits(PeftModel.from_pretrained(wide, run.output_dir))).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == MARKED


def test_a_trained_reward_model_scores_completions_that_are_rows(models: dict[str, str], tmp_path: Path) -> None:
    """Adapters and head by way of an export, the scores in completions.jsonl, and its pairs as training data."""
    more = {"max_steps": 2, "learning_rate": 0.1, "use_peft": True}
    trained = train_and_close(trainer_of("Reward", models, tmp_path / "a b", paired_rows(8), **more), save=True)
    asked = {"user: ab": TURNS[:1], "user: ab\nassistant: ba": TURNS}  # the policy continues the second one
    rows = [{"prompt": prompt} for prompt in asked.values()] * 2
    with pytest.raises(ModelError, match="^reward_model_path: .*deepspeed-alignment export"):
        trainer_of("OnlineDPO", models, tmp_path / "no", rows, reward_model_path=str(trained.output_dir))
    export(trained.output_dir, tmp_path / "merged")
    online = trainer_of("OnlineDPO", models, tmp_path, rows, reward_model_path=str(tmp_path / "merged"), max_steps=1)
    train_and_close(online)
    base = AutoModelForSequenceClassification.from_pretrained(models["classifier"])
    scoring = PeftModel.from_pretrained(base, trained.output_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    lines = [json.loads(line) for line in (online.output_dir / "completions.jsonl").read_text().splitlines()]
    pairs = [line for line in lines if line["dropped"] is None]
    assert {line["prompt"] for line in pairs} == {*asked}
    for line in pairs:
        *turns, last = asked[line["prompt"]]
        for side in ("chosen", "rejected"):
            prefix = last["content"] if last["role"] == "assistant" else None
            said = {"role": "assistant", "content": f"{prefix or ''}{line[side]}"}
            whole = [*turns, said] if prefix is not None else [*turns, last, said]
            ids = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=True)["input_ids"]
            assert scoring(input_ids=ids).logits.item() == pytest.approx(line[f"{side}_score"], abs=1e-4)
    answers = [{"prompt": line["prompt"], "completion": line["chosen"]} for line in pairs]
    for method, data, sides in (("KTO", pairs, ("chosen", "rejected")), ("SFT", answers, ("chosen",))):
        again = trainer_of(method, models, tmp_path, data)
        texts = [again.processing_class.decode(row["prompt_ids"] + row["completion_ids"]) for row in sequences(again)]
        assert texts == [f"{line['prompt']}{line[side]}</s>" for line in pairs for side in sides]
        again.close()
