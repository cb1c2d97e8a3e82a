"""``benchmarks/side_by_side.py --gpu`` without a GPU: plan, options, failures, table, and runs on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_sides, measure, side_by_side, sides, worker
from benchmarks.gpu_sides import Machine, Outcome, compare_on_gpu, gpu_table, planned, this_machine
from benchmarks.jobs import LORA, METHODS, PLAIN, UNCHECKPOINTED, ZERO2, Job, Setting
from benchmarks.measure import DeviceClock
from benchmarks.processes import Failed
from benchmarks.shapes import TINY, load_tokenizer, paired_rows, prompt_rows, tokens_of, unpaired_rows, write_model
from benchmarks.worker import Result

CPU = Machine(False, "bf16", 0, "a CPU")
QLORA = Setting(lora=True, in_4bit=True)
SHORT = ["--gpu", "--tiny", "--repeats", "1", "--steps", "2", "--warm_up", "1", "--threads", "1"]


def options_of(*arguments: str) -> Any:
    return side_by_side._parse([*SHORT, *arguments])


def job_of(setting: Setting = PLAIN, method: str = "kto", **more: Any) -> Job:
    return Job("ours", method, "model", "rows", "output", 2, 1, **asdict(setting), **more)


def result(wall: list[float], allocated: int = 2**30, reserved: int = 2**31, loss: float = 0.5) -> Result:
    return Result(wall, wall, 0, {"loss": loss}, allocated, reserved)


# Options and plan ---------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert side_by_side.main(["--gpu"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("torch finds no CUDA GPU") and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--settings", "lora"], "--settings requires --gpu"),
        (["--limit_gb", "16"], "--limit_gb requires --gpu"),
        (["--tiny"], "--tiny requires --gpu"),
        (["--gpu", "--lora"], "--lora: use --settings lora with --gpu"),
        (["--gpu", "--batch", "1"], "--batch must be 2 or more"),
        (["--gpu", "--limit_gb", "0"], "--limit_gb and --seconds must be above 0"),
    ],
)
def test_contradicting_options(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        side_by_side.main(arguments)
    assert left.value.code == 2 and reason in capsys.readouterr().err


def test_full_lora_and_qlora_are_planned_for_every_method() -> None:
    plan = planned(options_of())
    assert set(plan) == set(METHODS)
    for method, settings in plan.items():
        adapters = [s for s in settings if s.lora]
        assert [s for s in settings if not s.lora] == [s for s in METHODS[method].floors if not s.lora]
        assert [s.in_4bit for s in adapters] == [False, False, True, True]
        assert [s.checkpointing for s in adapters] == [True, False] * 2 and {s.stage for s in adapters} == {0}
    assert plan["kto"][:2] == [PLAIN, ZERO2] and plan["online_dpo"][:2] == [PLAIN, UNCHECKPOINTED]
    assert planned(options_of("--method", "cpo", "--settings", "qlora", "full", "--no-zero2")) == {
        "cpo": [QLORA, replace(QLORA, checkpointing=False), PLAIN]
    }


def test_a_setting_is_named_after_what_is_trained() -> None:
    assert QLORA.title == "QLoRA, stage 0, plain TRL" and LORA.title == "LoRA, stage 0, plain TRL"
    assert gpu_sides._name(Outcome(job_of())) == "KTO, full, stage 0, plain TRL"
    assert gpu_sides._name(Outcome(job_of(QLORA, "online_dpo"))) == "Online DPO, QLoRA, stage 0, plain TRL"


@pytest.mark.parametrize(
    ("bf16", "fp16", "precision"), [(True, True, "bf16"), (False, True, "fp16"), (False, False, "fp32")]
)
def test_the_gpu_determines_the_precision(
    bf16: bool, fp16: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sides, "computes_bf16", lambda: bf16)
    monkeypatch.setattr(gpu_sides, "computes_fp16", lambda: fp16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 9")
    monkeypatch.setattr(gpu_sides.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="550.54\n550.54\n"))
    machine = this_machine(12.5)
    assert (machine.gpu, machine.precision, machine.limit) == (True, precision, 12_500_000_000)
    assert machine.described.startswith("Card 9 (80 GB, capped at 12.5 GB), driver 550.54, CUDA ")
    options = job_of(gpu=True, precision=machine.precision).options()
    assert (options["bf16"], options.get("fp16", False)) == (precision == "bf16", precision == "fp16")


def test_an_unknown_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_sides._driver() == "unknown"


def test_both_sides_have_the_same_device_rows_and_base_model() -> None:
    job = gpu_sides._job(Path("folder"), "kto", TINY, options_of(), replace(CPU, gpu=True, limit=7))
    assert (job.gpu, job.limit, job.precision, job.steps, job.warm_up) == (True, 7, "bf16", 3, 1)
    said = job.options()
    assert (said["use_cpu"], said["bf16"]) == (False, True)
    assert (said["per_device_train_batch_size"], said["max_length"]) == (4, TINY.most)
    assert job.quantization == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    online = gpu_sides._job(Path("folder"), "online_dpo", TINY, options_of("--batch", "3"), CPU).options()
    assert (online["per_device_train_batch_size"], online["max_length"]) == (3, TINY.most + online["max_new_tokens"])
    before = job_of().options()  # as on a CPU
    assert (before["use_cpu"], before["bf16"], before["per_device_train_batch_size"]) == (True, False, 8)
    assert not {"fp16", "max_length"} & set(before)


def test_one_gpu_is_visible_and_used_by_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sides, "run_module", lambda *given: asked.append(given) or asdict(result([1.0])))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    job = replace(job_of(gpu=True, precision="bf16"), model=str(tmp_path / "model"))
    sides.run_side(job, "trl", 0, 2, seconds=9.0)
    sides.run_side(replace(job, gpu=False, in_4bit=True), "trl", 0, 2)
    (_, one, _, on_gpu, limit), (_, other, _, on_cpu, none) = asked
    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["DS_ACCELERATOR"], limit) == ("3", "cuda", 9.0)
    assert (on_cpu["DS_ACCELERATOR"], none) == ("cpu", None) and "CUDA_VISIBLE_DEVICES" not in on_cpu
    assert "MALLOC_TOP_PAD_" in on_cpu and one != other


# Runs that fail -----------------------------------------------------------------------------------------------------


def test_a_failing_side_is_shown_and_the_other_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(job: Job, side: str, repeat: int, threads: int, seconds: float) -> Result:
        asked.append((side, repeat))
        if side == "trl" and job.stage == 0:
            cause = Failed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.62 GiB | GPU 0")
            raise Failed(f"trl, kto: {cause.reason}", "the output") from cause
        return result([1.0, 3.0, 2.0])

    monkeypatch.setattr(gpu_sides, "run_side", run)
    monkeypatch.setattr(gpu_sides, "prepare", lambda job, *_: job)
    monkeypatch.setattr(gpu_sides, "_measured_tokens", lambda job: 600)
    options = options_of("--repeats", "2", "--method", "kto", "--settings", "full")
    assert compare_on_gpu(options, CPU) == 1
    assert asked[:3] == [("ours", 0), ("trl", 0), ("ours", 1)]  # not run again
    assert asked[3:] == [("ours", 0), ("trl", 0), ("ours", 1), ("trl", 1)]
    said = capsys.readouterr()
    assert (
        "| KTO | full, stage 0, plain TRL | 2.000 s | out of memory | - | 100 | - | 1.00 GiB | - | 2.00 GiB | - |"
        in said.out
    )
    assert "| KTO | full, ZeRO-2 on both | 2.000 s | 2.000 s | 1.00 | 100 | 100 | 1.00 GiB" in said.out
    assert "KTO, full, stage 0, plain TRL: trl: torch.OutOfMemoryError: CUDA out of memory. Tried" in said.out
    assert "the output" in said.err


def test_rows_that_cannot_be_prepared_fail_and_the_next_method_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(job: Job, *_: Any) -> Job:
        if job.method == "kto":
            raise Failed("OptionError: a | b")
        return job

    monkeypatch.setattr(gpu_sides, "prepare", refuse)
    monkeypatch.setattr(gpu_sides, "run_side", lambda *_: result([1.0]))
    monkeypatch.setattr(gpu_sides, "_measured_tokens", lambda job: 600)
    assert compare_on_gpu(options_of("--method", "kto", "dpo", "--settings", "lora"), CPU) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert ["failed: OptionError: a / b | failed: not run" in line for line in lines] == [True, True, False, False]


def test_different_first_steps_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([0.5, 0.51, 0.5, 0.53])
    monkeypatch.setattr(gpu_sides, "prepare", lambda job, *_: job)
    monkeypatch.setattr(gpu_sides, "run_side", lambda *_: result([1.0], loss=next(losses)))
    monkeypatch.setattr(gpu_sides, "_measured_tokens", lambda job: 600)
    assert compare_on_gpu(options_of("--method", "kto", "--settings", "lora"), CPU) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "first steps differ" in line]
    assert said == ["KTO, LoRA, stage 0, plain TRL; no checkpointing: first steps differ: loss 0.5 and 0.53"]


def test_cells_are_medians_and_the_maximum_memory() -> None:
    one = Outcome(job_of(QLORA), tokens=1200)
    one.results["ours"] = [result([1.0, 1.0, 2.0], 2**30, 3 * 2**30), result([1.0, 1.0, 1.0], 2**31, 2**31)]
    one.results["trl"] = [result([4.0, 4.0, 4.0]), result([4.0, 2.0, 6.0])]
    assert gpu_table([one]).splitlines()[2] == (
        "| KTO | QLoRA, stage 0, plain TRL | 1.000 s | 4.000 s | 4.00 | 350 | 100 "
        "| 2.00 GiB | 1.00 GiB | 3.00 GiB | 2.00 GiB |"
    )
    assert {line.count("|") for line in gpu_table([one]).splitlines()} == {12}


# Tokens and memory --------------------------------------------------------------------------------------------------


def test_tokens_of_rows(tmp_path: Path) -> None:
    write_model(tmp_path / "model", TINY)
    known = load_tokenizer(str(tmp_path / "model"))

    def count(text: str) -> int:
        return len(known(text)["input_ids"])

    for row in unpaired_rows(TINY, 4):
        assert tokens_of(row, 9) == count(row["prompt"] + row["completion"]) + 1
    for row in paired_rows(TINY, 4):
        assert tokens_of(row, 9) == count(row["prompt"] + row["chosen"]) + count(row["prompt"] + row["rejected"]) + 2
    for row in prompt_rows(TINY, 4):
        assert tokens_of(row, 9) == 2 * (count(row["prompt"]) + 9)


def test_rows_of_the_warm_up_are_not_counted(tmp_path: Path) -> None:
    rows = unpaired_rows(TINY, 6)
    (tmp_path / "kto-trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = replace(job_of(batch=2), rows=str(tmp_path / "kto-ours.jsonl"), steps=3)
    assert gpu_sides._measured_tokens(job) == sum(tokens_of(row, 0) for row in rows[2:])


def test_a_step_ends_when_the_gpu_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7 if len(waits) == 1 else 6)
    clock = DeviceClock()
    for _ in range(3):
        clock.on_step_end(None, None, None)
    assert (len(waits), len(clock.ends), clock.reserved) == (3, 3, 7)


def test_a_cap_is_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    measure.cap_memory(24)
    measure.cap_memory(90)
    assert shares == [0.3, 1.0]


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
