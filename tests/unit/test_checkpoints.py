"""Which evaluation is the best, which checkpoints are kept, and which rank reads which of their files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from alignment import CPOConfig
from alignment.checkpoint.best import BestModel
from alignment.checkpoint.folder import prune_checkpoints
from alignment.checkpoint.manifest import FileRecord, Manifest


@pytest.mark.parametrize(
    ("metric", "values", "steps"),
    [
        ("loss", [3.0, 2.0, 2.0, 4.0, 1.0], [1, 2, 5]),
        ("eval_loss", [math.nan, 3.0, math.inf, 2.0], [2, 4]),
        ("rewards/accuracies", [0.5, 0.4, 0.5, 0.75], [1, 4]),
    ],
)
def test_only_a_better_finite_value_is_an_improvement(metric: str, values: list[float], steps: list[int]) -> None:
    args = CPOConfig(output_dir="out", metric_for_best_model=metric)
    state = TrainerState()
    best = BestModel(args, state)
    improved = []
    for state.global_step, value in enumerate(values, start=1):
        if best.improved({f"eval_{metric.removeprefix('eval_')}": value, "eval_other": -1e9}):
            improved.append(state.global_step)
    assert improved == steps
    assert state.best_global_step == steps[-1] and state.best_metric == values[steps[-1] - 1]


@pytest.mark.parametrize("best", ["out", "link"])
def test_the_best_checkpoint_is_kept_however_its_path_is_spelled(
    tmp_path: Path, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume may name the folder differently from the run that found the best: relative, or through a link."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3, 4):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    prune_checkpoints(tmp_path / "out", 2, Path(best, "checkpoint-1"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-1", "checkpoint-4"]


@given(sizes=st.lists(st.integers(0, 20), max_size=9), ranks=st.integers(1, 4))
def test_every_file_is_read_by_one_rank_and_the_loads_are_balanced(sizes: list[int], ranks: int) -> None:
    files = {f"file-{number}": FileRecord(size, "") for number, size in enumerate(sizes)}
    manifest = Manifest("r", 1, "kto", 1, 0, 8, 9, True, {}, {}, {}, files)
    shares = [manifest.share(rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
