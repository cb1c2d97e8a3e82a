"""The command ``prepare``: the run finds the tokenized data on any machine, and no other files are left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import DRIVERS
from support.helpers import POSITIONS, make_model, paired_rows, unpaired_rows
from support.run_folders import holding, write_status

from alignment.cli.prepare import main
from alignment.config.dtypes import planned
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")
SHORT = ("--max_steps", "1", "--disable_tqdm", "--save_strategy", "no", "--max_length", str(POSITIONS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows for training and evaluation."""
    folder = tmp_path_factory.mktemp("prepare")
    make_model(folder / "model")
    for name, rows in (("kto", unpaired_rows(12)), ("cpo", paired_rows(8))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for the test, on a machine that does not report its devices."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DS_ACCELERATOR")
    return tmp_path / "cache"


def arguments(folder: Path, out: Path, *more: object, method: str = "kto") -> list[str]:
    given = ("--method", method, "--model_name_or_path", folder / "model", "--output_dir", out)
    return list(map(str, (*given, "--dataset_name", folder / f"{method}.jsonl", *SHORT, *more)))


@pytest.fixture
def prepare(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``prepare(*options, method="kto")``: exit status, stdout and stderr."""

    def run(*more: object, method: str = "kto") -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main(arguments(folder, tmp_path / "out", *more, method=method))
        told = capfd.readouterr()
        assert planned() is None and isinstance(leaving.value.code, int)
        return leaving.value.code, told.out, told.err

    return run


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything below a folder, with times and sizes, except lock files of the library."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_a_run_finds_the_rows(
    prepare: Callable[..., Any], folder: Path, tmp_path: Path, cache: Path, ranks: RankServer
) -> None:
    """Planned for four GPUs, run on two CPUs with another batch size: no row is tokenized or cached again."""
    evaluation = ("--dataset_test_split", "train[:5]", "--eval_strategy", "steps")
    status, out, err = prepare(*evaluation, "--ranks", "4", "--per_device_train_batch_size", "2")
    assert status == 0, err
    assert "compute dtype bfloat16" in out and "rows per step: 8" in out and "replica (2 bytes" in out
    assert f"Planned for 4 ranks with one bf16-capable GPU each. Tokenized rows are in {cache}" in out
    assert not (tmp_path / "out").exists()
    before = tree(cache)
    assert sum(name.endswith("report.json") for name in before) == 2
    more = (*evaluation, "--use_cpu", "--per_device_train_batch_size", "3")
    done = ranks.run(
        DRIVERS / "no_tokenizing.py",
        *arguments(folder, tmp_path / "out", *more),
        env={"HF_DATASETS_CACHE": str(cache)},
    )
    assert "12 of 12 rows kept" in done.stdout and (tmp_path / "out" / "model.safetensors").is_file()
    assert tree(cache) == before


@pytest.mark.ci
def test_preparation_does_not_wait_for_a_run_in_the_folder(prepare: Callable[..., Any], tmp_path: Path) -> None:
    """By the time the next run starts, it will have been requeued or have ended."""
    with holding(tmp_path / "out") as process:
        write_status(tmp_path / "out", state="running", pid=process.pid)
        before = tree(tmp_path / "out")
        status, out, err = prepare("--resume_from_checkpoint", "latest")
        assert status == 0, err
        assert tree(tmp_path / "out") == before and (tmp_path / "out" / ".lock").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(("--fp16", "true"), "compute dtype float16", marks=pytest.mark.ci),
        (("--optim", "deepspeed_cpu_adam", "--deepspeed", "zero2_offload"), '"pin_memory": true'),
        pytest.param(("--use_peft", "--load_in_4bit"), "4-bit base weights", marks=pytest.mark.ci),
        pytest.param(("--per_device_train_batch_size", "1", "--ranks=2"), "rows per step: 2", marks=pytest.mark.ci),
        (("--ref_placement", "precomputed"), "The run computes the reference's log-probs"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_planning_for_gpus_without_a_gpu(
    options: tuple[str, ...], says: str, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions that depend on the run's machine are not made here; nothing is compiled, and no weights are read."""
    from alignment.engines import optimizers
    from alignment.references import content

    build = optimizers.build_optimizer

    def built(model: Any, given: Any) -> Any:
        assert optimizers.KINDS[given.optim].builder is None, "it is compiled here"
        return build(model, given)

    monkeypatch.setattr(optimizers, "build_optimizer", built)
    monkeypatch.setattr(optimizers, "missing_to_compile", lambda builder, cuda: None)
    monkeypatch.setattr(content, "file_hash", None)
    status, out, err = prepare(*options)
    assert status == 0, err
    assert says in out


def test_planning_for_a_cpu_if_the_run_will_use_one(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "compute dtype float32" in prepare("--use_cpu")[1]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "Planned for 1 rank with CPUs" in prepare()[1]
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")  # as in the run; this machine's devices are not used
    assert "compute dtype bfloat16" in prepare()[1]
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_wrong_ranks(prepare: Callable[..., Any]) -> None:
    for options, place in (("--ranks 0", "--ranks=0"), ("--per_device_train_batch_size 1", "gradient_accumulation")):
        status, _, err = prepare(*options.split())
        assert status == 1 and err.startswith(f"error: {place}") and err.count("\n") == 1


def test_the_help_has_the_option_of_its_own(prepare: Callable[..., Any]) -> None:
    status, out, _ = prepare("--help")
    assert status == 0 and "--ranks N" in out.partition("usage:")[0] and "--learning_rate" in out
