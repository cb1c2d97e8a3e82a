"""``--dry_run``: its output, and that it neither loads weights nor writes files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from support.helpers import POSITIONS, exit_status, make_model, paired_rows, unpaired_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.cli.dry_run import _shortened
from alignment.cli.train import main
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group")
SAME = {"chosen": "a b", "rejected": "a b"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, labeled rows and pairs."""
    folder = tmp_path_factory.mktemp("dry-run")
    make_model(folder / "model")
    long = {"prompt": "a" * 700, "completion": "b", "label": True}
    for name, rows in {"kto": [*unpaired_rows(9), long], "cpo": [*paired_rows(5), SAME]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def dry_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run the command with ``--dry_run`` and return its output. It must not load weights or write files."""
    for cls in (AutoModelForCausalLM, PreTrainedModel):
        monkeypatch.setattr(cls, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))

    def run(method: str, *more: str) -> str:
        status = exit_status(main, arguments(method, folder, tmp_path, *more))
        out, err = capfd.readouterr()
        assert status == 0, err
        assert list(tmp_path.iterdir()) == []
        return out

    return run


def arguments(method: str, folder: Path, out: Path, *more: str) -> list[str]:
    """The command's arguments."""
    given = ("--method", method, "--model_name_or_path", folder / "model", "--output_dir", out / "out")
    given += ("--dataset_name", folder / f"{method}.jsonl", "--max_length", POSITIONS, "--max_prompt_length", 20)
    return [*map(str, given), "--dry_run", *more]


def test_kto(dry_run: Callable[..., str]) -> None:
    out = dry_run("kto", "--learning_rate", "1e-4")
    lines = out.splitlines()
    changed, unchanged = out.partition("Options with their default values:")[::2]
    assert re.search(r"^  learning_rate +0\.0001$", changed, re.M) and "beta" not in changed
    assert re.search(r"\bbeta=0\.1,\s", unchanged) and "learning_rate=" not in unchanged.partition("JSON of the")[0]
    policy, reference = (
        json.JSONDecoder().raw_decode(out.partition(f"JSON of the {name}:\n")[2])[0]
        for name in ("policy", "reference")
    )
    assert (policy["zero_optimization"]["stage"], policy["train_batch_size"]) == (2, 8)
    assert reference["zero_optimization"]["stage"] == 0
    start = next(i for i, line in enumerate(lines) if line.startswith("Data: "))
    header, rows = lines[start + 1], lines[start + 2]
    assert header.split("  ")[-1] == "completions truncated"
    assert rows.split() == ["rows", "10", "10", "0", "6", "4", "1", "0"]
    assert len(header) == len(rows)  # right-aligned
    assert lines[start + 4].split() == ["tokens", "min", "p50", "p90", "p99", "max"]
    prompts = sorted(min(len(row["prompt"]), 20) for row in unpaired_rows(9)) + [20]
    assert lines[start + 5].split() == ["prompt", *map(str, (prompts[0], prompts[5], prompts[9], 20, 20))]
    assert lines[start + 6].split()[0] == "completion"
    first = unpaired_rows(1)[0]
    assert lines[start + 9 : start + 12] == [
        "  row 1, desirable",
        f"    prompt      {first['prompt']!r}",
        f"    completion  {first['completion'] + '</s>'!r}",
    ]
    assert "Steps per epoch: 2, rows per step: 8" in lines
    assert sum("learning_rate=0.0001" in line for line in lines[lines.index("Advice:") + 1 :]) == 1


def test_cpo(dry_run: Callable[..., str]) -> None:
    steps = ("--gradient_accumulation_steps", "2", "--max_steps", "1", "--warmup_steps", "1")
    out = dry_run("cpo", *steps, "--dataset_test_split", "train[:2]")
    assert "JSON of the reference" not in out and "no reference model" in out
    assert re.search(r"^  rows +6 +5 +1 +0 +0$", out, re.M)
    assert re.search(r"^  dropped +1  chosen and rejected are identical$", out, re.M)
    assert re.search(r"^    rejected  '\w+</s>'$", out, re.M)
    assert out.count("\nData: ") == 2 and "cpo.jsonl (train[:2])" in out
    assert "Advice:\n  - 1 of 6 rows were dropped (1 × chosen and rejected are identical); check these rows" in out


def test_the_command_on_two_ranks_prints_once(folder: Path, tmp_path: Path, ranks: RankServer) -> None:
    done = ranks.run(ROOT / "launch" / "train.py", *arguments("kto", folder, tmp_path))
    assert done.stdout.count("Options:") == done.stdout.count("Advice:") == 1
    assert "rows per step: 16" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_of_a_resume_is_checked(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = arguments("kto", folder, tmp_path, "--resume_from_checkpoint", "latest")
    assert exit_status(main, given) == 0
    assert "resume_from_checkpoint: no checkpoint; the run would be a new one" in capfd.readouterr().out
    damaged = tmp_path / "out" / "checkpoint-2" / "manifest.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    assert exit_status(main, given) == 1
    assert str(damaged) in capfd.readouterr().err


def test_long_texts_are_shortened_in_the_middle() -> None:
    assert _shortened("a" * 600) == "a" * 600
    assert _shortened("a" * 400 + "b" * 500) == f"{'a' * 300} … 300 characters omitted … {'b' * 300}"
