"""The command ``precompute``, and runs on one and two ranks with the log-probs that it stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.helpers import POSITIONS, exit_status, make_model, unpaired_rows

from alignment.cli import precompute, train

STORES = "deepspeed-alignment/reference-*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and labeled rows."""
    folder = tmp_path_factory.mktemp("precompute")
    make_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unpaired_rows(60)))
    return folder


def arguments(folder: Path, out: Path, **more: object) -> list[str]:
    given = {"method": "kto", "model_name_or_path": folder / "model", "dataset_name": folder / "rows.jsonl"}
    given |= {"dataset_test_split": "train[:5]", "output_dir": out / "out", "max_length": POSITIONS}
    given |= {"per_device_train_batch_size": 2, "disable_tqdm": "true", **more}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


@pytest.mark.usefixtures("own_process_group")
def test_the_command_only_fills_the_stores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def said(command: object, *more: str, code: int = 0) -> list[str]:
        status = exit_status(command.main, [*arguments(folder, tmp_path), *more])  # type: ignore[attr-defined]
        out, err = capfd.readouterr()
        assert status == code, err
        return [line for line in (out if code == 0 else err).splitlines() if "reference log-probs of" in line or code]

    placed = ("--ref_placement", "precomputed")
    assert [line.split(": ")[1].split(", ")[0] for line in said(train, *placed, "--dry_run")] == [
        "not computed yet"
    ] * 2
    assert not list((tmp_path / "cache").glob(STORES)), "a dry run writes no store"
    computed = said(precompute)
    assert [line.split(": ")[1].split(" in ")[0] for line in computed] == ["computed"] * 2
    found = sorted((tmp_path / "cache").glob(STORES))
    assert len(found) == 2 and all(str(store) in "".join(computed) for store in found)
    dry = said(train, *placed, "--dry_run")
    assert [line.split(": ")[1].split(", ")[0] for line in dry] == ["complete"] * 2
    assert [line.split(": ")[1].split(" in ")[0] for line in said(precompute, *placed)] == ["found"] * 2
    assert not (tmp_path / "out").exists()
    for wrong, place in (
        (("--ref_placement", "replica"), "precompute_ref_log_probs=True and ref_placement='replica'"),
        (("--precompute_ref_log_probs", "false"), "ref_placement=None: "),
    ):
        assert said(precompute, *wrong, code=1)[-1].startswith(f"error: {place}")
