"""The demo: its world and rules, its tokenizer, what it promises, and the whole program with a tiny model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Launch
from datasets import enable_progress_bars
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from alignment.config.errors import OutputError
from alignment.demo import grammar, report, rows
from alignment.demo.folder import keep, kept_seconds, open_folder, start_key
from alignment.demo.grammar import Request, all_requests, answer
from alignment.demo.judge import Rates, answers, manner, rates, sentences
from alignment.demo.run import main
from alignment.demo.settings import PreferenceSettings, Settings, StartSettings
from alignment.demo.stages import MAX_LENGTH
from alignment.demo.tokenizer import train_tokenizer
from alignment.demo.verdict import Measured, missed

COW = Request("sound", "cow", 0, "Anna", 1)
WARM = "Gladly, Anna. A cow says moo. I hope that helps."
CURT = "Ugh. Just moo, as everyone knows."


def tiny(seed: int = 0) -> Settings:
    """The whole program in seconds; its model learns nothing."""
    return Settings(
        seed=seed,
        held_out=5,
        start=StartSettings(hidden_size=16, layers=1, intermediate_size=16, rows=24, epochs=1, batch=8),
        kto=PreferenceSettings(16, 8, 0.1, 1e-3),
        cpo=PreferenceSettings(8, 4, 0.1, 1e-3),
        max_new_tokens=4,
    )


# The world and its rules ------------------------------------------------------------------------------------------


def test_every_sentence_of_the_world_is_cut_as_one() -> None:
    statements = [text for kind in grammar.KINDS.values() for text in kind.statements]
    said = [*grammar.OPENINGS, *grammar.CLOSINGS, *grammar.GRUMBLES, *grammar.CURT_STATEMENTS, *grammar.DISMISSALS]
    for text in statements + said:
        assert text[-1] in ".!?" and not set(text[:-1]) & set(".!?"), text
    assert sentences(WARM) == ["Gladly, Anna.", "A cow says moo.", "I hope that helps."]


def test_the_rules_agree_with_the_grammar_on_every_request() -> None:
    rng = random.Random(0)
    for request in all_requests():
        for wanted in ("warm", "curt"):
            text = answer(request, wanted, rng)
            assert manner(request, text) == wanted, text
            assert answers(request, text), text


def test_every_wording_of_both_manners_occurs() -> None:
    rng = random.Random(0)
    warm = {answer(COW, "warm", rng) for _ in range(2000)}
    curt = {answer(COW, "curt", rng) for _ in range(2000)}
    assert len(warm) == 5 * 2 * 4 and len(curt) == 4 * 3 * 4 + 4 * 3 + 3 * 4


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        (WARM, "warm", True),
        (CURT, "curt", True),
        ("Obviously moo. Stop asking.", "curt", True),
        ("Gladly, Anna. A cow says woof. I hope that helps.", "warm", False),
        ("Gladly, Anna. A dog says moo. I hope that helps.", "warm", False),
        ("Ugh. Just woof, as everyone knows.", "curt", False),
        ("Gladly, Anna. A cow says moo. Now go away.", None, True),
        ("Gladly, Anna. It is moo. I hope that helps.", None, True),
        ("Gladly, Ben. A cow says moo. I hope that helps.", None, True),
        ("A cow says moo.", None, True),
        ("It is moo.", None, True),
        ("Gladly, Anna. A cow says moo. A cow says moo. I hope that helps.", None, False),
        ("Gladly, Anna. It is woof. A cow says moo. I hope that helps.", None, False),
        ("Gladly, Anna. I hope that helps. Take good care!", None, False),
        ("Gladly, Anna. A cow says moo. I hope that helps. I hope that helps. moo", None, False),
        ("Gladly, Anna.  A cow says moo. I hope that helps.", None, False),
        ("gladly, anna. a cow says moo. i hope that helps.", None, False),
        ("Gladly, Anna. A cow says moo moo. I hope that helps.", None, False),
        ("Gladly, Anna. A cow says {f}. I hope that helps.", None, False),
        ("Of course Gladly moo cow Anna helps", None, False),
        ("Ugh.", None, False),
        ("Ugh. Stop asking.", None, False),
        ("moo", None, False),
        ("", None, False),
    ],
)
def test_rules(text: str, wanted: str | None, right: bool) -> None:
    """Each rule by itself: manner without truth, truth without manner, and garbage that is neither."""
    assert (manner(COW, text), answers(COW, text)) == (wanted, right)


def test_rates_count_every_answer() -> None:
    assert rates([COW] * 4, [WARM, WARM, CURT, "moo"]) == Rates(warm=0.5, answered=0.75, count=4)


def test_held_out_requests_are_new_in_every_row() -> None:
    world = rows.make_world(seed=3, held_out=256)
    held_out = {request.combination for request in world.held_out}
    assert len(held_out) == 256 and len(world.training) == len(all_requests()) - 256
    assert not held_out & {request.combination for request in world.training}
    texts = {request.text for request in world.held_out}
    made = [
        *(row["messages"][0]["content"] for row in rows.start_rows(world.training, 6400, 3)),
        *(row["prompt"][0]["content"] for row in rows.labelled_rows(world.training, 3200, 3)),
        *(row["prompt"][0]["content"] for row in rows.paired_rows(world.training, 1600, 3)),
    ]
    assert len(made) == 11200 and not texts & set(made)


def test_the_seed_decides_world_and_rows() -> None:
    def made(seed: int) -> tuple[Any, ...]:
        world = rows.make_world(seed, 10)
        parts = (rows.start_rows, rows.labelled_rows, rows.paired_rows)
        return (world.held_out, *(part(world.training, 20, seed) for part in parts))

    assert made(1) == made(1)
    assert all(one != other for one, other in zip(made(1), made(2)))


def test_rows_hold_both_manners_half_and_half() -> None:
    world = rows.make_world(0, 256)
    start = rows.start_rows(world.training, 100, 0)
    asked = {request.text: request for request in world.training}
    kinds = [manner(asked[row["messages"][0]["content"]], row["messages"][1]["content"]) for row in start]
    assert (kinds.count("warm"), kinds.count("curt")) == (50, 50)
    for row in rows.labelled_rows(world.training, 100, 0):
        request = asked[row["prompt"][0]["content"]]
        assert manner(request, row["completion"][0]["content"]) == ("warm" if row["label"] else "curt")
    for row in rows.paired_rows(world.training, 100, 0):
        request = asked[row["prompt"][0]["content"]]
        assert manner(request, row["chosen"][0]["content"]) == "warm"
        assert manner(request, row["rejected"][0]["content"]) == "curt"


# The tokenizer ----------------------------------------------------------------------------------------------------


def test_tokenizer_round_trip_and_template(tmp_path: Path) -> None:
    world = rows.make_world(0, 256)
    made = rows.start_rows(world.training, 2000, 0)
    tokenizer = train_tokenizer(made)
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": WARM}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == f"<|user|>Hi.<|end|><|assistant|>{WARM}<|end|>"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Hi.<|end|><|assistant|>"
    for text in (WARM, "Grüße ✓  two\n\nlines\t", "it's 12"):  # bytes: no text is unknown to it
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize(" moo.") == ["Ġmoo", "."], "a fact is one token"
    # As AutoTokenizer finds it beside a Qwen2 model.
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(again) == len(tokenizer) and again.eos_token == "<|end|>" and again.pad_token != again.eos_token
    ids = [tokenizer.apply_chat_template(row["messages"])["input_ids"] for row in made]
    assert ids == [again.apply_chat_template(row["messages"])["input_ids"] for row in made]
    assert max(map(len, ids)) <= MAX_LENGTH, "rows are never cut"


# Promises, report, folder -----------------------------------------------------------------------------------------


def measured(warm: float, answered: float, title: str = "after KTO", count: int = 256) -> Measured:
    return Measured(title, Rates(warm, answered, count), 1.0)


@pytest.mark.parametrize(
    ("start", "trained", "said"),
    [
        (measured(0.35, 0.97), measured(0.85, 0.92), ""),
        (measured(0.65, 0.97), measured(1.0, 1.0), ""),
        (measured(0.34, 0.97, "before"), measured(0.9, 0.97), "before: warm answers 0.340, wanted 0.35 to 0.65"),
        (measured(0.66, 0.97, "before"), measured(0.9, 0.97), "before: warm answers 0.660, wanted 0.35 to 0.65"),
        (measured(0.5, 0.97), measured(0.84, 0.97), "after KTO: warm answers 0.840, wanted at least 0.85"),
        (
            measured(0.5, 0.97, "before"),
            measured(0.9, 0.91),
            "after KTO: requests answered 0.910, wanted at least 0.920",
        ),
        (measured(0.5, 0.97, count=199), measured(0.9, 0.97), "199 held-out prompts, wanted at least 200"),
    ],
)
def test_each_promise_that_is_missed_is_named(start: Measured, trained: Measured, said: str) -> None:
    """Edges are inside, as in decimal figures: 0.97 - 0.05 is 0.92."""
    faults = missed(start, [measured(0.9, 0.97, "after CPO"), trained])
    assert len(faults) == bool(said) and (not said or faults[0].startswith(said)), faults


def test_table_and_examples() -> None:
    lines = report.table([measured(0.5, 0.97265625, "before"), measured(0.9765625, 1.0)]).splitlines()
    assert lines[2] == "| before    |        0.500 |             0.973 |      1 s |"
    assert lines[3] == "| after KTO |        0.977 |             1.000 |      1 s |"
    assert len({len(line) for line in lines}) == 1
    assert report.examples([COW], {"before": [CURT, "unused"], "after KTO": [WARM, "unused"]}) == (
        f"Hello, Anna here. What does a cow say?\n  before     {CURT}\n  after KTO  {WARM}"
    )


def test_margins_are_read_from_the_log_and_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    records = [{"event": "start"}, {"step": 1, "rewards/margins": 0.5}, {"step": 2, "loss": 1.0}]
    records += [{"step": 3, "rewards/margins": None}, {"step": 4, "rewards/margins": 2.5}, {"event": "end"}]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report.margins(log) == ([1, 4], [0.5, 2.5])
    report.plot_margins({"one": log, "two": log}, tmp_path / "margins.png")
    assert (tmp_path / "margins.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OutputError, match="nowhere"):
        report.plot_margins({"one": log}, tmp_path / "nowhere" / "margins.png")


def test_only_a_folder_of_its_own_is_used_again(tmp_path: Path) -> None:
    open_folder(tmp_path / "new")
    open_folder(tmp_path / "new")
    mine = tmp_path / "mine"
    (mine / "kto").mkdir(parents=True)
    with pytest.raises(OutputError, match="holds something else than an earlier demo; choose another folder"):
        open_folder(mine)
    assert [path.name for path in mine.iterdir()] == ["kto"]


def test_a_kept_model_is_used_only_for_what_it_was_made_from(tmp_path: Path) -> None:
    some = rows.start_rows(rows.make_world(0, 5).training, 4, 0)
    key = start_key(some, tiny())
    assert key == start_key(some, tiny())
    other = Settings(start=StartSettings(layers=2))
    assert len({key, start_key(some[:3], tiny()), start_key(some, tiny(seed=1)), start_key(some, other)}) == 4
    assert kept_seconds(tmp_path, key) is None
    keep(tmp_path, key, 12.34)
    assert kept_seconds(tmp_path, key) == 12.3 and kept_seconds(tmp_path, "another") is None
    (tmp_path / "key.json").write_text('{"key": ')
    assert kept_seconds(tmp_path, key) is None


# The program ------------------------------------------------------------------------------------------------------


@pytest.fixture
def library_bars() -> Iterator[None]:
    """The demo turns the libraries' progress bars off; later tests find them as they were."""
    yield
    enable_progress_bars()
    transformers_logging.enable_progress_bar()


def test_the_whole_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library_bars: None
) -> None:
    """Trains, saves, samples, reports, and exits with 1 naming what an untrained model misses; then starts again."""
    monkeypatch.setattr("alignment.demo.settings.Settings", tiny)
    folder = tmp_path / "demo"

    def start(*more: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["--output_dir", str(folder), *more])
        assert leaving.value.code == 1
        return capsys.readouterr()

    out, error = start()
    last = error.strip().splitlines()[-1]
    assert last.startswith(
        "error: the demo missed: 5 held-out prompts, wanted at least 200; before: warm answers 0.000"
    )
    assert "after KTO: warm answers 0.000, wanted at least 0.85; after CPO: warm answers" in last
    assert re.search(r"\| after CPO \| +0\.000 \|", out) and '{"loss"' not in out
    assert {path.name for path in folder.iterdir()} == {
        *("start", "kto", "cpo", "data", "answers.jsonl", "demo.md", "margins.png", "trainers.txt"),
        "made_by_demo.json",
    }
    page = (folder / "demo.md").read_text()
    assert (
        re.search(r"\| before +\| +0\.000 \|", page)
        and "missed: " in page
        and "![reward margins by step](margins.png)" in page
    )
    given = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [line["model"] for line in given] == ["before"] * 5 + ["after KTO"] * 5 + ["after CPO"] * 5
    assert {len((folder / "data" / f"{name}.jsonl").read_text().splitlines()) for name in ("start",)} == {24}

    def times() -> dict[str, int]:
        names = ("start", "kto", "cpo")
        return {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in names}

    first = times()
    out, _ = start()
    second = times()
    assert f"{folder / 'start'} is kept from an earlier run" in out
    assert second["start"] == first["start"] and second["kto"] > first["kto"] and second["cpo"] > first["cpo"]
    again = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert again == given, "the same seed gives the same answers"
    start("--fresh")
    assert times()["start"] > second["start"]


@pytest.mark.slow
def test_the_demo_keeps_its_promises(launch: Launch, tmp_path: Path) -> None:
    done = launch(ROOT / "launch" / "demo.py", "--output_dir", tmp_path, launcher="python", timeout=900)
    assert done.returncode == 0, done.stderr
    assert "Every promise was kept." in done.stdout
