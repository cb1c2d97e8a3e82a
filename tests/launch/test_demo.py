"""The demo: its world and rules, tokenizer, targets, and the whole program with a tiny model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from conftest import ROOT, Launch

from alignment.config.errors import OutputError
from examples.demo import data
from examples.demo.folder import (
    LoraSettings,
    OnlineSettings,
    PreferenceSettings,
    RewardSettings,
    Settings,
    StartSettings,
    open_folder,
)
from examples.demo.grammar import all_requests, answer
from examples.demo.run import main
from examples.demo.verdict import answers, manner


def tiny(seed: int = 0) -> Settings:
    """Return settings for the whole program in seconds; the model learns nothing."""
    return Settings(
        seed=seed,
        held_out=5,
        start=StartSettings(hidden_size=16, layers=1, intermediate_size=16, rows=24, epochs=1, batch=8),
        kto=PreferenceSettings(16, 8, 0.1, 1e-3),
        kto_lora=LoraSettings(16, 8, 0.1, 1e-3, rank=2),
        reward=RewardSettings(rows=8, batch=4),
        cpo=PreferenceSettings(8, 4, 0.1, 1e-3),
        online_dpo=OnlineSettings(8, 4, 0.1, 1e-3, completions=2),
        max_new_tokens=4,
    )


def test_the_rules_agree_with_the_grammar_on_every_request() -> None:
    rng = random.Random(0)
    for request in all_requests():
        for wanted in ("warm", "curt"):
            text = answer(request, wanted, rng)
            assert manner(request, text) == wanted, text
            assert answers(request, text), text


def test_held_out_requests_are_new_in_every_row() -> None:
    world = data.make_world(seed=3, held_out=256)
    held_out = {request.combination for request in world.held_out}
    assert len(held_out) == 256 and len(world.training) == len(all_requests()) - 256
    assert not held_out & {request.combination for request in world.training}
    texts = {request.text for request in world.held_out}
    made = [
        *(row["messages"][0]["content"] for row in data.start_rows(world.training, 6400, 3)),
        *(row["prompt"][0]["content"] for row in data.labeled_rows(world.training, 3200, 3)),
        *(row["prompt"][0]["content"] for row in data.paired_rows(world.training, 1600, 3)),
        *(row["prompt"][0]["content"] for row in data.prompt_rows(world.training, 1600, 3)),
    ]
    assert len(made) == 12800 and not texts & set(made)


def test_only_a_folder_of_an_earlier_demo_is_reused(tmp_path: Path) -> None:
    open_folder(tmp_path / "new")
    open_folder(tmp_path / "new")
    mine = tmp_path / "mine"
    (mine / "kto").mkdir(parents=True)
    with pytest.raises(OutputError, match="contains files that are not from an earlier demo; choose another folder"):
        open_folder(mine)
    assert [path.name for path in mine.iterdir()] == ["kto"]


@pytest.mark.ci
def test_the_whole_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library_bars: None
) -> None:
    """Trains, saves, samples, reports, and exits with status 1, naming the targets not met; then runs again."""
    monkeypatch.setattr("examples.demo.folder.Settings", tiny)
    folder = tmp_path / "demo"

    def start(*more: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["--output_dir", str(folder), *more])
        assert leaving.value.code == 1
        return capsys.readouterr()

    out, error = start()
    last = error.strip().splitlines()[-1]
    assert last.startswith(
        "error: demo: targets not met: 5 held-out prompts, expected at least 200; before: preferred style 0.000"
    )
    least_warm = {"after KTO": 0.85, "after KTO, LoRA": 0.85, "after CPO": 0.85, "after Online DPO": 0.75}
    for title, least in least_warm.items():
        assert f"{title}: preferred style 0.000, expected at least {least}; {title}: mean reward" in last
        assert re.search(rf"\| {title} +\| +0\.000 \|", out)
    assert '{"loss"' not in out and "LOAD REPORT" not in error
    models = ("start", "reward", "kto", "kto_lora", "cpo", "online_dpo")
    assert {path.name for path in folder.iterdir()} == {
        *(*models, "data", "answers.jsonl", "demo.md", "margins.png", "trainers.txt"),
        "made_by_demo.json",
    }
    page = (folder / "demo.md").read_text()
    assert re.search(r"\| before +\| +0\.000 \|", page) and "![reward margins by step](margins.png)" in page
    assert "targets not met: " in page and page.count("  after KTO ") == 3, "three sampled requests"
    given = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    titles = ("before", *least_warm)
    assert [line["model"] for line in given] == [title for title in titles for _ in range(5)]
    for title in titles:  # the table's column is the mean reward of the responses
        cell = re.search(rf"\| {title} +\|[^|]+\|[^|]+\| +(\S+) \|", page)
        mean = sum(line["reward"] for line in given if line["model"] == title) / 5
        assert cell and float(cell[1]) == pytest.approx(mean, abs=0.006)
    assert not (folder / "kto_lora" / "model.safetensors").exists(), "adapters only"

    def times() -> dict[str, int]:
        weights = {name: "adapter_model" if name == "kto_lora" else "model" for name in models}
        return {name: (folder / name / f"{file}.safetensors").stat().st_mtime_ns for name, file in weights.items()}

    first = times()
    out, _ = start()
    second = times()
    assert all(f"reusing {folder / name} from an earlier run" in out for name in ("start", "reward"))
    assert [second[name] > first[name] for name in models] == [False, False, True, True, True, True]
    again = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert again == given, "the same seed gives the same responses"
    start("--fresh")
    assert all(times()[name] > second[name] for name in models)


@pytest.mark.slow
def test_the_demo_meets_its_targets(launch: Launch, tmp_path: Path) -> None:
    done = launch(ROOT / "examples" / "demo" / "run.py", "--output_dir", tmp_path, launcher="python", timeout=900)
    assert done.returncode == 0, done.stderr
    assert "All targets are met." in done.stdout


def test_the_script_starts_from_any_folder(launch: Launch, tmp_path: Path) -> None:
    """With the argument that `deepspeed` adds, which is not for users."""
    script = ROOT / "examples" / "demo" / "run.py"
    done = launch(script, "--local_rank=0", "--help", launcher="python", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--fresh" in done.stdout and "local_rank" not in done.stdout
