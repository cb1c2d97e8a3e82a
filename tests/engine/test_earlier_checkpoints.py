"""Runs of an earlier version of the package are continued from its checkpoints as that version continued them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS, selected_cases
from safetensors.torch import load_file
from support.earlier_checkpoints import POINT, cases, earlier_machine, label, machine, unpacked
from support.resume_comparison import differences

from tools.ranks import RankServer

_TEST = "test_a_run_of_an_earlier_version_continues"
# The folder of that run, and how the tokenizer was found there.
_PLACES = {"out/trainer_state.json: best_model_checkpoint", "final/tokenizer_config.json"}


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest) -> Path:
    """Continue the runs of the selected tests; return their folder."""
    folder = tmp_path_factory.mktemp("continued")
    runs = [unpacked(case, folder) for case in selected_cases(request, _TEST)]
    spec = folder / "spec.json"
    spec.write_text(json.dumps(runs))
    ranks.run(DRIVERS / "resume_runs.py", spec, nproc=1, timeout=120 + 30 * len(runs))
    return folder


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in json.loads((folder / "history.json").read_text()) if "loss" in record]


@pytest.mark.ci
@pytest.mark.parametrize("case", cases(), ids=label)
def test_a_run_of_an_earlier_version_continues(case: dict[str, Any], continued: Path) -> None:
    """Bitwise on the same kind of machine; elsewhere up to rounding, which a lost moment or stream exceeds."""
    (run,) = continued.glob(f"{case['method']}-{case['stage']}-*")
    whole, after = run / "whole", run / f"after-{POINT}"
    if machine() == earlier_machine():
        assert set(differences(whole, after, POINT)) <= _PLACES
    assert losses(after) == pytest.approx(losses(whole), rel=1e-4, abs=1e-6)
    (name,) = (path.name for path in (whole / "final").glob("*.safetensors"))
    ours, theirs = load_file(after / "final" / name), load_file(whole / "final" / name)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-5)
