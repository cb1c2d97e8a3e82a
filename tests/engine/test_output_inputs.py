"""``overwrite_output_dir`` never destroys what the run reads, and moves the model of an earlier run aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from support.helpers import make_classifier, make_model, options, paired_rows, train_and_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from alignment.config.errors import OutputError
from alignment.training.arguments import inputs_of
from alignment.training.data import training_data


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("role", ["model", "ref_model", "data", "link"])
def test_an_output_folder_that_the_run_reads_is_refused(role: str, model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given: dict[str, Any] = {"model": model, "train_dataset": paired_rows(8)}
    if role == "data":
        Dataset.from_list(paired_rows(8)).save_to_disk(out)
        given["train_dataset"] = load_from_disk(out)
    elif role == "link":
        make_model(tmp_path / "real")
        out.symlink_to("real")
        given["model"] = str(tmp_path / "real")
    else:
        given[role] = make_model(out)
    before = files(tmp_path)
    kinds: tuple[Any, Any] = (KTOTrainer, KTOConfig) if role == "ref_model" else (CPOTrainer, CPOConfig)
    with pytest.raises(OutputError, match="^output_dir: .*" + ("train_dataset" if role == "data" else "model")):
        kinds[0](args=kinds[1](**options(tmp_path, overwrite_output_dir=True)), **given)
    assert files(tmp_path) == before


@pytest.mark.parametrize("role", ["reward_model", "live", "reward_funcs", "option"])
def test_a_reward_model_is_not_overwritten(role: str, model: str, tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "out")
    given: dict[str, Any] = {
        "reward_model": {"reward_model": path},
        "reward_funcs": {"reward_funcs": [len, path]},
    }.get(role, {})
    if role == "live":
        given = {"reward_model": AutoModelForSequenceClassification.from_pretrained(path)}
        given["reward_processing_class"] = AutoTokenizer.from_pretrained(path)
    args = OnlineDPOConfig(
        path,
        max_length=64,
        max_new_tokens=8,
        overwrite_output_dir=True,
        reward_funcs=[path] if role == "option" else None,
    )
    before = files(tmp_path)
    with pytest.raises(OutputError, match="^output_dir: .* contains reward_"):
        OnlineDPOTrainer(model, args=args, train_dataset=[{"prompt": "x"}], **given)
    assert files(tmp_path) == before


def test_data_within_the_output_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that no run writes may stay, also an Arrow file that is read in place; a home folder is expanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "out"
    Dataset.from_list(paired_rows(8)).save_to_disk(tmp_path / "saved")
    out.mkdir()
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.rename(out / "rows.arrow")
    for name in ("train.jsonl", "log.jsonl"):
        Dataset.from_list(paired_rows(8)).to_json(out / name)

    def trainer(rows: Any = None, **given: Any) -> None:
        args = CPOConfig(**options(tmp_path, overwrite_output_dir=True, **given))
        CPOTrainer(model, args=args, train_dataset=rows or training_data(args)).close()

    trainer(Dataset.from_file(str(out / "rows.arrow")))
    trainer(dataset_name="~/out/train.jsonl")
    for named in ({"dataset_name": "~/out/log.jsonl"}, {"dataset_mixture": ["~/out"]}, {"dataset_name": "~/out"}):
        with pytest.raises(OutputError, match=f"^output_dir: .* contains {next(iter(named))}"):
            trainer(**named)


def test_options_that_name_inputs(tmp_path: Path) -> None:
    args = OnlineDPOConfig(
        str(tmp_path / "out"), reward_model_path="r", adapter_name_or_path="a", dataset_mixture={"d": 1, "e": 2}
    )
    models = (("model", "m"), ("ref_model", None))
    named = dict.fromkeys(name for _, name in inputs_of(args, models, (None, paired_rows(1))))
    assert list(named) == ["m", "a", "r", "d", "e"]


def test_the_model_of_an_earlier_run_is_moved(model: str, tmp_path: Path) -> None:
    for number in (1, 2):
        args = CPOConfig(**options(tmp_path, max_steps=1, overwrite_output_dir=number == 2))
        train_and_close(CPOTrainer(model, args=args, train_dataset=paired_rows(8, seed=number)), save=True)
        if number == 1:
            weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "previous-1" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != weights
