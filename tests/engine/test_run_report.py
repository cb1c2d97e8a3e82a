"""The report at the end of a run: the tables of its text, and what a real run writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.helpers import STAGES, Acts, make_model, train_and_close, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.reporting.page import Page, Section, as_markdown, metrics_section, phases_section
from alignment.run.stop import RunStopped
from alignment.training import run_page
from alignment.training.run_page import draw_page


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row by its first."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in rows}


def test_the_text() -> None:
    phases = {
        "train": {"seconds": 1.5, "tokens": 3000, "peak_bytes": 1.5 * 2**30, "entries": 4},
        "step": {"seconds": 0.5, "tokens": 0, "peak_bytes": 0, "entries": 4},
        "save": {"seconds": 0.0, "tokens": 3, "peak_bytes": 0, "entries": 1},
    }
    evaluation = {"rewards/chosen": -1.5, "count/chosen": 3.0, "logps/chosen_sum": -9.0}
    sections = [
        phases_section(phases, "GPU memory"),
        metrics_section([("Training", None, {}), ("Evaluation", 4, evaluation)]),
        Section("Warnings and advice", messages=[("advice", "use more rows")]),
    ]
    text = as_markdown(Page("a run", "KTO", sections, "", facts={"Steps": "4 of 4"}))
    assert text.startswith("# KTO: a run\n\n- Steps: 4 of 4\n\n## Phases\n") and "### Evaluation at step 4\n" in text
    assert "Training" not in text and text.endswith("\n\n## Warnings and advice\n\n- use more rows\n")
    rows = {name: cells for name, cells in table(text).items() if not name.startswith("-")}
    assert rows == {
        "phase": ["share of the time", "time", "times", "tokens/s", "GPU memory"],
        "train": ["75%", "1.5 s", "4", "2,000", "1.50 GiB"],
        "step": ["25%", "0.5 s", "4", "", ""],
        "save": ["0%", "0.0 s", "1", "", ""],
        "metric": ["value"],
        "rewards/chosen": ["-1.5"],
    }


@pytest.mark.usefixtures("drawn", "own_process_group")
def test_reports_that_cannot_be_written_cost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = kto(tmp_path, max_steps=1)
    for name in ("report.md", "report.html"):
        trainer.add_callback(Acts("on_train_begin", 0, (tmp_path / "out" / name).mkdir))
    train_and_close(trainer, save=True)
    said = capsys.readouterr().out
    assert all(f"could not write {name}: IsADirectoryError: " in said for name in ("report.md", "report.html"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.usefixtures("drawn")
def test_a_run_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model", "tied")
    args = KTOConfig(
        str(tmp_path / "out"), max_length=64, max_prompt_length=None, per_device_train_batch_size=2, max_steps=2,
        logging_steps=1, eval_strategy="steps", disable_tqdm=True, deepspeed=STAGES["stage2"],
    )  # fmt: skip
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(4), eval_dataset=unpaired_rows(2, seed=5))
    train_and_close(trainer)
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    assert "\n- Steps: 2 of 2\n" in text and "\n- Rows per step: 2\n" in text
    assert f"\n- Tokens: {trainer.phases.records['train'].tokens:,}\n" in text and "\n- Largest process: " in text
    assert f"\n- Chat with it: deepspeed-alignment chat {tmp_path / 'out'}\n" in text
    assert "\n## Warnings and advice\n\n- " in text and "\n## Versions" not in text
    phases, metrics = text.split("## Final metrics")
    cells = table(phases)
    assert cells["kept"] == ["2"] and "### Training\n\ntrain_dataset\n\n" in phases
    for name in ("reference", "kl", "train", "step", "evaluate", "save"):
        assert cells[name][1].endswith(" s") and cells[name][4].endswith("GiB")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "finished</span>" in page and "prompt and completion" in page
    cells, evaluation = map(table, metrics.split("### Evaluation"))
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert cells["loss"] == [f"{last['loss']:.5g}"] and evaluation["loss"] == [f"{evaluated['eval_loss']:.5g}"]
    assert cells["grad_norm"] == [f"{last['grad_norm']:.5g}"] and "grad_norm" not in evaluation


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are drawn, as they are not in other tests: see conftest.py."""
    monkeypatch.setattr(run_page, "draw_page", draw_page)


def kto(tmp_path: Path, **more: Any) -> KTOTrainer:
    values = {"max_length": 64, "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1}
    args = KTOConfig(str(tmp_path / "out"), disable_tqdm=True, save_strategy="no", **{**values, **more})
    return KTOTrainer(model=make_model(tmp_path / "model"), args=args, train_dataset=unpaired_rows(8))


def fail() -> None:
    """End the run with an error."""
    raise RuntimeError("<b>the disk is gone</b>")


@pytest.mark.usefixtures("drawn", "own_process_group")
@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (fail, RuntimeError, ["failed</span>", "&lt;b&gt;the disk is gone&lt;/b&gt;", "1 of 4", ">Loss<"]),
        (
            lambda: os.kill(os.getpid(), signal.SIGUSR1),
            RunStopped,
            ["preempted</span>", "Preempted by SIGUSR1 after step 2."],
        ),
    ],
    ids=["failed", "stopped"],
)
def test_a_run_that_ends_early_leaves_a_report(
    act: Callable[[], None], error: type[BaseException], said: list[str], tmp_path: Path
) -> None:
    trainer = kto(tmp_path)
    trainer.add_callback(Acts("on_step_end", 2, act))
    with pytest.raises(error):
        train_and_close(trainer)
    page = (tmp_path / "out" / "report.html").read_text()
    assert [part for part in said if part not in page] == []
