"""``tools/same_numbers.py``: what counts as a difference, and what its runs cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import STAGES
from safetensors.torch import save_file

from tools.comparing.comparison import MISSING, Difference, compare
from tools.comparing.matrix import World, runs

START = {"event": "start", "steps": 2, "dropped": {"too long": 1}}
STEP = {"loss": 0.5, "kl": float("nan"), "step": 1}
END = {"event": "end", "phases": {"learn": {"tokens": 30, "seconds": 0.1, "peak_bytes": 7}}}


def write(folder: Path, *records: dict[str, Any], weight: float = 1.0, name: str = "model.safetensors") -> Path:
    """Write an output folder with a log and a model."""
    (folder / "checkpoint-1").mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    save_file({"w": torch.tensor([weight, 2.0]), "b": torch.ones(1, dtype=torch.bfloat16)}, folder / name)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", START, STEP, END)


def found(base: Path, head: Path, **renamed: str) -> list[tuple[str, str, Any, Any]]:
    return [(one.where, one.key, one.base, one.head) for one in compare("run", base, head, renamed)]


def test_time_and_memory_may_differ_and_nothing_else(base: Path, tmp_path: Path) -> None:
    """And the name of the run, which is random."""
    phases = {"learn": {"tokens": 30, "seconds": 99.0, "peak_bytes": 1}}
    head = write(tmp_path / "head", {**START, "run": "0f8060"}, STEP, {**END, "phases": phases})
    assert found(base, head) == []
    head = write(tmp_path / "head", START, STEP, {**END, "phases": {"learn": {"tokens": 31}}})
    assert found(base, head) == [("log.jsonl line 3 (end)", "phases.learn.tokens", 30, 31)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({**STEP, "loss": 0.5000000000000001}, ("loss", 0.5, 0.5000000000000001)),
        ({"kl": float("nan"), "step": 1}, ("loss", 0.5, MISSING)),
        ({**STEP, "entropy": 2.0}, ("entropy", MISSING, 2.0)),
    ],
)
def test_a_difference_has_its_step_key_and_both_values(
    base: Path, tmp_path: Path, changed: dict[str, float], expected: tuple[str, Any, Any]
) -> None:
    head = write(tmp_path / "head", START, changed, END)
    assert found(base, head) == [("log.jsonl line 2 (step 1)", *expected)]
    assert str(Difference("run", "log.jsonl line 2 (step 1)", *expected)).startswith(
        "run: log.jsonl line 2 (step 1): "
    )


def test_missing_lines_and_files(base: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", START, STEP)
    assert found(base, head) == [("log.jsonl", "lines", 3, 2)]
    (base / "completions.jsonl").write_text('{"prompt": "a", "step": 1}\n')
    assert ("completions.jsonl", "lines", 1, 0) in found(base, head)
    with pytest.raises(FileNotFoundError, match="nothing to compare"):
        compare("run", tmp_path / "nowhere", head, {})


def test_weights_are_compared_bitwise(base: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", START, STEP, END, weight=1.0000001)
    ((where, key, before, after),) = found(base, head)
    assert (where, key) == ("model.safetensors", "w") and before != after and before.startswith("[2] torch.float32 ")
    write(tmp_path / "head", START, STEP, END)
    write(tmp_path / "head", START, STEP, END, name="checkpoint-1/model.safetensors")
    more = {(where, key) for where, key, *_ in found(base, tmp_path / "head")}
    assert more == {("checkpoint-1/model.safetensors", name) for name in ("w", "b")}


def test_renamed_keys_are_compared_by_their_new_names(base: Path, tmp_path: Path) -> None:
    end = {"event": "end", "phases": {"train": END["phases"]["learn"]}}  # type: ignore[index]
    head = write(tmp_path / "head", START, STEP, end)
    assert len(found(base, head)) == 2
    assert found(base, head, learn="train") == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_the_runs_cover_methods_stages_and_ranks(world: World) -> None:
    every = {run.name: run for run in runs(world, quick=False)}
    engines = {f"{stage}-{ranks}" for stage in STAGES for ranks in (1, 2)}
    methods = {name.removesuffix(f"-{engine}") for name in every for engine in engines if name.endswith(f"-{engine}")}
    assert set(every) == {f"{method}-{engine}" for method in methods for engine in engines}
    assert {"kto", "cpo", "sft", "reward", "kto-moe", "cpo-moe"} < methods
    assert {f"online_dpo-{what}" for what in ("function", "model", "judge")} < methods
    quick = {run.name for run in runs(world, quick=True)}
    assert quick < set(every) and len(quick) == 2 * len(methods)
    for engine in engines:
        assert sum(name.endswith(f"-{engine}") for name in quick) >= 2
    assert all(sum(name.removesuffix(f"-{engine}") in methods for engine in engines) == 1 for name in quick)
    for run in every.values():
        options = run.options
        window = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] * run.ranks
        assert window == 8 and options["eval_strategy"] == "steps"
        assert options["method"] != "online_dpo" or options["rollout_batch_size"]
