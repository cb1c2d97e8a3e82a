"""The HTML report: what it shows of a run's files, that it escapes all of it, and that it loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.report_folders import NASTY, nasty_run, whole_run, write_completions, write_options
from support.run_folders import at, entry, start, write_log, write_status

from alignment.reporting.charts import charts
from alignment.reporting.page import as_markdown, render
from alignment.reporting.run_content import comparison, read_content


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self.texts.append("" if tag == "wbr" else " ")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass
        self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def test_content_of_a_report(tmp_path: Path) -> None:
    whole_run(tmp_path)
    content = read_content(tmp_path)
    html, sections = render(content.page), {one.title: one for one in content.page.sections if one}
    titles = "Warnings and advice, Curves, Final metrics, Phases, Data, Options, Attempts, Checkpoints, Versions"
    assert ", ".join(sections) == titles
    facts = {"Model": "some/model", "Steps": "100 of 100", "Time": "50.0 s", "Ranks": "4", "Reference": "offload"}
    assert facts.items() <= content.page.facts.items() and content.page.tiles[0] == ("Loss", "0.01", "from 0.05")
    assert [kind for kind, _ in sections["Warnings and advice"].messages] == ["warning", "advice"]
    assert [one.marks for one in sections["Curves"].charts] == [[(40, "resumed"), (100, "best checkpoint")]] * 3
    assert "complete best" in Page(html).text and html.count("<svg") == html.count("<figure") == 3
    assert "hub_token" not in html and "hf_abc" not in html


def test_a_comparison_begins_with_what_differs(tmp_path: Path) -> None:
    """Options, and the best value of each metric of which less or more is better, wherever it was in the run."""
    for name, rate, losses in (("one", 0.2, (0.5, 0.25, 0.75)), ("two", 0.3, (0.5, 0.5, 0.125)), ("three", 0.2, ())):
        entries = [
            {**entry(step, step, step, kl=1.0, **{"rewards/accuracies": loss}), "loss": loss}
            for step, loss in enumerate(losses, 1)
        ]
        write_log(tmp_path / name, [{**start(), "run_name": name}, *entries, {"eval_loss": 0.5, "step": 3}])
        write_options(tmp_path / name, learning_rate=rate, num_train_epochs=2)

    def first_tables() -> list[list[list[str]]]:
        page = comparison([read_content(tmp_path / name) for name in ("one", "two", "three")])
        options, best, *rest = filter(None, page.sections)
        assert ["Runs", "Curves", "Training metrics"] == [one.title for one in rest[:3]]
        return [[[str(cell) for cell in row] for row in one.cards[0].tables[0].rows] for one in (options, best)]

    tables = first_tables()
    mark = ' <span class="badge good">best</span>'
    assert tables[0] == [["learning_<wbr>rate", "0.2", "0.3", "0.2"]]
    assert tables[1] == [
        ["loss", "0.25 (step 2)", f"0.125 (step 3){mark}", ""],
        ["rewards/<wbr>accuracies", f"0.75 (step 3){mark}", "0.5 (step 1)", ""],
        ["eval_<wbr>loss", *[f"0.5 (step 3){mark}"] * 3],
    ]
    write_options(tmp_path / "two", beta=0.3, num_train_epochs=2)
    assert [sum(mark in cell for cell in row) for row in first_tables()[1]] == [0, 1, 0], "losses of another scale"


def test_the_end_of_a_run(tmp_path: Path) -> None:
    write_log(tmp_path, [start(), entry(40, 40, 40)])
    for values, state, tone in (
        ({"state": "failed", "error": "the GPU is out of memory"}, "failed", "bad"),
        ({"state": "preempted", "signal": "SIGUSR1"}, "preempted", "warn"),
        ({"state": "running"}, "lost", "bad"),
    ):
        write_status(tmp_path, **values)
        page = read_content(tmp_path).page
        assert page.state == state and page.note is not None and page.note[0] == tone
    assert read_content(tmp_path, state="finished").page.state == "finished", "which status.json does not say yet"


def test_time_is_without_pauses(tmp_path: Path) -> None:
    resume = {"event": "resume", "step": 40, "attempt": 2, "checkpoint": "checkpoint-40", "time": at(1000)}
    write_log(tmp_path, [start(), entry(40, 40, 400), resume, entry(50, 1020, 500)])
    assert read_content(tmp_path).page.facts["Time"] == "1 min 00 s"


# Nothing in it is markup, and nothing is loaded ---------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_markup_in_a_run_is_escaped(tmp_path: Path, several: bool) -> None:
    nasty_run(tmp_path)
    content = read_content(tmp_path)
    html = render(comparison([content, content]) if several else content.page)
    page = Page(html)
    assert html.count(NASTY) == 0 and "onerror=alert" not in html
    assert not {tag for tag, _ in page.tags} & {"img", "script", "iframe", "object", "embed", "form", "base"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count("<img src=x onerror=") >= (4 if several else 15)
    assert as_markdown(content.page).count(NASTY) == 18, "in Markdown, text is shown as it is"


def test_the_page_loads_no_resources(tmp_path: Path) -> None:
    whole_run(tmp_path)
    html = render(read_content(tmp_path).page)
    assert not re.findall(r"https?:|//[\w.]+/|@import|@font-face", re.sub(r'xmlns(:xlink)?="[^"]*"', "", html))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    given = [attributes for _, attributes in Page(html).tags]
    addresses = {one[name] for one in given for name in ("href", "src", "srcset", "xlink:href") if name in one}
    assert {address for address in addresses if not (address or "").startswith("#")} == {"data:,"}
    policy = next(one["content"] for one in given if one.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


# Options -------------------------------------------------------------------------------------------------------------


def test_options_without_defaults_and_secrets(tmp_path: Path) -> None:
    write_log(tmp_path, [start()])
    keywords = {"token": "hf_abcdefghijkl", "revision": "main"}
    write_options(
        tmp_path, beta=0.2, model_name_or_path="some/model", model_init_kwargs=keywords, hub_token="x" * 30,
        reward_url="https://me:secret@host/v1", dry_run=True, dataset_name="d" * 301, hub_model_id="h" * 300,
    )  # fmt: skip
    assert read_content(tmp_path).options == {
        "beta": ("0.2", "0.1"),
        "model_name_or_path": ("some/model", "unset"),
        "model_init_kwargs": ('{"revision": "main"}', "unset"),
        "reward_url": ("https://‹hidden›host/v1", ""),
        "dataset_name": ("d" * 299 + "…", "unset"),
        "hub_model_id": ("h" * 300, "unset"),
    }


def test_damaged_files_shorten_the_report(tmp_path: Path) -> None:
    whole_run(tmp_path)
    for name in ("options.json", "trainer_state.json", "completions.jsonl"):
        for content in ("{", "[1]", '{"step": "x"}'):
            (tmp_path / name).write_text(content)
            assert read_content(tmp_path).page.facts["Steps"] == "100 of 100"


# Curves --------------------------------------------------------------------------------------------------------------


def test_training_and_evaluation_share_a_chart() -> None:
    history = [
        {"step": 1, "loss": 1.0, "rewards/chosen": 0.1, "rewards/rejected": 0.0},
        {"step": 1, "eval_loss": 1.5, "eval_rewards/chosen": 0.2, "eval_rewards/rejected": 0.1},
        {"step": 2, "loss": None},
        {"step": 2, "eval_easy_loss": 1.25, "eval_easy_runtime": 1.0, "eval_easy_nll_loss": 3.0},
        {"step": 2, "eval_hard_loss": 1.75, "eval_hard_runtime": 1.0},
    ]
    loss, rewards = charts(history)
    assert [(one.label, one.color, one.evaluation, list(one.points)) for one in loss.series] == [
        ("training", 1, False, [(1, 1.0)]),
        ("evaluation", 2, True, [(1, 1.5)]),
        ("evaluation (easy)", 3, True, [(2, 1.25)]),
        ("evaluation (hard)", 4, True, [(2, 1.75)]),
    ]
    assert [(one.label, one.color) for one in rewards.series] == [
        ("chosen", 1), ("chosen, evaluation", 1), ("rejected", 2), ("rejected, evaluation", 2),
    ]  # fmt: skip


# Completions, warnings and the best checkpoint -----------------------------------------------------------------------


def test_completions_before_and_after(tmp_path: Path) -> None:
    """By evaluation set; the same prompt may be in two of them."""
    rows = [
        {"step": step, "dataset": name, "prompt": prompt, "policy": f"{prompt} {step}", "reference": "r", "score": 0.5}
        for step in (0, 5, 10)
        for name in ("eval", "eval_x")
        for prompt in "ab"
    ]
    write_completions(tmp_path, rows)
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"prompt": "p"}\n{"step": 20, "pro')  # being written
    write_log(tmp_path, [start()])
    groups = next(one.cards for one in read_content(tmp_path).page.sections if one.title == "Completions")
    title = "Before and after: steps 0 and 10"
    assert [(group.title, group.lead) for group in groups] == [(title, ""), (f"{title}, x", "")]
    for group in groups:
        assert list(group.samples) == [
            (
                name,
                {"policy, step 0": f"{name} 0", "policy, step 10": f"{name} 10", "reference": "r"},
                {"score": "0.5"},
            )
            for name in "ab"
        ]
