"""Boundary rows of what is shown about a run: its status in text, its report, and values in messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from run_folders import at, entry, start, write_checkpoint, write_log, write_status
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from alignment import CPOConfig
from alignment.checkpoint.best import check_best_metric
from alignment.cli.report import _write
from alignment.cli.status_text import status_line, status_lines
from alignment.config.deepspeed_keys import check_keys
from alignment.config.errors import OptionError, OutputError, setting
from alignment.engines.inspecting.checkpoints import CheckpointView
from alignment.engines.inspecting.generated import completion_groups
from alignment.engines.inspecting.life import clocks
from alignment.engines.inspecting.report import _time, read_content
from alignment.engines.inspecting.run import RunReader
from alignment.engines.inspecting.view import RunView
from alignment.reporting.log_reading import LogReader, number, seconds_of
from alignment.reporting.metrics import REWARDS
from alignment.reporting.report import RunReport, duration
from alignment.reporting.status_file import STATUS
from alignment.run.failures import describe
from alignment.training.callbacks import Events

# Status in text ------------------------------------------------------------------------------------------------------


def row(name: str, **values: Any) -> str:
    """The row of a run's status with this name, without its name; empty if there is none."""
    lines = status_lines(RunView("out", **{"state": "running", "alive": True, **values}))
    return next((line.split(maxsplit=1)[1] for line in lines if line.strip().startswith(f"{name} ")), "")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"step": None}, ""),
        ({"step": 0, "total_steps": None}, "0"),
        ({"step": 0, "total_steps": 8}, "0 of 8 (0%)"),
        ({"step": 8, "total_steps": 8, "eta_seconds": 0}, "8 of 8 (100%), about 0.0 s left"),
        ({"step": 1, "total_steps": 8, "eta_seconds": 3569}, "1 of 8 (12%), about 59 min 29 s left"),
        ({"step": 1, "total_steps": 8, "eta_seconds": 3571}, "1 of 8 (12%), about 1 h 00 min left"),
        ({"step": 1, "total_steps": 8, "eta_seconds": 47 * 3600 + 3500}, "1 of 8 (12%), about 47 h 58 min left"),
        ({"step": 1, "total_steps": 8, "eta_seconds": 48 * 3600}, "1 of 8 (12%), about 2 d 0 h left"),
    ],
)
def test_steps_and_the_time_left(values: dict[str, Any], shown: str) -> None:
    assert row("step", **values) == shown


@pytest.mark.parametrize(
    ("steps", "tokens", "shown"),
    [
        (None, None, ""),
        (0.1, None, "0.1 steps/s"),
        (0.0999, None, "10 s per step"),
        (None, 1234.5, "1,234 tokens/s"),
        (2.0, 50.0, "2 steps/s, 50 tokens/s"),
    ],
)
def test_speeds(steps: float | None, tokens: float | None, shown: str) -> None:
    assert row("speed", steps_per_second=steps, tokens_per_second=tokens) == shown


def test_important_metrics_come_first_and_ten_are_shown() -> None:
    metrics = {f"m{n}": n for n in range(8)} | {"count/chosen": 3, "a_sum": 3, "kl": 0.25, "loss": 0.5}
    assert row("metrics", metrics=metrics, metrics_step=0) == (
        "step 0: loss 0.5, kl 0.25, m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6, m7 7"
    )
    assert row("metrics", metrics=metrics | {"m8": 8}).endswith("m7 7 and 1 more")
    assert row("metrics", metrics={"loss": float("nan"), "count/chosen": 3}) == ""
    assert status_line(RunView("out", "running", alive=True, metrics=metrics)) == "running; loss 0.5, kl 0.25"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"attempt": None}, ""),
        ({"attempt": 1, "stalled": 1, "restarts": 0}, "1"),
        ({"attempt": 3, "stalled": 2}, "3, 2 in a row without a newer checkpoint"),
        ({"attempt": 2, "restarts": 1, "resumes": [{"step": 4}, {}, {"step": 0}]},
         "2, requeued 1 time; resumed after step 4, 0"),
    ],
)  # fmt: skip
def test_attempts(values: dict[str, Any], shown: str) -> None:
    assert row("attempt", **values) == shown


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"state": "finished", "alive": False}, "finished"),
        ({"holder": "me", "phase": "train"}, "running: me, phase train"),
        ({"host": "n1", "pid": 7}, "running: process 7 on n1"),
        ({"pid": 7}, "running"),
        ({"alive": None}, "running (no heartbeat seen yet)"),
        ({"state": "starting", "phase": "train"}, "starting"),
        ({"state": "stopped", "signal": "SIGINT", "alive": False}, "stopped by SIGINT"),
        ({"state": "failed", "error": "no", "holder": "me"}, "failed: no; me has taken over"),
        ({"state": "failed", "error": "no"}, "failed: no"),
        ({"state": "lost", "last_heartbeat": "2026-01-02T03:04:05Z", "reason": "gone", "phase": "save"},
         "no heartbeat since 2026-01-02 03:04:05 UTC: gone in phase save"),
    ],
)  # fmt: skip
def test_states(values: dict[str, Any], shown: str) -> None:
    assert row("state", **values) == shown


def test_eight_checkpoints_are_listed() -> None:
    hundredth = 2**30 // 100
    views = [CheckpointView(f"checkpoint-{n}", n, None, hundredth + 1, n % 2 == 0) for n in (8, 7, 6, 5, 4, 3, 2)]
    views.append(CheckpointView("checkpoint-10", 1, None, hundredth, True))
    lines = status_lines(RunView("out", "running", checkpoints=views, partial=["p"]))
    at_first = next(number for number, line in enumerate(lines) if line.startswith("  checkpoints"))
    assert lines[at_first] == "  checkpoints checkpoint-8   complete, 0.01 GiB"
    assert lines[at_first + 1] == "              checkpoint-7   complete, 0.01 GiB, weights only"
    assert lines[at_first + 7] == "              checkpoint-10  complete, 10.7 MB" and "older" not in "".join(lines)
    assert lines[at_first + 8] == "              p  being written"
    broken = CheckpointView("checkpoint-0", 0, "torn")
    ended = "\n".join(status_lines(RunView("out", "stopped", checkpoints=[*views, broken], partial=["p"])))
    assert "and 1 older, 1 of them incomplete\n" in ended and "p  incomplete: the run ended while" in ended
    assert "incomplete: torn" in row("checkpoints", checkpoints=[broken])


def test_phases_by_time() -> None:
    phases = {"save": {"seconds": 1.0}, "train": {"seconds": 3.0}}
    lines = status_lines(RunView("out", "finished", phases=phases, phases_of="the whole run"))
    assert [line.split(maxsplit=1)[-1] for line in lines[-3:]] == [
        "train: 3.0 s (75%)", "1.0 s (25%)", "whole run)",
    ]  # fmt: skip
    assert row("phases", phases={"save": {"seconds": 0.0}}, phases_of="x") == "save: 0.0 s (0%)"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (59.4, "59.4 s"), (59.6, "1 min 00 s"), (3599.4, "59 min 59 s"), (3600, "1 h 00 min 00 s")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# The state of a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stamp", "now", "noted"),
    [
        (0, 0, 0, ""), (29.5, 0, 0, ""), (30, 0, 0, "30 s ahead of that of the file system"),
        (-29.5, 0, 0, ""), (-30, 0, 0, "30 s behind that of the file system"),
        (30, 30, 0.5, ""), (30, 30, 0, "30 s ahead of this machine's"), (0, 0, 99, ""),
    ],
)  # fmt: skip
def test_clocks_that_differ_by_half_a_minute(
    said: float, stamp: float, now: float, noted: str, tmp_path: Path
) -> None:
    status = write_status(tmp_path, time=at(said))
    begin = seconds_of(at(0))
    assert begin is not None
    os.utime(tmp_path / STATUS, (begin + stamp, begin + stamp))
    found = clocks(tmp_path, status, lambda: begin + now)
    assert found is None if not noted else found is not None and found.endswith(noted)


@pytest.mark.parametrize("count", [1, 5, 6])
def test_five_runs_in_a_folder_are_named(count: int, tmp_path: Path) -> None:
    for number_of_run in range(count):
        write_log(tmp_path / f"run{number_of_run}", [start()])
    with pytest.raises(OutputError) as caught:
        RunReader(tmp_path)
    assert [f"run{n}" in str(caught.value) for n in range(6)] == [n < min(count, 5) for n in range(6)]
    assert str(caught.value).endswith(" and 1 more") == (count == 6)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(("longest", "phases"), [(0, {"train": 0.4}), (-1, {})])
def test_phases_of_a_run_in_progress_are_those_of_its_newest_checkpoint(
    longest: int, phases: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, [start(), {"event": "resume", "attempt": 2, "world_size": 4, "run": "s", "step": 4}])
    state = write_checkpoint(tmp_path, 4) / "run_state-00000.json"
    monkeypatch.setattr("alignment.engines.inspecting.run._LARGEST_STATE", state.stat().st_size + longest)
    found = RunReader(tmp_path).read()
    assert {name: one["seconds"] for name, one in found.phases.items()} == phases
    assert (found.phases_of, found.attempt, found.world_size, found.run) == ("up to checkpoint-4", 2, 4, "s")
    assert [(one.name, one.resumable, one.total_steps, one.run) for one in found.checkpoints] == [
        ("checkpoint-4", True, 100, "r")
    ]


def test_rates_at_equal_times_and_counts(tmp_path: Path) -> None:
    for records, rates in (
        ([start(), entry(1, 2, 10), entry(3, 2, 30)], (None, None)),
        ([start(), entry(1, 2, 10), entry(1, 4, 10)], (None, None)),
        ([start(), entry(1, 2, 10), entry(3, 4, 10)], (1.0, None)),
        ([start(), entry(1, 2, 10), entry(3, 4, 30)], (1.0, 10.0)),
        ([start(), entry(4, 2, 30)], (2.0, 15.0)),
    ):
        write_log(tmp_path, records)
        reader = LogReader(tmp_path / "log.jsonl")
        reader.read()
        assert reader.rates() == rates


@pytest.mark.parametrize(
    ("value", "known"), [(1, 1.0), (0, 0.0), (True, None), (float("inf"), None), (10**400, None), ("1", None)]
)
def test_numbers_in_a_log(value: Any, known: float | None) -> None:
    assert number(value) == known


# The report ----------------------------------------------------------------------------------------------------------


def completions(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "completions.jsonl").write_text("\n".join(map(json.dumps, rows)))  # the last line may be incomplete
    return folder / "completions.jsonl"


def test_completions_are_paired_by_prompt_and_dataset(tmp_path: Path) -> None:
    """The same prompt may be in two evaluation sets."""
    rows = [
        {"step": step, "dataset": name, "prompt": "p", "policy": f"{name} {step}", "score": 0.5}
        for step in (1, 2)
        for name in ("eval", "eval_x")
    ]
    first, second = completion_groups(completions(tmp_path, *rows, {"step": True}, {"prompt": "p"}))
    assert (first.title, second.title) == ("Before and after: steps 1 and 2", "Before and after: steps 1 and 2, x")
    assert [dict(one.texts) for group in (first, second) for one in group.rows] == [
        {"policy, step 1": f"{name} 1", "policy, step 2": f"{name} 2"} for name in ("eval", "eval_x")
    ]
    assert (first.rows[0].prompt, first.rows[0].scores) == ("p", {"score": 0.5})


@pytest.mark.parametrize(("prompts", "length"), [(6, 1500), (7, 1501)])
def test_six_completions_of_1500_characters_are_shown(prompts: int, length: int, tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": str(n), "policy": "x" * length} for n in range(prompts)]
    (group,) = completion_groups(completions(tmp_path, *rows))
    assert (len(group.rows), group.total) == (6, prompts)
    assert group.rows[0].texts["policy"] == "x" * 1500 + (" …" if length > 1500 else "")


def test_rows_in_the_middle_of_a_large_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": n, "prompt": str(n), "policy": "x"} for n in range(9)]
    path = completions(tmp_path, *rows)
    line = len(json.dumps(rows[0])) + 1
    for chunk in (9 * line, 9 * line - 1, 2 * line + 5):
        monkeypatch.setattr("alignment.engines.inspecting.generated._CHUNK", chunk)
        assert [(group.title, group.total) for group in completion_groups(path)] == [("Step 0", 1), ("Step 8", 1)]


@pytest.mark.parametrize(
    ("steps", "said"),
    [([], ""), ([1, 1], " (step 1)"), (range(8), " (step 0, 1, 2, 3, 4, 5, 6, 7)"),
     (range(9), " (step 0, 1, 2, 3, 4, 5, 6, 7 …)")],
)  # fmt: skip
def test_eight_steps_of_a_warning_are_named(steps: Any, said: str, tmp_path: Path) -> None:
    events = [{"event": "retry", "step": step} for step in steps] or [{"event": "retry"}]
    write_log(tmp_path, [start(), *events])
    (warning,) = [text for text in read_content(tmp_path).warnings if "retries" in text.lower()]
    assert warning == f"Retries of reads or reward calls: {len(events)}{said}. See log.jsonl."


@pytest.mark.parametrize("length", [300, 301])
def test_long_values_of_options_are_shortened(length: int, tmp_path: Path) -> None:
    write_log(tmp_path, [start()])
    (tmp_path / "options.json").write_text(json.dumps({"method": "kto", "dataset_name": "d" * length, "seed": 42}))
    (option,) = read_content(tmp_path).options
    assert (option.name, option.default) == ("dataset_name", "unset")
    assert option.value == ("d" * 300 if length == 300 else "d" * 299 + "…")


def test_the_best_checkpoint_is_marked_if_a_metric_chose_it(tmp_path: Path) -> None:
    write_log(tmp_path, [start(), entry(4, 2, 30)])
    newest = write_checkpoint(tmp_path, 4)
    (newest / "trainer_state.json").write_text('{"best_global_step": 4}')
    for options, best in (({}, []), ({"metric_for_best_model": "loss"}, [(4, "best checkpoint")])):
        (tmp_path / "options.json").write_text(json.dumps(options))
        content = read_content(tmp_path)
        assert content.marks == best and [one.best for one in content.checkpoints] == [bool(best)]
    (tmp_path / "trainer_state.json").write_text('{"best_global_step": 2}')
    assert read_content(tmp_path).marks == [(2, "best checkpoint")], "that of the whole run"


def test_a_page_is_written_into_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    for _ in range(2):
        _write(tmp_path / "a" / "b" / "page.html", "text")
    assert (tmp_path / "a" / "b" / "page.html").read_text() == "text"


def test_a_report_of_phases_without_time_or_tokens() -> None:
    phases = {
        "train": {"seconds": 3.0, "tokens": 600.0, "peak_bytes": 2.0**29, "entries": 2.0},
        "save": {"seconds": 1.0, "tokens": 0.0, "peak_bytes": 0.0, "entries": 1.0},
    }
    text = RunReport("A run", [("steps", "2")], phases, "memory", {"loss": 0.5, "a_sum": 1.0}, {"loss": 0.25}).text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert cells[2:4] == [["train", "2", "3.00", "75%", "200", "0.50 GiB"], ["save", "1", "1.00", "25%", "", ""]]
    assert cells[4:5] + cells[6:] == [["metric", "training", "evaluation"], ["loss", "0.5", "0.25"]]
    none = {"save": {"seconds": 0.0, "tokens": 3.0, "peak_bytes": 0.0, "entries": 1.0}}
    assert "|    0.00 |    0% |          |" in RunReport("A run", [], none, "memory", {}, {}).text()


# Messages ------------------------------------------------------------------------------------------------------------


def test_names_and_values_in_messages_have_a_maximum_length() -> None:
    assert setting("n" * 100, "v" * 98) == f"{'n' * 100}='{'v' * 98}'"
    assert setting("n" * 101, "v" * 99) == f"{'n' * 97}…='{'v' * 96}…"
    for length, shown in ((78, f"'{'v' * 78}'"), (79, f"'{'v' * 76}…")):
        with pytest.raises(OptionError) as caught:
            check_keys({"no_such_key": "v" * length}, "x.json")
        assert str(caught.value).startswith(f"x.json: no_such_key={shown}: DeepSpeed has no such key")
    for length, shown in ((300, "x" * 300), (301, "x" * 299 + "…")):
        assert describe(ValueError("x" * length))[0].startswith(f"ValueError: {shown} (this is a bug")


@pytest.mark.parametrize(
    ("metric", "sets", "known"),
    [
        (None, [""], True), ("loss", [""], True), ("eval_loss", [""], True), ("loss_eval_", [""], False),
        ("rewards/margins", [""], True), ("eval_rewards/margins", [""], True), ("accuracy", [""], False),
        ("loss", ["a"], False), ("a_loss", ["a", "b"], True), ("eval_b_rewards/chosen", ["a", "b"], True),
    ],
)  # fmt: skip
def test_metrics_that_can_choose_the_best_model(metric: str | None, sets: list[str], known: bool) -> None:
    args = CPOConfig("out", metric_for_best_model=metric, eval_strategy="epoch")
    if known:
        check_best_metric(args, REWARDS, sets)
        return
    with pytest.raises(OptionError, match="^metric_for_best_model="):
        check_best_metric(args, REWARDS, sets)


# Callbacks -----------------------------------------------------------------------------------------------------------


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


class Naming(Counting):
    """One of another class."""


def test_states_of_several_callbacks_of_one_class() -> None:
    args = CPOConfig("out")
    saved = Events(args, TrainerState(), [Counting(3), Naming(7), Counting(5)], None)
    saved.state.global_step, saved.control.should_save = 4, True
    state = json.loads(json.dumps(saved.state_dict()))
    assert "is_world_process_zero" not in state
    again = Events(args, TrainerState(), [Counting(0), Counting(0), Naming(0), Counting(1)], None)
    again.load_state_dict(state)
    assert [one.count for one in again.handler.callbacks if isinstance(one, Counting)] == [3, 5, 7, 1]
    assert again.state.global_step == 4 and again.control.should_save


@pytest.mark.parametrize(
    ("stamp", "shown"),
    [("2026-03-01T12:34:56+00:00", "2026-03-01 12:34 UTC"), ("2026-03-01T12:34", "2026-03-01 12:34 UTC"),
     ("2026-03-01T12:3", ""), (None, ""), (17, "")],
)  # fmt: skip
def test_the_start_of_a_run_is_shown_to_the_minute(stamp: Any, shown: str) -> None:
    assert _time(stamp) == shown
