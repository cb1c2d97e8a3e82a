"""Arithmetic, rows and failures of the benchmarks; the comparison itself requires TRL (slow)."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from benchmarks import gpu_sides, gpu_smoke, head, ours, packing, side_by_side, sides, worker
from benchmarks.comparison import compare, title
from benchmarks.gpu_checks import CHECKS, CheckJob
from benchmarks.gpu_checks import run as run_check
from benchmarks.gpu_row import RowJob, train
from benchmarks.gpu_sides import Machine, compare_on_gpu
from benchmarks.head_worker import FULL, OURS
from benchmarks.jobs import LORA, METHODS, PLAIN, Job, Setting
from benchmarks.shapes import LAYERS, TINY, load_tokenizer, write_model, write_reward_model
from benchmarks.worker import Result

FIRST = {"loss": 0.5, "logps/chosen": -90.0, "logps/rejected": -80.0}


def result(wall: list[float], memory: int = 100, cpu: list[float] | None = None, **first: float) -> Result:
    return Result(wall, cpu or wall, memory, {**FIRST, **first})


def test_ratios_are_of_the_same_steps() -> None:
    mine = [result([1.0, 2.0, 4.0], 30, [2.0, 2.0, 2.0]), result([1.0, 1.0, 1.0], 50, [2.0, 2.0, 2.0])]
    theirs = [result([3.0, 4.0, 4.0], 90, [3.0, 8.0, 8.0]), result([5.0, 5.0, 1.0], 110, [2.0, 2.0, 2.0])]
    found = compare("cpo", PLAIN, mine, theirs)
    assert (found.ours, found.theirs) == (1.0, 4.0)
    assert found.speed == 2.5  # the median of 3, 2, 1, 5, 5, 1; the ratio of the medians would be 4
    assert found.cpu == 1.25
    assert (found.our_memory, found.their_memory) == (40, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmarks") / "model"
    write_model(folder, TINY)
    return str(folder)


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
    second = trainer.data.sampler.plan(0, 1).micro_batches[0][0].rows
    pair = ("chosen", -1)
    column, end = {"cpo": pair, "dpo": pair, "kto": ("completion", -1), "online_dpo": ("prompt", None)}[method]
    texts = [rows[number][column] for number in order[batch : 2 * batch]]
    ids = [list(trainer.data.train.dataset[row][f"{column}_ids"])[:end] for row in second]
    assert load_tokenizer(model)(texts)["input_ids"] == ids


@pytest.mark.parametrize("method", ["dpo", "online_dpo"])
def test_packed_and_padded_windows_are_measured(
    method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", "restored afterwards")
    monkeypatch.setattr(packing, "LAYERS", replace(LAYERS, vocab=512, hidden=32, inner=64, layers=2, heads=4))
    packing.main(["--method", method, "--windows", "1", "--threads", str(torch.get_num_threads())])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"| {method} | stage 0, ranks: 1 | ")
    tokens, units, *times = map(float, re.findall(r"\d+\.\d+", line))
    assert tokens > units > 1 and len(times) == 2, "the head computes as many tokens in both"


@pytest.mark.slow
def test_the_head_compared_with_others(capsys: pytest.CaptureFixture[str]) -> None:
    """All installed implementations compute the same log-probs."""
    sizes = ["--tokens", "64", "--width", "16", "--vocabulary", "700", "--repeats", "1", "--rounds", "1"]
    assert head.main(["--cpu", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| torch's operations, bfloat16 | 8.5 | 5.5 |" in lines
    ways = [line.split(" | ")[0][2:] for line in lines if line.endswith(" MiB |")]
    assert ways == head.chosen_ways(on_gpu=False) and {OURS, FULL} <= set(ways)


def rows_of(*arguments: str) -> list[RowJob]:
    return gpu_smoke.plan(gpu_smoke._parse(["--cpu", "--tiny", *arguments]), Path("folder"))


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ci if "QLoRA" in name else ())
        for name, check in CHECKS.items()
        if not check.cuda
    ],
)
def test_checks_pass(name: str, model: str) -> None:
    assert re.search(r"\d", run_check(CheckJob(name, model, cpu=True)))


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


CPU = Machine(False, "bf16", 0, "a CPU")
QLORA = Setting(lora=True, in_4bit=True)
SHORT = ["--gpu", "--tiny", "--repeats", "1", "--steps", "2", "--warm_up", "1", "--threads", "1"]


def options_of(*arguments: str) -> Any:
    return side_by_side._parse([*SHORT, *arguments])


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("cpo", PLAIN),
        pytest.param("kto", QLORA, marks=pytest.mark.ci),
        pytest.param("online_dpo", LORA, marks=pytest.mark.ci),
    ],
)
def test_our_side_of_a_row_runs(
    method: str, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker's GPU code path with the CPU as the device."""
    done: list[Any] = []
    monkeypatch.setattr(worker, "cap_memory", done.append)
    monkeypatch.setattr(worker, "grow_segments", lambda: done.append("segments"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("peak"))
    write_model(tmp_path / "model", TINY)
    job = gpu_sides._job(tmp_path, method, TINY, options_of(), replace(CPU, gpu=True, limit=7))
    job = replace(job, output=str(tmp_path / "output"), rows=str(tmp_path / "rows.jsonl"), **asdict(setting))
    sides.write_rows(Path(job.rows), METHODS[method].rows(TINY, job.steps * job.rows_of_a_step, 0))
    found = worker.measure(replace(job, output=str(tmp_path / "other")))
    assert done == ["segments", 7, "peak"]
    assert len(found.wall) == 2 and found.allocated > 0 and found.first["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["full", "lora", "qlora"])
@pytest.mark.parametrize("method", list(METHODS))
def test_both_sides_of_every_row_agree(method: str, settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", reason='TRL is not installed: pip install ".[bench]"')
    options = options_of("--method", method, "--settings", settings)
    assert compare_on_gpu(options, replace(CPU, precision="fp32")) == 0
    assert "failed" not in capsys.readouterr().out
