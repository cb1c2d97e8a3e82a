"""Pages of docs/reference/ say what the code does: the command line, and the names of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.pages.blocks import ROOT
from support.pages.metrics import documented, matches

from alignment.cli.help import grouped_fields, title_of
from alignment.config.registry import METHODS
from alignment.online.ranking import RewardRanker
from alignment.reporting.metrics import means
from alignment.rollout.vllm.rollout import VLLMRollout
from tools.documentation.__main__ import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), f"run `make tables`: {name} is not what the code says"


def _declared() -> Iterator[str]:
    """Every name that methods, the window pass and the loop add up, and what is derived from them."""
    yield from ("loss", "aux_loss")
    for entry in METHODS:
        method = METHODS.trainer(METHODS[entry](output_dir="out")).method_class
        names = dict.fromkeys(method.metrics, (1.0, 1.0))
        yield from means(names, method.logs_sums)
        yield method.reduced_windows
    rewards = type("Rewards", (), {"names": ["NAME"], "sources": []})()
    yield from RewardRanker(rewards).metrics
    for path in ("training/loop.py", "training/bad_steps.py"):
        text = (ROOT / "alignment" / path).read_text()
        yield from re.findall(r'"(train_\w+|num_\w+|tokens_per_second|bad_steps|overflows)"', text)
    yield from ("retries", *VLLMRollout.metrics)


def test_the_page_of_metrics_has_those_that_the_code_declares() -> None:
    declared = set(_declared())
    assert sorted(name for name in declared if not any(matches(name, one) for one in documented())) == []
    others = {"step", "epoch", "time", "learning_rate", "grad_norm", "reduced_windows", "rewards/NAME/mean"}
    others |= {f"eval_{what}" for what in ("runtime", "samples_per_second", "steps_per_second")}
    assert sorted(documented() - declared - others) == []


def _defaults(page: str) -> Iterator[tuple[str, str]]:
    """Return the options in the table of a guide, each with its default as it is written there."""
    text = (ROOT / "docs" / "guides" / page).read_text(encoding="utf-8")
    for line in text.partition("\n| option | default |")[2].partition("\n\n")[0].splitlines()[2:]:
        names, defaults = line.split("|")[1:3]
        found, values = re.findall(r"`(\w+)`", names), re.findall(r"(?:^|, )\W*([\w.-]+)", defaults.partition(";")[0])
        yield from zip(found, values * len(found) if len(values) == 1 else values, strict=True)


@pytest.mark.parametrize("method", METHODS)
def test_defaults_in_guides(method: str) -> None:
    options = METHODS[method](output_dir="out")
    for name, written in _defaults(f"{method.replace('_', '-')}.md"):
        value = getattr(options, name)
        expected = float(written) if re.match(r"[\d.]", written) else written
        is_unset = value in (None, "auto") and written in ("unset", "auto", "as")  # "as `packing`"
        assert is_unset or str(value).lower() == written or value == expected, f"{name}: {written}"


def test_the_sections_of_each_method() -> None:
    """As the introduction of the page of options says."""
    everyone = set(METHODS)
    titles = {name: {title_of(base) for base, _ in grouped_fields(METHODS[name])} for name in METHODS}
    sections = {title: {name for name in METHODS if title in titles[name]} for title in set().union(*titles.values())}
    for name in METHODS:
        assert sections.pop(METHODS[name].TITLE) == {name}
    assert sections.pop("Lengths") == everyone - {"online_dpo"} and sections.pop("Tokenizer") == {"reward", "sft"}
    assert sections.pop("Reference") == {"kto", "dpo"}
    assert sections.pop("Rollout") == sections.pop("Rewards") == {"online_dpo"}
    assert all(methods == everyone for methods in sections.values()) and "Output" in sections
