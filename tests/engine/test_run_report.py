"""The report at the end of a run: its text to the letter, and what a real run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import STAGES, make_model, unpaired_rows
from transformers import TrainerCallback

from alignment import KTOConfig, KTOTrainer
from alignment.reporting.report import RunReport, duration
from alignment.training import run_page
from alignment.training.run_page import draw_page

REPORT = """\
# kto: a run

- steps: 4 of 4
- time: 2.0 s

## Phases

| phase | times | seconds | share | tokens/s | GPU memory |
| ----- | ----: | ------: | ----: | -------: | ---------: |
| train |     4 |    1.50 |  75 % |    2,000 |   1.50 GiB |
| step  |     4 |    0.50 |  25 % |          |            |

## Final metrics

| metric         | training | evaluation |
| -------------- | -------: | ---------: |
| loss           |  0.48312 |        0.5 |
| kl             |        2 |            |
| rewards/chosen |          |       -1.5 |

## Advice

- use more rows
"""


def test_the_text() -> None:
    report = RunReport(
        title="kto: a run",
        facts=[("steps", "4 of 4"), ("time", "2.0 s")],
        phases={
            "train": {"seconds": 1.5, "tokens": 3000, "peak_bytes": 1.5 * 2**30, "entries": 4},
            "step": {"seconds": 0.5, "tokens": 0, "peak_bytes": 0, "entries": 4},
        },
        memory="GPU memory",
        train={"loss": 0.48312, "kl": 2.0},
        evaluation={"loss": 0.5, "rewards/chosen": -1.5},
        advice=["use more rows"],
    )
    assert report.text() == REPORT


def test_durations() -> None:
    assert [duration(s) for s in (0.25, 59.0, 61, 3723.4)] == ["0.2 s", "59.0 s", "1 min 01 s", "1 h 02 min 03 s"]


class Obstacle(TrainerCallback):
    """Makes a folder where a file is to be written."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.place.mkdir()


def test_a_report_that_cannot_be_written_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = KTOConfig(
        output_dir=str(tmp_path / "out"), overwrite_output_dir=True, max_length=64, max_steps=1, disable_tqdm=True
    )
    trainer = KTOTrainer(model=make_model(tmp_path / "model"), args=args, train_dataset=unpaired_rows(4))
    trainer.add_callback(Obstacle(tmp_path / "out" / "report.md"))
    trainer.train()
    trainer.save_model()
    trainer.close()
    assert "could not write report.md: IsADirectoryError" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row by its first."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in rows}


def test_a_run_ends_with_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_page, "draw_page", draw_page)  # not drawn in other tests: see conftest.py
    model = make_model(tmp_path / "model", "tied")
    args = KTOConfig(
        output_dir=str(tmp_path / "out"),
        max_length=64,
        max_prompt_length=None,
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        disable_tqdm=True,
        deepspeed=STAGES["stage2"],
    )
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(4), eval_dataset=unpaired_rows(2, seed=5))
    trainer.train()
    trainer.close()
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    lines = text.splitlines()
    assert "- steps: 2 of 2, up to 2 rows each, 1 rank(s)" in lines
    assert any(
        line.startswith("- data: train_dataset: 4 of 4 rows kept (2 desirable, 2 undesirable)") for line in lines
    )
    tokens = trainer.phases.records["train"].tokens
    assert any(line.startswith("- time: ") and f"{tokens:,} tokens trained on" in line for line in lines)
    phases, metrics = text.split("## Final metrics")
    cells = table(phases)
    for name in ("reference", "kl", "train", "step", "evaluate", "save"):
        assert float(cells[name][1]) >= 0 and cells[name][4].endswith("GiB")
    cells = table(metrics)
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert cells["loss"] == [f"{last['loss']:.6g}", f"{evaluated['eval_loss']:.6g}"]
    assert cells["grad_norm"] == [f"{last['grad_norm']:.6g}", ""]
    assert "## Advice" in lines and any(
        "window" in line or "rows" in line for line in lines[lines.index("## Advice") :]
    )
