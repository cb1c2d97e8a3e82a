"""Mixtures: exact shares, no duplicate rows, a function of the seed, and names in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from support.helpers import make_model, paired_rows, unpaired_rows

from alignment import CPOConfig, KTOConfig, KTOTrainer
from alignment.cli.train_job import build_trainer
from alignment.config.checks import check_command_line
from alignment.config.errors import DataError, OptionError
from alignment.config.options_data import MixturePart, mixture_parts
from alignment.data.mixture import draw, mixed, shares
from alignment.data.prepare import Prepared
from alignment.data.report import NOT_DRAWN, DataReport, counts, joined


@pytest.mark.parametrize(
    ("sizes", "weights", "most", "expected"),
    [
        ((100, 100), (0.7, 0.3), None, [99, 43]),  # 142 rows: 99.4 and 42.6
        ((70, 30), (0.7, 0.3), None, [70, 30]),  # exact: 0.7 is seven tenths
        ((30, 100), (1, 1), None, [30, 30]),
        ((30, 100), (2, 1), None, [30, 15]),
        ((10, 10, 10), (1, 1, 1), 10, [4, 3, 3]),  # equal remainders: the earlier dataset's
        ((100, 100), (3, 1), 8, [6, 2]),
        ((5, 7), (None, None), None, [5, 7]),
        ((5, 15), (None, None), 8, [2, 6]),
        ((5, 7), (None, None), 99, [5, 7]),
        ((9,), (0.5,), None, [9]),
    ],
)
def test_shares(sizes: Any, weights: Any, most: int | None, expected: list[int]) -> None:
    parts = [(f"part {i}", size, weight) for i, (size, weight) in enumerate(zip(sizes, weights))]
    assert shares(parts, most) == expected


def test_a_part_that_contributes_no_rows() -> None:
    with pytest.raises(DataError, match="^b: it contributes no rows to a mixture of 10 rows at weight 0.001"):
        shares([("a", 10, 1.0), ("b", 10, 0.001)], None)


def test_rows_of_one_source_row_are_sampled_together() -> None:
    rows = np.repeat(np.arange(50) * 3, 2)  # pairs, of which some source rows were dropped
    drawn = draw(rows, 20, (42, 0))
    assert drawn.tolist() == sorted(set(drawn.tolist())) and len(drawn) == 20
    assert all(np.bincount(rows[drawn])[np.unique(rows[drawn])] == 2)
    assert draw(rows, 20, (42, 0)).tolist() == drawn.tolist()
    assert draw(rows, 20, (43, 0)).tolist() != drawn.tolist() != draw(rows, 20, (42, 1)).tolist()
    assert draw(rows, 21, (42, 0)).tolist() != drawn.tolist() and len(draw(rows, 21, (42, 0))) == 21
    assert sorted(draw(rows, 100, (1, 1)).tolist()) == list(range(100))


def test_parts_of_the_same_size_sample_different_rows() -> None:
    """Otherwise, corresponding rows of two datasets would be selected together."""
    cut = {"prompt_cut": [False] * 40, "completions_cut": [0] * 40}
    rows = Dataset.from_dict({"prompt_ids": [[number] for number in range(40)], "row": range(40), **cut})
    part = Prepared(rows, DataReport(40, 40))
    dataset, _ = mixed([("a", part, 1.0), ("b", part, 1.0)], 40, seed=42)
    drawn = dataset["row"][:]
    assert len(drawn) == 40 and drawn[:20] != drawn[20:]


def test_every_row_is_sampled_with_equal_probability() -> None:
    counts = np.zeros(10)
    for seed in range(2000):
        counts[draw(np.arange(10), 3, (seed,))] += 1
    assert counts.min() > 500 and counts.max() < 700  # 600 are expected, with a standard deviation of 20


def test_reports() -> None:
    cut = {"prompt_cut": [True] + [False] * 7, "completions_cut": [1, 1] + [0] * 6}
    rows = Dataset.from_dict({"label": [True] * 5 + [False] * 3, "row": range(8), **cut})
    report = DataReport(10, 8, {"empty": 2}, 1, 2, 5, 3)
    assert counts(rows) == {key: vars(report)[key] for key in counts(rows)}
    whole, (same, fewer) = mixed([("a", Prepared(rows, report), 1.0), ("b", Prepared(rows, report), 0.5)], None, 1)
    assert same == report and len(whole) == 12
    taken = whole.select(range(8, 12))
    found = {name: value for name, value in counts(taken).items() if name != "rows_out"}
    assert fewer == DataReport(10, 4, {"empty": 2, NOT_DRAWN: 4}, **found)
    assert fewer.rows_in == fewer.rows_out + sum(fewer.dropped.values()) and 0 < fewer.desirable < 4
    assert joined([fewer, report]).dropped == {"empty": 4, NOT_DRAWN: 4} and joined([fewer, report]).rows_out == 12


def test_parts_of_the_option() -> None:
    plain, split = MixturePart(dataset_name="a"), MixturePart(dataset_name="b", split="x")
    assert mixture_parts(["a", {"dataset_name": "b", "split": "x"}]) == [plain, split]
    weighted = [MixturePart(dataset_name="a", weight=1.0), MixturePart(dataset_name="b", weight=0.5)]
    assert mixture_parts({"a": 1, "b": "0.5"}) == weighted
    assert KTOConfig("o", dataset_mixture='{"a": 1, "b": 2}').dataset_mixture == {"a": 1, "b": 2}


def test_evaluation_needs_a_split_of_some_part() -> None:
    usual = {"model_name_or_path": "m", "eval_strategy": "epoch"}
    for mixture, more in (([{"dataset_name": "a", "test_split": "x"}], {}), (["a"], {"dataset_test_split": "x"})):
        check_command_line(CPOConfig("o", dataset_mixture=mixture, **usual, **more))
    with pytest.raises(OptionError, match="no evaluation dataset"):
        check_command_line(CPOConfig("o", dataset_mixture=["a"], **usual))


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    """Write JSON Lines."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, 30 labeled rows, 20 pairs of which the first is dropped, and 10 Alpaca rows in a folder with splits."""
    folder = tmp_path_factory.mktemp("mixture")
    make_model(folder / "model")
    same = {"prompt": None, "chosen": "a b", "rejected": "a b"}
    alpaca = [{"instruction": f"do {i}", "input": "", "output": f"done {i}", "kto_tag": i % 2 == 0} for i in range(10)]
    files = {"labeled": unpaired_rows(30), "pairs": [same, *paired_rows(20)]}
    for name, rows in (files | {"alpaca/train": alpaca, "alpaca/test": alpaca[:4]}).items():
        write(folder / f"{name}.jsonl", rows)
    return folder


ALPACA = {"prompt": "instruction", "query": "input", "completion": "output", "label": "kto_tag"}


def trainer_of(folder: Path, **options: Any) -> KTOTrainer:
    """Create a trainer with labeled rows, pairs and Alpaca rows in the ratio 3:2:1, like the command."""
    mixture = [
        {"dataset_name": str(folder / "labeled.jsonl"), "weight": 3},
        {"dataset_name": str(folder / "pairs.jsonl"), "weight": 2},
        {"dataset_name": str(folder / "alpaca"), "weight": 1, "column_map": ALPACA, "test_split": "test"},
    ]
    given = {"dataset_mixture": mixture, "max_length": 96, "model_name_or_path": str(folder / "model"), **options}
    return build_trainer(KTOConfig(str(folder / "out"), **given))


@pytest.mark.parametrize(("words", "expected"), [(200, 96), (40, None)])
def test_without_max_length_rows_are_cut_to_the_positions_of_the_model(
    tmp_path: Path, folder: Path, words: int, expected: int | None
) -> None:
    rows = [{"prompt": "a", "completion": "b " * words, "label": row % 2 == 0} for row in range(16)]
    long = write(tmp_path / "long.jsonl", rows)
    trainer = trainer_of(folder, dataset_mixture=None, dataset_name=long, max_length=None)
    data = trainer.data.train
    assert data is not None and data.table.max_length == 96
    lengths = data.table.prompt + data.table.completions[:, 0]
    assert (lengths == 96).all() if expected else (lengths < 96).all()
    assert data.report.completions_cut == (16 if expected else 0)
    assert trainer.args.max_length is None


@pytest.mark.parametrize("role", ["train", "eval"])
def test_a_limit_keeps_the_proportions_of_unweighted_parts(tmp_path: Path, folder: Path, role: str) -> None:
    files = [write(tmp_path / f"{rows}.jsonl", unpaired_rows(rows)) for rows in (150, 30)]
    parts = [{"dataset_name": file, "test_split": "train"} for file in files]
    trainer = trainer_of(folder, dataset_mixture=parts, **{f"max_{role}_samples": 36})
    data = trainer.data.train if role == "train" else next(iter(trainer.data.eval.values()))
    assert [part.report.rows_out for part in data.parts] == [30, 6]
    assert data.report.dropped == {NOT_DRAWN: 144} and "weight" not in data.report.summary()


def test_a_limit_takes_the_first_rows(folder: Path) -> None:
    one = {"dataset_mixture": None, "dataset_name": str(folder / "labeled.jsonl"), "dataset_test_split": "train"}

    def rows(**limits: int) -> list[list[dict[str, Any]]]:
        trainer = trainer_of(folder, **one, **limits)
        both = trainer.data.train, *trainer.data.eval.values()
        return [data.dataset.to_list() for data in both if data is not None]

    whole = rows(max_train_samples=31)
    assert [len(part) for part in whole] == [30, 30]
    assert rows(max_train_samples=7, max_eval_samples=3) == [whole[0][:7], whole[1][:3]]


def test_a_mixture_of_labeled_rows_pairs_and_other_columns(folder: Path) -> None:
    trainer = trainer_of(folder)
    data = trainer.data.train
    assert [part.report.rows_out for part in data.parts] == [30, 20, 10]
    assert [Path(part.where).name for part in data.parts] == ["labeled.jsonl", "pairs.jsonl", "alpaca"]
    assert data.report.dropped == {NOT_DRAWN: 20, "chosen and rejected are identical": 2}
    assert (data.report.rows_in, len(data.dataset), len(data.table)) == (82, 60, 60)
    assert (data.report.desirable, data.report.undesirable) == (30, 30) == (data.table.labels.sum(), 30)
    decode = trainer.processing_class.decode
    assert decode(data.dataset[50]["prompt_ids"]) == "do 0"
    assert data.table.prompt[50] == len(data.dataset[50]["prompt_ids"])
    assert data.source_row(29) == f"{folder / 'labeled.jsonl'}, row 30"
    assert data.source_row(50) == f"{folder / 'alpaca'}, row 1"
    for row in range(30, 50, 2):  # complete pairs, with the row numbers of their file
        number = int(str(data.source_row(row)).rsplit(" ", 1)[1])
        assert data.source_row(row) == data.source_row(row + 1) == f"{folder / 'pairs.jsonl'}, row {number}"
        chosen = decode(data.dataset[row]["completion_ids"]).removesuffix("</s>")
        assert json.loads((folder / "pairs.jsonl").read_text().splitlines()[number - 1])["chosen"] == chosen
    [evaluation] = trainer.data.eval.values()
    assert (evaluation.report.rows_out, evaluation.source_row(3)) == (4, 4)


def test_data_seed_determines_the_sampled_rows(folder: Path) -> None:
    rows = []
    for options in ({}, {}, {"seed": 7}, {"seed": 7, "data_seed": 42}):
        data = trainer_of(folder, **options).data.train
        rows.append([data.source_row(row) for row in range(len(data.dataset))])
    assert rows[0] == rows[1] == rows[3] != rows[2]
