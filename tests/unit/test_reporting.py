"""Metric sums and means, the log file, the progress bar."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from alignment.reporting import progress
from alignment.reporting.metrics import MetricHistory, MetricSums, means
from alignment.reporting.progress import Progress, draws_bars, evaluation_line, say

CPU = torch.device("cpu")
NAMES = ("loss", "kl", "rewards/chosen", "rewards/rejected")


def sums(first_rank: bool = True) -> MetricSums:
    return MetricSums(NAMES, CPU, first_rank)


def test_sums_and_counts_add_up() -> None:
    one = sums()
    one.add("rewards/chosen", torch.tensor(1.5, requires_grad=True), torch.tensor(2))
    one.add("rewards/chosen", -0.5, 1)
    assert one.items() == {"loss": (0, 0), "kl": (0, 0), "rewards/chosen": (1.0, 3.0), "rewards/rejected": (0, 0)}
    assert one.values.dtype == torch.float64 and one.values.shape == (2, 4) and not one.values.requires_grad
    with pytest.raises(KeyError):
        one.add("rewards/other", 1.0, 1)


def test_sums_are_exact_over_many_small_parts() -> None:
    one = sums()
    for _ in range(1000):
        one.add("rewards/chosen", torch.tensor(1e8), 1)
        one.add("rewards/chosen", torch.tensor(2.0**-10), 1)
    assert one.items()["rewards/chosen"][0] == 1e11 + 1000 / 1024


def test_two_ranks_add_up_to_one_window() -> None:
    """A loss comes in parts from every rank and micro-batch, a KL is known to every rank; both are one per window."""
    ranks = [sums(True), sums(False)]
    for number, one in enumerate(ranks):
        for part in (0.25, 0.5):
            one.add_part("loss", torch.tensor(part + number))
        one.add_once("kl", torch.tensor(0.75))
        one.add("rewards/chosen", float(number), number)  # the first rank has none of this class
    ranks[0].values += ranks[1].values
    items = ranks[0].items()
    assert items == {"loss": (3.5, 1), "kl": (0.75, 1), "rewards/chosen": (1, 1), "rewards/rejected": (0, 0)}
    assert means(items) == {"loss": 3.5, "kl": 0.75, "rewards/chosen": 1.0}


def test_margins_only_where_both_classes_are() -> None:
    both = {"rewards/chosen": (3.0, 2.0), "rewards/rejected": (-4.0, 4.0)}
    assert means(both) == {"rewards/chosen": 1.5, "rewards/rejected": -1.0, "rewards/margins": 2.5}
    assert means({**both, "rewards/rejected": (0.0, 0.0)}) == {"rewards/chosen": 1.5}
    assert means({**both, "rewards/chosen": (0.0, 0.0)}) == {"rewards/rejected": -1.0}
    assert means({}) == {}


def test_history_weights_windows_by_their_counts() -> None:
    history = MetricHistory()
    history.add({"loss": (1.0, 1), "rewards/chosen": (6.0, 3), "rewards/rejected": (0.0, 0)})
    assert "rewards/margins" not in means({"rewards/chosen": (6.0, 3), "rewards/rejected": (0.0, 0)})
    history.add({"loss": (2.0, 1), "rewards/chosen": (0.0, 0), "rewards/rejected": (-8.0, 4)})
    history.add({"loss": (6.0, 1), "rewards/chosen": (4.0, 1), "rewards/rejected": (1.0, 3)})
    expected = {"loss": 3.0, "rewards/chosen": 2.5, "rewards/rejected": -1.0, "rewards/margins": 3.5}
    assert history.pop() == expected
    assert history.pop() == {}, "a log starts over"
    history.add({"loss": (4.0, 1)})
    assert history.pop() == {"loss": 4.0}


def test_history_resumes_from_its_state() -> None:
    history, resumed = MetricHistory(), MetricHistory()
    history.add({"loss": (1.0, 1), "rewards/chosen": (6.0, 3)})
    resumed.add({"loss": (100.0, 1), "kl": (5.0, 1)})  # replaced, not added to
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for one in (history, resumed):
        one.add({"loss": (4.0, 1), "rewards/chosen": (0.0, 1)})
    assert history.pop(asked=False) == resumed.pop() == {"loss": 2.5, "rewards/chosen": 1.5}
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert resumed.rest() == history.rest() == {"loss": 2.5, "rewards/chosen": 1.5}
    del (state := history.state_dict())["unasked"]  # as older checkpoints have it
    resumed.load_state_dict(state)
    assert resumed.rest() == {}


def test_the_rest_is_what_no_log_has_taken() -> None:
    history = MetricHistory()
    pair = {"rewards/chosen": (6.0, 3), "rewards/rejected": (-8.0, 4)}
    history.add(pair)
    assert history.rest() == {"rewards/chosen": 2.0, "rewards/rejected": -2.0, "rewards/margins": 4.0}
    assert history.rest(sums=True)["rewards/chosen_sum"] == 6.0
    history.pop()
    assert history.rest() == {}
    history.add(pair)
    history.pop(asked=False)
    history.add({"rewards/chosen": (1.0, 1)})  # the run continued after all
    assert history.rest() == {"rewards/chosen": 1.0}
    history.pop(asked=False)
    assert history.rest() == {"rewards/chosen": 1.0} and history.pop() == {}
    assert history.rest() == {}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "draws_bars", lambda disabled: not disabled)


@pytest.mark.usefixtures("terminal")
def test_progress_shows_the_newest_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(3, "kto", False, CPU)
    bar.advance({"loss": 0.12345, "kl": 2.0, "rewards/margins": -1.5, "logps/chosen": -3.0}, tokens=100)
    bar.advance({"loss": 0.5, "rewards/accuracies": 0.75}, tokens=50)
    say("step 2: a note")
    bar.advance()
    bar.close()
    out, err = capsys.readouterr()
    assert "step 2: a note" in out
    last = err.split("\r")[-1]
    assert all(part in last for part in ("3/3", "loss=0.5", "acc=0.75", "tok/s=", "mem="))
    assert "logps" not in err and bar._tokens == 150
    assert "kl" not in last and "margin" not in last, "metrics of an earlier step"


def test_a_disabled_bar_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(3, "kto", False, CPU)
    bar.advance({"loss": 0.5}, tokens=5)
    assert capsys.readouterr() == ("", "")
    say("a note")
    assert capsys.readouterr() == ("a note\n", "")


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draws_bars(False), "of pytest, which is none"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert draws_bars(False) and not draws_bars(True)
    monkeypatch.setattr(sys, "stderr", None)  # of a process without one
    assert not draws_bars(False)
    monkeypatch.setitem(sys.modules, "ipykernel", object())  # in a notebook, bars are widgets
    assert draws_bars(False) and not draws_bars(True)


def test_a_line_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short numbers; the speed since the previous line, and the time left at the mean speed since the start."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "memory_gib", lambda device: 61.234)
    record = {"loss": 0.123456789, "rewards/margins": -1.5, "logps/chosen": -3.0, "learning_rate": 5e-7 / 3}
    steps = Progress(120, "kto", False, CPU, done=20)
    assert "left" not in steps.line(record, 0.0), "no step was taken since the restart"
    for seconds, tokens in ((10.0, 5000), (40.0, 1_000_000)):
        now[0] += seconds
        steps.advance(record, tokens=tokens)
        line = steps.line(record, 1 / 3)
    assert line == (
        "step  22/120: epoch 0.333, loss 0.1235, margin -1.5, lr 1.67e-07, 25,000 tokens/s, 61.2 GiB, 40 min 50 s left"
    )
    done = Progress(1, "sft", False, CPU)
    done.advance()
    assert "left" not in done.line({}, 1.0) and "lr" not in done.line({}, 1.0)


def test_a_line_of_an_evaluation() -> None:
    metrics = {"eval_a_loss": 0.123456789, "eval_a_rewards/margins": 1.0, "eval_b_kl": 3.0}
    metrics |= {"eval_a_runtime": 63.0, "eval_b_runtime": 2.0}
    line = evaluation_line(5, 120, "eval_a", metrics)
    assert line == "step   5/120, eval_a: loss 0.1235, margin 1, 1 min 03 s"
    assert evaluation_line(0, 0, "eval_b", metrics) == "eval_b: kl 3, 2.0 s"


@pytest.mark.usefixtures("terminal")
def test_consumed_items_update_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(7, "eval", False, CPU)
    items = bar.watch(["a", "b"], 2)
    assert [*items, items[0]] == ["a", "b", "a"] and len(items) == 2
    with pytest.raises(IndexError):
        items[2]
    bar.close()
    assert "3/4" in capsys.readouterr().err.split("\r")[-1]
