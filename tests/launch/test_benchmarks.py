"""Arithmetic, rows and failures of the benchmarks; the comparison itself requires TRL (slow)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from deepspeed.accelerator import get_accelerator

from alignment.config.lookup import packaged_names
from benchmarks import gpu_checks, gpu_smoke, head, ours, side_by_side, start_up
from benchmarks.comparison import Comparison, compare, differences, table, title
from benchmarks.gpu_checks import CHECKS, CheckJob
from benchmarks.gpu_checks import run as run_check
from benchmarks.gpu_row import RowJob, train
from benchmarks.head_worker import FULL, OURS, TORCH, TRL, HeadResult
from benchmarks.jobs import LORA, LORA_UNCHECKPOINTED, METHODS, PLAIN, UNCHECKPOINTED, ZERO2, Job, Setting
from benchmarks.measure import Instant, StepClock, memory_bytes, working_memory
from benchmarks.processes import Failed, run_module
from benchmarks.shapes import (
    SIDE_BY_SIDE,
    TINY,
    load_tokenizer,
    paired_rows,
    prompt_rows,
    unpaired_rows,
    write_model,
    write_reward_model,
)
from benchmarks.worker import Result

FIRST = {"loss": 0.5, "logps/chosen": -90.0, "logps/rejected": -80.0}


def result(wall: list[float], memory: int = 100, cpu: list[float] | None = None, **first: float) -> Result:
    return Result(wall, cpu or wall, memory, {**FIRST, **first})


# Arithmetic ---------------------------------------------------------------------------------------------------------


def test_a_step_lasts_from_the_end_of_the_previous_step() -> None:
    clock = StepClock()
    clock.ends = [Instant(wall, cpu) for wall, cpu in ((10, 1), (14, 2), (15, 4), (18, 7))]
    assert clock.steps(warm_up=1) == [(4, 1), (1, 2), (3, 3)]
    assert clock.steps(warm_up=3) == [(3, 3)]


def test_start_up_shows_medians_and_their_ratio() -> None:
    seconds = {"`--help`": [[0.4, 0.2, 0.3], [0.1, 0.15, 0.9]]}
    assert start_up.table(seconds, with_base=True).splitlines()[2] == "| `--help` | 0.30 | 0.15 | 0.50 |"
    assert start_up.table({"`--help`": [[0.2]]}, with_base=False).splitlines()[2] == "| `--help` | 0.20 |"
    assert start_up.cpu_seconds(os.getpid()) > 0


def test_memory_excludes_what_every_trainer_needs() -> None:
    assert working_memory(1000, 300, 10) == 1000 - 300 - 160
    assert working_memory(1000, 300, 10, frozen=20) == 1000 - 300 - 160 - 80
    assert 0 < memory_bytes("VmRSS") <= memory_bytes("VmHWM")


def test_ratios_are_of_the_same_steps() -> None:
    mine = [result([1.0, 2.0, 4.0], 30, [2.0, 2.0, 2.0]), result([1.0, 1.0, 1.0], 50, [2.0, 2.0, 2.0])]
    theirs = [result([3.0, 4.0, 4.0], 90, [3.0, 8.0, 8.0]), result([5.0, 5.0, 1.0], 110, [2.0, 2.0, 2.0])]
    found = compare("cpo", PLAIN, mine, theirs)
    assert (found.ours, found.theirs) == (1.0, 4.0)
    assert found.speed == 2.5  # the median of 3, 2, 1, 5, 5, 1; the ratio of the medians would be 4
    assert found.cpu == 1.25
    assert (found.our_memory, found.their_memory) == (40, 100)


@pytest.mark.parametrize(
    ("method", "setting", "speed", "memory", "missed"),
    [
        ("cpo", PLAIN, 1.5, 33, []),
        ("cpo", PLAIN, 1.49, 33, ["speed"]),
        ("cpo", PLAIN, 1.5, 34, ["memory"]),
        ("kto", PLAIN, 1.2, 99, []),
        ("kto", PLAIN, 1.19, 101, ["speed", "memory"]),
        ("online_dpo", PLAIN, 1.9, 51, ["speed", "memory"]),
        ("online_dpo", UNCHECKPOINTED, 1.2, 50, []),
        ("kto", LORA, 2.2, 15, []),
        ("kto", LORA_UNCHECKPOINTED, 2.1, 16, ["speed", "memory"]),
        ("cpo", LORA, 1.6, 25, ["speed"]),
        ("online_dpo", LORA, 4.9, 35, ["speed"]),
        ("dpo", LORA, 0.5, 200, []),
    ],
)
def test_requirements(method: str, setting: Setting, speed: float, memory: float, missed: list[str]) -> None:
    found = Comparison(method, setting, 1.0, speed, speed, speed, memory, 100)
    assert [sentence.partition(" is ")[0].partition(": ")[2] for sentence in found.missed()] == missed
    assert ("not met" in table([found])) == bool(missed)
    assert setting != PLAIN or method == "online_dpo" or replace(found, setting=ZERO2).missed() == []


def test_different_tokens_are_detected() -> None:
    assert differences("kto", result([1.0]), result([1.0], **{"logps/chosen": -90.001})) == []
    assert differences("kto", result([1.0]), result([1.0], **{"logps/chosen": -91.0})) == ["logps/chosen -90 and -91"]


# Rows ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmarks") / "model"
    write_model(folder, TINY)
    return str(folder)


def test_text_determines_token_ids(model: str) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer(" w0 w7 w509")["input_ids"] == [2, 9, 511]
    assert len(tokenizer) == TINY.vocab
    for row in paired_rows(TINY, 20):
        prompt, chosen = tokenizer(row["prompt"])["input_ids"], tokenizer(row["chosen"])["input_ids"]
        assert tokenizer(row["prompt"] + row["chosen"])["input_ids"] == prompt + chosen


def test_lengths_are_those_of_the_shape() -> None:
    def tokens(*texts: str) -> int:
        return sum(len(text.split()) for text in texts) + 1

    pairs, single = paired_rows(SIDE_BY_SIDE, 200), unpaired_rows(SIDE_BY_SIDE, 200)
    lengths = [tokens(row["prompt"], row[key]) for row in pairs for key in ("chosen", "rejected")]
    lengths += [tokens(row["prompt"], row["completion"]) for row in single]
    assert min(lengths) in range(64, 80) and max(lengths) in range(496, 513)
    prompts = [len(row["prompt"].split()) for row in prompt_rows(SIDE_BY_SIDE, 200)]
    assert min(prompts) in range(64, 80) and max(prompts) in range(432, 449)
    assert all(row["prompt"] and row["completion"] for row in single)
    assert sum(row["label"] for row in single) == 100
    assert pairs == paired_rows(SIDE_BY_SIDE, 200)
    fixed = replace(SIDE_BY_SIDE, least=64, most=64)
    assert {tokens(row["prompt"], row[key]) for row in paired_rows(fixed, 9) for key in ("chosen", "rejected")} == {64}
    assert {tokens(row["prompt"], row["completion"]) for row in unpaired_rows(fixed, 9)} == {64}


@pytest.mark.parametrize("method", list(METHODS))
def test_the_order_for_trl_is_the_order_of_our_steps(method: str, model: str, tmp_path: Path) -> None:
    batch = METHODS[method].batch
    rows = METHODS[method].rows(TINY, 3 * batch, 0)
    job = Job("ours", method, model, "", str(tmp_path / "output"), steps=3, warm_up=1)
    if method == "online_dpo":
        write_reward_model(tmp_path / "reward", TINY)
        job = replace(job, reward_model=str(tmp_path / "reward"))
    trainer = ours.build(job, Dataset.from_list(rows))
    order = ours.order(trainer, 3)
    assert sorted(order) == list(range(3 * batch)) and order != list(range(3 * batch))
    assert trainer.data.sampler is not None and trainer.data.train is not None
    second = trainer.data.sampler.plan(0, 1).micro_batches[0][0].rows
    pair = ("chosen", -1)
    column, end = {"cpo": pair, "dpo": pair, "kto": ("completion", -1), "online_dpo": ("prompt", None)}[method]
    texts = [rows[number][column] for number in order[batch : 2 * batch]]
    ids = [list(trainer.data.train.dataset[row][f"{column}_ids"])[:end] for row in second]
    assert load_tokenizer(model)(texts)["input_ids"] == ids


# Processes ----------------------------------------------------------------------------------------------------------


def test_a_process_returns_json(tmp_path: Path) -> None:
    assert run_module("json.tool", tmp_path / "one", {"rows": [1, 2]}, {}) == {"rows": [1, 2]}


def test_a_failing_process_reports_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="No module named benchmarks.missing"):
        run_module("benchmarks.missing", tmp_path / "one", {}, {})


def test_without_trl_one_line_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert side_by_side.main([]) == 2
    assert capsys.readouterr().err == 'TRL is not installed: pip install ".[bench]"\n'


# The head -----------------------------------------------------------------------------------------------------------


def test_ratios_of_the_head_are_of_the_same_turn() -> None:
    mine = [HeadResult(0.1, 0.1, 2.0, 2**20, -5.0), HeadResult(0.2, 0.2, 1.0, 2**21, -5.0)]
    full = [HeadResult(0.2, 0.4, 4.0, 2**23, -5.0), HeadResult(0.3, 0.3, 3.0, 2**22, -5.0)]
    mine, full = [*mine, HeadResult(0.3, 0.3, 1.0, 0, -5.0)], [*full, HeadResult(0.2, 1.0, 8.0, 0, -5.0)]
    found = {OURS: mine, FULL: full}
    assert head.table(found).splitlines()[2:] == [
        "| ours | 200.0 ms | 200.0 ms | 400.0 ms | 1.00 | 1.00 | 2 MiB |",
        "| full logits | 200.0 ms | 400.0 ms | 600.0 ms | 2.00 | 3.00 | 8 MiB |",
    ]
    assert head.disagreements(found) == []
    found[TORCH] = [HeadResult(0.1, 0.1, 1.0, 1, -5.01)]
    assert head.disagreements(found) == [f"{TORCH}: the log-probs sum to -5.01, those of full logits to -5"]


@pytest.mark.slow
def test_the_head_compared_with_others(capsys: pytest.CaptureFixture[str]) -> None:
    """All installed implementations compute the same log-probs."""
    sizes = ["--tokens", "64", "--width", "16", "--vocabulary", "700", "--repeats", "1", "--rounds", "1"]
    assert head.main(["--cpu", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| torch's operations, bfloat16 | 8.5 | 5.5 |" in lines
    ways = [line.split(" | ")[0][2:] for line in lines if line.endswith(" MiB |")]
    assert ways == head.chosen_ways(on_gpu=False) and {OURS, FULL} <= set(ways)


def test_without_trl_its_head_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert TRL not in head.chosen_ways(on_gpu=True) and head.chosen_ways(on_gpu=True)[0] == OURS


# The GPU table ------------------------------------------------------------------------------------------------------


def rows_of(*arguments: str) -> list[RowJob]:
    return gpu_smoke.plan(gpu_smoke._parse(["--cpu", "--tiny", *arguments]), Path("folder"))


def test_every_file_in_ds_configs_is_run_with_both_methods() -> None:
    jobs = rows_of()
    files = set(packaged_names("ds_configs"))
    for method in ("kto", "cpo"):
        assert {job.policy for job in jobs if job.method == method} == {n for n in files if not n.startswith("ref_")}
    assert {f"ref_{job.reference}" for job in jobs if job.method == "kto"} == {
        n for n in files if n.startswith("ref_")
    }
    assert {job.policy for job in jobs if job.method == "online_dpo"} == {"zero2", "zero3_offload"}
    assert len({job.name for job in jobs}) == len(jobs) == len({job.output for job in jobs})
    assert [job.name for job in rows_of("--rows", "kto/zero3", "cpo/zero0")] == [
        *("kto/zero3/offload", "kto/zero3_offload/offload"),
        "cpo/zero0",
    ]


@pytest.mark.parametrize("name", ["kto/zero3_offload/offload", "cpo/zero2", "online_dpo/zero3_offload/offload"])
def test_a_row_trains_and_is_measured(name: str, model: str, tmp_path: Path) -> None:
    job = next(job for job in rows_of("--steps", "3") if job.name == name)
    measured = train(replace(job, model=model, output=str(tmp_path / "output"), shape=asdict(TINY)))
    assert measured.step > 0 and measured.host > 100e6
    if job.method == "online_dpo":
        return
    rows: list[dict[str, Any]] = METHODS[job.method].rows(TINY, 12, 0)
    longest = sum(len(" ".join(map(str, row.values())).split()) + 2 for row in rows)
    assert 0 < measured.tokens_per_second < 2 * longest / measured.step


def test_a_failing_row_is_shown_and_the_rest_continue(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_smoke.main(["--cpu", "--tiny", "--rows", "cpo/zero0", "cpo/zero3_offload", "--seconds", "0.2"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert [line.split(" | ")[1] for line in lines] == ["zero0", "zero3_offload"]
    assert all("timed out after" in line for line in lines)


def checks_of(*arguments: str) -> list[str]:
    options = gpu_smoke._parse(list(arguments))
    return [job.name for job in gpu_smoke.planned_checks(options, Path("model"))]


def test_checks_run_first_unless_rows_are_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert checks_of() == list(CHECKS)
    assert checks_of("--rows", "kto") == []
    assert checks_of("--checks", "fp16", "cap") == ["memory cap", "fp16"]
    assert checks_of("--cpu") == [name for name, check in CHECKS.items() if not check.cuda]
    assert gpu_smoke.main(["--cpu", "--tiny", "--checks", "nothing"]) == 2
    assert "no check matches" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if not check.cuda])
def test_checks_pass(name: str, model: str) -> None:
    assert re.search(r"\d", run_check(CheckJob(name, model, cpu=True)))


def test_the_head_is_also_checked_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; a run on a GPU uses them."""
    fused = pytest.importorskip("alignment.models.tiles.fused", exc_type=ImportError)
    measure = fused.measure
    monkeypatch.setattr(fused, "measure", lambda *arguments: measure(*arguments)._replace(logps=torch.zeros(())))
    with pytest.raises(RuntimeError, match="^triton: log-probs differ by "):
        gpu_checks.head(torch.device("cpu"), "")


def test_a_failing_check_is_shown_with_its_reason(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_checks, "_off", lambda *_: 0.5)
    with pytest.raises(RuntimeError, match="0.5 below the likeliest on average"):
        run_check(CheckJob("continuous batching, sdpa", model, cpu=True))
    job = CheckJob("head", model, cpu=True)
    line, ok = gpu_smoke._check(job, tmp_path / "place", seconds=0.2)
    assert not ok and line.startswith("| head | failed: timed out after")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fake results of torch's GPU memory functions by name; a list is returned one item at a time."""
    said: dict[str, Any] = {}

    def saying(name: str) -> Any:
        return lambda *_: said[name].pop(0) if isinstance(said.get(name), list) else said.get(name)

    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    ):
        monkeypatch.setattr(torch.cuda, name, saying(name))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: said["segments"])
    monkeypatch.setattr(gpu_checks, "free_bytes", lambda where: 1000)
    monkeypatch.setattr(gpu_checks, "total_bytes", lambda where: 6000)
    monkeypatch.setattr(gpu_checks, "bytes_to_come", lambda engine, where: 2**30)
    monkeypatch.setattr(
        type(get_accelerator()), "is_fp16_supported", lambda self: True
    )  # patching an instance would leave a trace
    return said


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason"),
    [
        (
            "growing segments",
            {"segments": [{"is_expandable": True}]},
            {"segments": [{}]},
            "1 of 1 segments are not expandable",
        ),
        (
            "states to come",
            {"memory_allocated": [7, 5, 5 + 2**30]},
            {"memory_allocated": [7, 5, 5]},
            "0 bytes were allocated, expected 1073741824",
        ),
        (
            "live model under ZeRO-3",
            {"memory_allocated": 5, "max_memory_allocated": 1000},
            {"memory_allocated": 5, "max_memory_allocated": 2**30},
            "bytes, but the largest parameter has",
        ),
    ],
)
def test_checks_of_memory(
    name: str, good: dict[str, Any], bad: dict[str, Any], reason: str, model: str, counted: dict[str, Any]
) -> None:
    counted.update(good)
    assert re.search(r"\d", run_check(CheckJob(name, model, cpu=True)))
    counted.update(bad)
    with pytest.raises(RuntimeError, match=reason):
        run_check(CheckJob(name, model, cpu=True))


@pytest.mark.parametrize(("sizes", "reason"), [([5, 2**27 + 4101, 5], ""), ([5, 2**28, 5], "268435451 bytes were")])
def test_the_check_of_page_locked_memory(
    sizes: list[int], reason: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(sizes)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": next(answers)})
    monkeypatch.setattr(torch, "empty", lambda size, **_: size)
    with pytest.raises(RuntimeError, match=reason) if reason else contextlib.nullcontext():
        assert "0 kept" in run_check(CheckJob("page-locked memory", model, cpu=True))


def test_the_check_of_a_cap(model: str, counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="more than 0.0 GB could be allocated under the cap"):
        run_check(CheckJob("memory cap", model, cpu=True))
    make = torch.empty

    def limited(size: int, **more: Any) -> torch.Tensor:
        if size == 100:
            raise torch.OutOfMemoryError("none left")
        return make(size, **more)

    monkeypatch.setattr(torch, "empty", limited)
    assert "could be allocated" in run_check(CheckJob("memory cap", model, cpu=True))


@pytest.mark.ci
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("norms", "reason"), [([2.0, 2.0, 2.0], ""), ([2e-5, 2.0, 2.0], "stage 0: gradient norm 2e-05")]
)
def test_the_check_of_fp16(norms: list[float], reason: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([2.01, *(one for norm in norms for one in (float("inf"), norm))])
    monkeypatch.setattr(gpu_checks, "_step", lambda policy: next(answers))
    if reason:
        with pytest.raises(RuntimeError, match=reason):
            run_check(CheckJob("fp16", model, cpu=True))
    else:
        assert run_check(CheckJob("fp16", model, cpu=True)).count("stage") == 3


def test_without_a_gpu_one_line_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_smoke.main([]) == 2
    assert capsys.readouterr().err.startswith("torch finds no CUDA GPU")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("method", list(METHODS))
def test_both_sides_compute_the_same_first_step(method: str, lora: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", reason='TRL is not installed: pip install ".[bench]"')
    options = ["--method", method, "--repeats", "1", "--steps", "2", "--warm_up", "1", "--threads", "1"]
    shape = replace(TINY, vocab=8192)  # a large vocabulary, so that few sampled completions end early
    assert side_by_side.main([*options, "--lora" if lora else "--zero2"], shape) in (0, 1)
    out = capsys.readouterr().out
    assert out.count(f"| {title(method)} |") == 2
    assert all((f"| {setting.title} |" in out) == (setting.lora == lora) for setting in METHODS[method].floors)
