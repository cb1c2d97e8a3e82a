"""``sample`` and ``compare``: equal rows on one rank, on two, and after a kill; rows to train on; wins."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.bad_online_commands import write_classifiers
from support.helpers import make_model, options, text
from support.tiny_adapters import lora, make_adapter
from transformers import BitsAndBytesConfig

from alignment import CPOConfig, CPOTrainer, DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from alignment.cli.sampling import Sampled, rows_of, statistics_of, wilson
from alignment.config.errors import OptionError
from alignment.data.kinds.prompts import PromptRow
from alignment.methods.online_dpo_options import SampleConfig
from alignment.models.adapters.folder import write_training_base
from alignment.models.tasks import CAUSAL_LM
from alignment.reporting.page import render
from alignment.reporting.run_content import read_content
from tools.ranks import RankServer
from tools.ranks.job import Outcome

LENGTHS = ("--max_length", "64", "--max_new_tokens", "8", "--use_cpu", "--disable_tqdm")
REWARDS = """
import os, signal

def letters(completions, **columns):
    return [float(len(set(str(one)))) for one in completions]

def deadly(completions, **columns):
    left = int(open(os.environ["LIVES"]).read())
    open(os.environ["LIVES"], "w").write(str(left - 1))
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(completions)

def longer(prompts, pairs):
    return [-1 if "!" in str(one + other) else int(len(str(one)) < len(str(other))) for one, other in pairs]

def first(prompts, pairs):
    return [0 for _ in pairs]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``policy`` and ``other``, adapters of the first, reward models, prompts, chats and functions."""
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    make_model(folder / "policy")
    make_model(folder / "other", seed=1)
    for name in ("adapter", "adapter-4bit"):
        make_adapter(folder / name, str(folder / "policy"), lora(), size=0.5)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32").to_dict()
    facts = {"base_model": str(folder / "policy"), "revision": None, "task": CAUSAL_LM, "dtype": "float32"}
    write_training_base(folder / "adapter-4bit", quantization=quantization, **facts)  # type: ignore[arg-type]
    write_classifiers(folder)
    for name, count in (("prompts", 10), ("chats", 8)):
        texts = [text(rng, 2, 12) for _ in range(count)]
        rows = [{"prompt": one if name == "prompts" else [{"role": "user", "content": one}]} for one in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "empty.jsonl").write_text("")
    (folder / "answers.jsonl").write_text('{"question": "a"}\n')
    return folder


def run(
    ranks: RankServer, world: Path, command: str, *arguments: object, nproc: int = 1, check: bool = True, **env: str
) -> Outcome:
    return ranks.run(
        ROOT / "launch" / f"{command}.py", *arguments, *LENGTHS, nproc=nproc, check=check, env=env, cwd=world
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ci
def test_rows_are_the_same_on_two_ranks_and_after_a_kill(ranks: RankServer, world: Path, tmp_path: Path) -> None:
    given = ("--prompts", "prompts.jsonl", "-n", 3, "--as", "pairs", "--chunk_size", 2, "--reward_funcs")
    whole = run(ranks, world, "sample", "policy", *given, "rewards.py:letters", "--out", tmp_path / "whole.jsonl")
    stage3 = ("--deepspeed", ROOT / "ds_configs" / "zero3.json", "--ds3_gather_for_generation", "false")
    two = ("rewards.py:letters", "--out", tmp_path / "two.jsonl", *stage3)
    run(ranks, world, "sample", "policy", *given, *two, nproc=2)
    out, lives = tmp_path / "killed.jsonl", tmp_path / "lives"
    lives.write_text("3")
    killed = ("sample", "policy", *given, "rewards.py:deadly", "--out", out)
    assert run(ranks, world, *killed, check=False, LIVES=str(lives)).ranks[0].code == -9 and not out.exists()
    (journal,) = (tmp_path / "killed.jsonl.samples").iterdir()
    assert len(read(journal)) == 3, "three chunks"
    with journal.open("a") as file:
        file.write('{"metrics": {"objective')  # as a kill within a write leaves it
    lives.write_text("9")
    assert ".jsonl: 6 of 10 prompts sampled" in run(ranks, world, *killed, LIVES=str(lives)).stdout
    assert lives.read_text() == "7"
    rows = out.read_text()
    assert rows == (tmp_path / "whole.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()
    found = [json.loads(line) for line in rows.splitlines()]
    assert found and all(len(set(row["chosen"])) == row["chosen_score"] > row["rejected_score"] for row in found)
    (line,) = [line for line in whole.stdout.splitlines() if "whole.jsonl: " in line]
    assert f"{len(found)} rows of 10 prompts" in line and "mean reward " in line and "mean length " in line
    again = ("sample", "policy", *given, "rewards.py:deadly", "--threshold", "3", "--as", "unpaired", "--out", out)
    assert ".jsonl: 10 of 10 prompts sampled" in run(ranks, world, *again, LIVES="none").stdout
    other = ("sample", "policy", *given, "rewards.py:deadly", "--prompts", "chats.jsonl", "--out", out)
    assert ".jsonl: 0 of 8 prompts sampled" in run(ranks, world, *other, LIVES=str(lives)).stdout


PAIRS = ("pairs", "--reward_model_path=classifier", "policy")


@pytest.mark.parametrize(
    ("rows", "scored", "model", "config", "trainer"),
    [
        ("unpaired", "--judge=rewards.py:first", "adapter", KTOConfig, KTOTrainer),
        pytest.param(*PAIRS, DPOConfig, DPOTrainer, marks=pytest.mark.ci),
        pytest.param(*PAIRS, CPOConfig, CPOTrainer, marks=pytest.mark.ci),
        pytest.param("completions", "--dtype=float32", "adapter-4bit", SFTConfig, SFTTrainer, marks=pytest.mark.ci),
    ],
)
def test_methods_train_on_the_rows(
    ranks: RankServer, world: Path, tmp_path: Path, rows: str, scored: str, model: str, config: Any, trainer: Any
) -> None:
    out = tmp_path / "rows.jsonl"
    # Text becomes the user's turn in the rows, too.
    prompts = ("prompts.jsonl", "--apply_chat_template") if trainer is CPOTrainer else ("chats.jsonl",)
    given = ("-n", 2, "--as", rows, "--out", out, scored, "--prompts", *prompts)
    done, found = run(ranks, world, "sample", model, *given), read(out)
    assert ("4-bit base weights" in done.stdout) == (model == "adapter-4bit")
    assert all(row["prompt"][0]["role"] == "user" for row in found) and len(found) >= 6
    assert rows != "unpaired" or [row["label"] for row in found] == [row["score"] == 1.0 for row in found]
    assert ("score" in found[0]) == (rows == "unpaired")
    args = config(**options(tmp_path, max_steps=1, max_length=64, use_peft=False))
    trained = trainer(str(world / "policy"), args=args, train_dataset=found)
    assert trained.data.train.report.rows_out == len(found)
    assert trained.train().global_step == 1
    trained.close()


TEMPLATE = {"tools": [{"name": "f"}], "short": True}
COLUMNS = {"tools": '[{"name": "f"}]', "chat_template_kwargs": '{"short": true}'}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]


def made(rows: str, prompt: Any, scores: Any, outcome: Any, **more: Any) -> list[Any]:
    settings = SampleConfig(rows=rows, **{"reward_funcs": "a.py:f", **more})  # type: ignore[arg-type]
    texts, source = ["aa", "b", "c"][: len(scores)], PromptRow(0, prompt, TEMPLATE, {})
    return rows_of(Sampled(source, texts, [2, 1, 1], [True] * 3, scores, outcome, []), settings)


def test_labels_pairs_and_completions() -> None:
    def labels(found: Sequence[Any]) -> list[Any]:
        return [row if isinstance(row, str) else row["label"] for row in found]

    assert labels(made("unpaired", "p", [1.0, 3.0, 2.0], [1, 0])) == [False, True, "at the median"]
    assert labels(made("unpaired", "p", [1.0, 3.0, None], [1, 0])) == [False, True, "unscored"]
    assert labels(made("unpaired", "p", [1.0, 3.0, 2.0], [1, 0], threshold=2.0)) == [False, True, True]
    assert labels(made("unpaired", "p", [0.0, 1.0], [1, 0])) == [False, True]
    assert labels(made("unpaired", "p", [None, None], "failed")) == ["unscored"] * 2
    assert made("pairs", "p", [1.0, 3.0], [1, 0], min_margin=2.5) == ["margin below min_margin"]
    scores = {"chosen_score": 3.0, "rejected_score": 1.0}
    assert made("pairs", "p", [1.0, 3.0], [1, 0]) == [
        {"prompt": "p", "chosen": "b", "rejected": "aa", **COLUMNS, **scores}
    ]
    assert made("pairs", "p", [None, None], "identical") == ["identical"]
    unscored = made("completions", "p", [None, None], "unscored", reward_funcs=None)
    assert unscored[1] == {"prompt": "p", "completion": "b", **COLUMNS}
    continued = made("completions", CHAT, [1.0, None], "unscored")
    assert continued[0]["prompt"] == CHAT[:1] and continued[1]["score"] is None
    assert continued[0]["completion"] == [{"role": "assistant", "content": "so aa"}]


def test_wins_are_counted(ranks: RankServer, world: Path, tmp_path: Path) -> None:
    """By a reward against the run's start on two ranks, and by judges: one by length, one by position."""
    shutil.copytree(world / "other", tmp_path / "run")
    (tmp_path / "run" / "options.json").write_text(json.dumps({"model_name_or_path": str(world / "policy")}))
    given = (tmp_path / "run", "--prompts", "chats.jsonl", "--chunk_size", 2)
    run(ranks, world, "compare", *given, "--reward_funcs", "rewards.py:letters", nproc=2)
    (one,) = json.loads((tmp_path / "run" / "comparison.json").read_text())["comparisons"]
    scores = [[float(len(set(str([{"role": "assistant", "content": text}])))) for text in each["answers"]]
              for each in one["examples"]]  # fmt: skip
    assert one["with"] == str(world / "policy") and one["prompts"] == 8
    assert [each["scores"] for each in one["examples"]] == scores
    assert scores == sorted(scores, key=lambda pair: -abs(pair[0] - pair[1]))
    same = 8 - len(scores)  # answers that are equal are no examples
    wins, ties = sum(a > b for a, b in scores), same + sum(a == b for a, b in scores)
    assert (one["wins"], one["ties"], one["losses"]) == (wins, ties, 8 - wins - ties)
    assert one["win_rate"] == (wins + ties / 2) / 8 and one["interval"][0] < one["win_rate"] < one["interval"][1]
    (tmp_path / "run" / "log.jsonl").write_text('{"event": "start"}\n')
    page = render(read_content(tmp_path / "run").page)
    assert "Most different answers" in page and f"{one['win_rate']:.1%} (" in page
    for judge in ("longer", "first"):
        printed = run(ranks, world, "compare", "policy", *given, "--judge", f"rewards.py:{judge}").stdout
        one, *_ = json.loads((world / "policy" / "comparison.json").read_text())["comparisons"]
        assert f"| {one['with']}" in printed and f"{one['win_rate']:.1%} (" in printed
        if judge == "first":
            assert (one["wins"], one["ties"], one["losses"]) == (0, 8, 0), "a judge that only sees the position"
        else:
            lengths = [[len(text) for text in each["answers"]] for each in one["examples"]
                       if "!" not in "".join(each["answers"])]  # fmt: skip
            decided = one["wins"] + one["ties"] + one["losses"]
            assert one["prompts"] - decided == len(one["examples"]) - len(lengths)
            assert one["wins"] == sum(a > b for a, b in lengths)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 8), (0.9, 40), (0.0, 3), (1.0, 5)])
def test_the_interval_solves_the_equation_of_the_score_test(rate: float, count: int) -> None:
    for bound in wilson(rate, count):
        assert abs(bound - rate) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / count), abs=1e-6)


def test_prompts_without_a_verdict_do_not_count() -> None:
    def answers(*texts: str) -> list[Sampled]:
        points = [[0.0, 1.0], [0.0, None], [0.0, 0.5], [0.0, 1.0]]
        sources = [PromptRow(row, "p", {}, {}) for row in range(4)]
        rest = [[[text], [len(text)], [True], [None], ""] for text in texts]
        return [Sampled(source, *each, own) for source, each, own in zip(sources, rest, points)]

    found = statistics_of(answers("aaaa", "xy", "same", "only ours"), answers("aaab", "pqrs", "same"), 1)
    assert (found["prompts"], found["wins"], found["ties"], found["losses"]) == (3, 1, 1, 0)
    assert found["win_rate"] == 0.75 and found["mean_rewards"] == []
    assert [one["answers"][0] for one in found["examples"]] == ["xy", "aaaa"], "by length"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": "pairs"}, "rows='pairs': needs scores; set reward_funcs"),
        ({"rows": "pairs", "judge": "a:b"}, "num_generations=4: a judge compares two completions; set it to 2"),
        ({"threshold": 1.0, "reward_funcs": "a:b"}, "threshold=1.0: has an effect only with rows: unpaired"),
        ({"min_margin": 1.0, "rows": "unpaired", "reward_funcs": "a:b"}, "min_margin=1.0: has an effect only with"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("(", r"\(")):
        SampleConfig(**given)


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("sample", "policy --prompts empty.jsonl", "empty.jsonl"),
        ("sample", "policy --prompts answers.jsonl", "missing column prompt"),
        ("sample", "policy --prompts none.jsonl", "none.jsonl"),
        ("sample", "classifier --prompts prompts.jsonl", "RUN: classifier is a reward model"),
        ("sample", "policy --prompts chats.jsonl --reward_model_path classifier-no-template", "no chat template"),
        ("sample", "policy --prompts prompts.jsonl --reward_model_path three-labels", "num_labels=3"),
        ("sample", "policy --prompts prompts.jsonl --out rewards.py", "was not written by sample"),
        ("sample", "policy --prompts prompts.jsonl -n 1 --judge rewards.py:first", "completions of a prompt are"),
        ("sample", "policy --prompts prompts.jsonl -n 1 --as pairs --reward_funcs a:b", "completions of a prompt are"),
        (
            "sample",
            "policy --prompts prompts.jsonl --as pairs --min_margin 99 --reward_funcs rewards.py:letters",
            "no rows are left",
        ),
        ("compare", "policy --prompts prompts.jsonl", "nothing compares the answers"),
        ("compare", "policy --prompts prompts.jsonl --judge rewards.py:first", "pass other models to compare it"),
    ],
)
def test_what_cannot_work_ends_with_one_line(
    ranks: RankServer, world: Path, command: str, arguments: str, says: str
) -> None:
    done = run(ranks, world, command, *arguments.split(), check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.ranks[0].code == 1 and len(lines) == 1 and says in lines[0], done.stderr
    assert "Traceback" not in done.stderr
