"""The table of completions: its file, its text, and its form in Weights & Biases and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback, WandbCallback

from alignment import KTOConfig
from alignment.data.kinds.prompts import PromptRow
from alignment.online.completion_log import CompletionLog
from alignment.online.completions import Generated
from alignment.online.ranking import Ranking
from alignment.reporting.log import CompletionTable, as_text
from alignment.rollout.backend import Completion

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
TEXT = "system: Be brief.\nuser: Hi\nthere"
ROWS: list[dict[str, Any]] = [
    {"prompt": ASKED, "chosen": [{"role": "assistant", "content": "é|*x*"}], "score": None, "dropped": "tied"},
    {"prompt": "p", "chosen": "<b>_c_", "score": 0.125, "dropped": None},
]


def test_the_file_has_one_line_per_row(tmp_path: Path) -> None:
    path = tmp_path / "out" / "completions.jsonl"
    table = CompletionTable(path)
    table.write_table(3, ROWS)
    table.write_table(4, [{"prompt": "p", "chosen": "c", "score": float("inf"), "dropped": None}])
    table.write_table(5, [])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 3, "prompt": TEXT, "chosen": "é|*x*", "score": None, "dropped": "tied"},
        {"step": 3, "prompt": "p", "chosen": "<b>_c_", "score": 0.125, "dropped": None},
        {"step": 4, "prompt": "p", "chosen": "c", "score": None, "dropped": None},
    ]


def test_tables_are_written_every_n_logs(tmp_path: Path) -> None:
    """With the first prompts of the newest window; not at other logs, nor without pairs."""
    source = PromptRow(0, "p", {}, {})
    made = tuple(Completion((number,), True) for number in range(3))
    group, ranking = Generated(0, source, "row 1", (0,), made, ("a", "b", "c")), Ranking((2, 0), (0.5, None, 1.5))
    for every, steps in ((1, [2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (0, [])):
        path = tmp_path / f"{every}.jsonl"
        log = CompletionLog(CompletionTable(path), every, prompts=2)
        log.write(1)
        for step in range(2, 6):
            log.keep([group] * 3, [ranking, Ranking("tied", (1.0, 1.0, 1.0)), ranking])
            log.write(step)
        log.write(6)  # an omitted window has no completions
        lines = [json.loads(line) for line in path.read_text().splitlines()] if steps else []
        assert [line["step"] for line in lines] == [step for step in steps for _ in range(2)]
        for pair, dropped in zip(lines[::2], lines[1::2], strict=True):
            assert (pair["chosen"], pair["rejected"], pair["dropped"]) == ("c", "a", None)
            assert (pair["chosen_score"], pair["rejected_score"]) == (1.5, 0.5)
            assert (dropped["chosen"], dropped["rejected"], dropped["dropped"]) == ("a", "b", "tied")


def test_messages_as_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert as_text([call]) == "assistant: {'function': {'name': 'f'}}" and as_text(0.5) == 0.5


def test_tensorboard_gets_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = KTOConfig(output_dir=str(tmp_path))
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    callbacks: list[Any] = []
    table = CompletionTable(tmp_path / "completions.jsonl", callbacks)
    callbacks.append(TensorBoardCallback())  # callbacks added later are used
    table.write_table(1, ROWS)  # no writer yet
    callbacks[0].on_train_begin(args, state, control)
    table.write_table(2, ROWS[:1])
    table.write_table(4, ROWS)
    callbacks[0].on_train_end(args, state, control)
    (file,) = (tmp_path / "runs").rglob("events.*")
    events = EventAccumulator(str(file)).Reload().Tensors("completions/text_summary")
    assert [event.step for event in events] == [2, 4]
    (text,) = events[1].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert "    prompt: system: Be brief." in lines and all(line.startswith("    ") or not line for line in lines)


def test_wandb_gets_a_table(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    table = CompletionTable(tmp_path / "completions.jsonl", [WandbCallback()])
    assert wandb.run is None
    table.write_table(1, ROWS)  # no run: nothing to log to
    run = wandb.init(project="tests")
    table.write_table(2, ROWS)
    logged, folder = run.summary["completions"], Path(run.dir)  # an earlier run of this process may have set it
    wandb.finish()
    assert (logged["_type"], logged["nrows"], logged["ncols"]) == ("table-file", 2, 5)
    (file,) = folder.rglob("media/table/completions*.table.json")
    content = json.loads(file.read_text())
    assert content["columns"] == ["step", "prompt", "chosen", "score", "dropped"]
    assert content["data"][1] == [2, "p", "<b>_c_", 0.125, None]
    assert content["data"][0][2:] == ["é|*x*", None, "tied"]
