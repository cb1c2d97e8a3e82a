"""The same seed gives bitwise equal runs; `full_determinism` enables torch's deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import STAGES, make_model, options, train_and_close, unpaired_rows

from alignment import KTOConfig, KTOTrainer

TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Restore torch's switches."""
    before = torch.are_deterministic_algorithms_enabled()
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(before)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def history(model: str, folder: Path, **more: Any) -> list[dict[str, float]]:
    args = KTOConfig(**options(folder, max_steps=2, deepspeed=STAGES["stage2"], **more))
    trainer = train_and_close(KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(8)))
    return [{n: v for n, v in entry.items() if n not in TIMES} for entry in trainer.state.log_history]


def test_two_runs_are_identical(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "tied")
    first = history(model, tmp_path / "first")
    assert not torch.are_deterministic_algorithms_enabled()
    assert history(model, tmp_path / "second") == first
    assert history(model, tmp_path / "other", seed=7) != first


def test_full_determinism_enables_deterministic_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    model = make_model(tmp_path / "model", "tied")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    first = history(model, tmp_path / "first", full_determinism=True, tf32=True)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert history(model, tmp_path / "second", full_determinism=True) == first
