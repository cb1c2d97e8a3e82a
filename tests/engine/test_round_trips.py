"""What a run writes is read by its own readers and, in the layout of another library, by that library and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from helpers import make_classifier, make_model, options, paired_rows, unpaired_rows

import alignment
from alignment.training.trainer import AlignmentTrainer

TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
METHODS: dict[str, list[dict[str, Any]]] = {
    "KTO": unpaired_rows(6),
    "CPO": paired_rows(6),
    "DPO": paired_rows(6),
    "Reward": [row | {"margin": float(number)} for number, row in enumerate(paired_rows(6))],
    "SFT": [{"messages": TURNS * number} for number in (1, 2, 3)],
    "OnlineDPO": [{"prompt": TURNS[:1], "topic": str(number)} for number in range(4)],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"policy": make_model(folder / "policy"), "classifier": make_classifier(folder / "classifier")}


def trainer_of(method: str, models: dict[str, str], folder: Path, rows: Any, **more: Any) -> AlignmentTrainer:
    """Return a trainer that has tokenized its rows."""
    given = options(folder) | more
    arguments: dict[str, Any] = {}
    if method in ("Reward", "SFT", "OnlineDPO"):
        given.pop("max_prompt_length")
    if method == "OnlineDPO":
        given |= {"max_new_tokens": 8}
        arguments["reward_funcs"] = lambda prompts, completions, **columns: [float(len(text)) for text in completions]
    args = getattr(alignment, f"{method}Config")(**given)
    model = models["classifier" if method == "Reward" else "policy"]
    made: AlignmentTrainer = getattr(alignment, f"{method}Trainer")(
        model, args=args, train_dataset=rows, eval_dataset=rows, **arguments
    )
    return made


def sequences(trainer: AlignmentTrainer) -> list[dict[str, Any]]:
    """Return the tokenized rows without the numbers of their source rows.

    Reward models score complete sequences; which of their tokens are the prompt has no effect.
    """
    assert trainer.train_data is not None
    rows = []
    for row in trainer.train_data.dataset:
        sides: dict[str, Any] = {name: value for name, value in row.items() if name != "row"}
        if trainer.method.kind == "preference_margin":
            prompt = sides.pop("prompt_ids")
            sides |= {name: prompt + sides[name] for name in ("chosen_ids", "rejected_ids")}
        rows.append(sides)
    return rows


@pytest.mark.parametrize("method", METHODS)
def test_tokenized_rows_are_read_again(method: str, models: dict[str, str], tmp_path: Path) -> None:
    first = trainer_of(method, models, tmp_path, METHODS[method])
    shown = first.train_dataset if isinstance(first.train_dataset, Dataset) else Dataset.from_list(first.train_dataset)
    shown.save_to_disk(tmp_path / "arrow")
    shown.to_parquet(tmp_path / "rows.parquet")
    for rows in (shown, load_from_disk(tmp_path / "arrow"), Dataset.from_parquet(str(tmp_path / "rows.parquet"))):
        again = trainer_of(method, models, tmp_path, rows)
        assert sequences(again) == sequences(first) and len(sequences(first)) > 1
        assert again.train_dataset[:] == shown[:] and again.eval_dataset[:] == shown[:]
        again.close()
    first.close()


def test_pairs_that_trls_cpo_trainer_stored_are_trained_on_as_there(models: dict[str, str], tmp_path: Path) -> None:
    """The columns of ``tokenize_row`` of TRL 1.16, which ``trainer.train_dataset`` of TRL stores."""
    stored = {
        "prompt": "ab",
        "chosen": "c",
        "rejected": "de",
        "chosen_input_ids": [0, 3, 4, 5, 1],
        "chosen_attention_mask": [1] * 5,
        "chosen_labels": [-100, -100, -100, 5, 1],
        "rejected_input_ids": [0, 3, 4, 6, 7, 1],
        "rejected_attention_mask": [1] * 6,
        "rejected_labels": [-100, -100, -100, 6, 7, 1],
        "prompt_input_ids": [0, 3, 4],
        "prompt_attention_mask": [1] * 3,
    }
    for method in ("CPO", "DPO"):
        trainer = trainer_of(method, models, tmp_path, Dataset.from_list([stored] * 4))
        [row, *_] = sequences(trainer)
        assert row == {"prompt_ids": [0, 3, 4], "chosen_ids": [5, 1], "rejected_ids": [6, 7, 1]}
        if method == "CPO":
            own = trainer.train_dataset[0]
            assert own == {name: stored[name] for name in own} and len(own) == 8
        trainer.close()
