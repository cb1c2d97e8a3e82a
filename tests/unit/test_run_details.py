"""Details of runs that real runs seldom reach: messages at a stop, other numbers of ranks, statistics, requests."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from datasets import Dataset

from alignment import KTOConfig, OnlineDPOConfig
from alignment.cli import slurm, submit, train_job
from alignment.cli.slurm import SlurmError
from alignment.config.errors import LastCheckpointError
from alignment.data.packing import Packing, pack_rows
from alignment.methods.online_dpo import MOST_WITHOUT_PAIRS, REMEDIES, OnlineDPOMethod
from alignment.online.window import OnlineWindowPass
from alignment.references.adapter import AdapterReference
from alignment.references.engine import EngineReference
from alignment.references.precomputed import PrecomputedReference
from alignment.reporting.run_content import _samples
from alignment.run.activity import ACTIVITY
from alignment.training import sampling, stopping
from alignment.training.bad_steps import BadSteps
from alignment.training.data import PreparedData
from alignment.training.hub.contents import model_files
from alignment.training.run_manifest import token_lengths
from alignment.training.run_state import RandomAtStart


@pytest.mark.parametrize(
    ("step", "options", "newest", "guarded", "said"),
    [
        (0, {}, 0, True, "no step was completed, so there is nothing to save"),
        (1, {"save_strategy": "no"}, 1, True, "nothing was saved, because save_strategy is no"),
        (4, {}, 3, True, "checkpoint-4 could not be written (full); the run can only be resumed from an earlier one"),
        (4, {"save_only_model": True}, 4, True, "checkpoint-4 contains only the model (save_only_model), so the run"),
        (4, {}, 4, True, "checkpoint-4 is complete; run the same command with --resume_from_checkpoint latest to res"),
        (4, {}, 4, False, "checkpoint-4 is complete; call train(resume_from_checkpoint=True) to resume"),
    ],
)
def test_what_a_stopped_run_leaves(
    step: int, options: dict[str, Any], newest: int, guarded: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ACTIVITY, "guarded", guarded)
    state = SimpleNamespace(global_step=step)
    context: Any = SimpleNamespace(args=KTOConfig("out", **options), state=state, output_dir=Path("out"))
    writer: Any = SimpleNamespace(newest=newest, failure="full")
    assert stopping._kept(context, writer).startswith(said)


def test_random_streams_after_a_change_of_the_number_of_ranks() -> None:
    def drawn(seed: int, step: int, rank: int, state: Any) -> float:
        streams = RandomAtStart(seed)
        random.seed(0)
        if state is not None:
            streams.load_state_dict(state)
        streams.restore(step, rank)
        value = random.random()
        streams.restore(step, rank)  # no effect any more
        return value if random.random() != value else -1

    unchanged, state = drawn(1, 2, 0, None), RandomAtStart(1).redistributed([{"a": 1}], 0)
    seeded = [drawn(*place, state) for place in ((1, 2, 0), (2, 2, 0), (1, 3, 0), (1, 2, 1))]
    assert len({-1, unchanged, *seeded}) == 6 and drawn(1, 2, 0, state) == seeded[0]


def test_completions_of_the_initial_policy_on_another_number_of_ranks() -> None:
    states = [{"epoch": 2, "starts": {"a": [(0, "x"), (2, "x")]}}, {"epoch": 2, "starts": {"a": [(1, "z")], "b": []}}]
    found = OnlineWindowPass.redistributed(None, states, 1)  # type: ignore[arg-type]
    assert found == {"epoch": 2, "starts": {"a": [(0, "x"), (2, "x"), (1, "z")], "b": []}}


@pytest.mark.parametrize(
    ("sets", "strategy", "fails"), [({"": 1}, "no", False), ({"": 1}, "steps", False), ({}, "no", True)]
)
def test_what_a_command_does_after_training(
    sets: dict[str, int], strategy: str, fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without evaluations during the run, there is one at the end; a model is saved without its last checkpoint."""
    done: list[Any] = []

    class Trainer:
        data, output_dir, method = SimpleNamespace(eval=sets), tmp_path, SimpleNamespace(task=None)

        def train(self) -> None:
            if fails:
                raise LastCheckpointError("full")

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda **given: done.append((name, given) if given else name)

    monkeypatch.setattr(train_job, "build_trainer", lambda options: Trainer())
    options = KTOConfig("out", eval_strategy=strategy)  # type: ignore[arg-type]
    with (
        pytest.raises(LastCheckpointError, match=f"^full; the model itself is saved in {tmp_path}$")
        if fails
        else contextlib.nullcontext()
    ):
        train_job.run(options)
    evaluated = ["evaluate", ("write_report", {"show": False})] if sets and strategy == "no" else []
    assert done == ["save_model", *evaluated, "save_state", "close"]


def test_answers_of_sbatch_and_interrupts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: Any = SimpleNamespace(options=["--a"], passed_on=["--b"], script=lambda: "text")
    called: list[Any] = []
    for answer, number in (("41;cluster\n", "41"), ("42\n", "42")):
        monkeypatch.setattr(slurm, "call", lambda *given, **more: called.append((given, more)) or answer)  # noqa: B023
        assert slurm.submit(job, "--c") == number
    assert called[0] == (("sbatch", "--parsable", "--a", "--b", "--c"), {"given": "text"})
    monkeypatch.setattr(slurm, "call", lambda *given, **more: "queued as 43")
    with pytest.raises(SlurmError, match="^sbatch --parsable: expected the ID of the job, got 'queued as 43'; check"):
        slurm.submit(job)
    monkeypatch.undo()
    monkeypatch.setattr(slurm, "_TIMEOUT_S", 0.05)
    with pytest.raises(SlurmError, match="^sleep 5: no response within 0.05 s; check SLURM's controller$"):
        slurm.call("sleep", "5")
    monkeypatch.setattr(submit, "_run", mock.Mock(side_effect=KeyboardInterrupt))
    for arguments, code, out, err in ((["a.yaml"], 130, "", "interrupted: check `squeue --me` for a submitted job\n"),
                                      (["--help"], 0, "usage: P RECIPE ", "")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            submit.main(arguments, "P")
        found = capsys.readouterr()
        assert (left.value.code or 0, found.err) == (code, err) and found.out.startswith(out)


def test_advice_about_windows_without_pairs() -> None:
    method = OnlineDPOMethod(OnlineDPOConfig("out"))
    first, second, *_ = REMEDIES
    history = [{f"pairs/{first}": 0.4, f"pairs/{second}": 0.3}, {f"pairs/{second}": 0.3}]
    least = int(100 * MOST_WITHOUT_PAIRS)
    assert least == 100 * MOST_WITHOUT_PAIRS and method.advice_at_end(least - 1, 100, history) == []
    (said,) = method.advice_at_end(least, 100, history)
    assert said.startswith(f"{least} of 100 windows had no pair") and said.endswith(f"{second}: {REMEDIES[second]}")


def test_statistics_and_sources_of_packs() -> None:
    rows = Dataset.from_list(
        [{"prompt_ids": [1] * 2, "completion_ids": [2] * n, "scored": [True] * n, "first": False, "row": 10 + n}
         for n in (1, 2, 6)]
    )  # fmt: skip
    packs = pack_rows(rows, Packing("bfd", 8))
    data = PreparedData("d", "k", rows, packs.table, None, (None,), packs)  # type: ignore[arg-type]
    lengths = token_lengths(data, ["completion_ids"])
    assert {name: (found["min"], found["max"]) for name, found in lengths.items()} == {
        "pack": (7, 8), "trained on per pack": (3, 6), "sequence": (3, 8),
    }  # fmt: skip
    whole = next(number for number in range(2) if packs.tokens[number] == 8)
    assert data.sources([whole]) == [17] and data.sources([1 - whole]) == [12, 13]
    assert data.sources([0, 1]) == [12, 13, 17]


def test_completions_with_another_column_than_at_the_first_step(tmp_path: Path) -> None:
    lines = '{"step": 0, "prompt": "p", "policy": "a"}\n{"step": 5, "prompt": "p", "policy": "b", "reference": "r"}\n'
    (tmp_path / "completions.jsonl").write_text(lines)
    (group,) = _samples(tmp_path / "completions.jsonl")
    assert list(group.samples) == [("p", {"policy, step 0": "a", "policy, step 5": "b", "reference": "r"}, {})]


def test_a_configuration_that_is_not_utf8_is_read_for_its_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"auto_map": "\xff"}')
    (tmp_path / "modeling_own.py").write_text("")
    assert model_files(tmp_path, object()) == ["config.json", "modeling_own.py"]


def test_a_skipped_window_is_counted_from_1() -> None:
    told: list[str] = []
    steps = BadSteps(KTOConfig("out"), lambda plan: [], told.append, lambda line: None)
    steps.omitted = [(2, 5)]
    plan: Any = SimpleNamespace(epoch=2, step=5)
    assert steps.omits(plan, 31) and told == ["step 31: skipped window 6 of epoch 3, no update was made"]


def test_the_model_that_answers_for_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "computing_with", lambda scorer, adapter: (scorer, adapter))
    adapter, engine, stored = map(object.__new__, (AdapterReference, EngineReference, PrecomputedReference))
    adapter.policy, adapter.given = SimpleNamespace(scorer="scorer"), SimpleNamespace(adapter="ref")  # type: ignore
    assert sampling.speaker_of(adapter) == (adapter.policy, ("scorer", "ref"))
    engine.engine = "engine"  # type: ignore
    found = sampling.speaker_of(engine)
    assert found is not None and found[0] == "engine" and isinstance(found[1], contextlib.nullcontext)
    assert sampling.speaker_of(stored) is sampling.speaker_of(None) is None
