"""The tables of what fits on a GPU are what the memory plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pages.blocks import ROOT

from alignment.config.dtypes import planning_for
from alignment.planning import activations
from tools.documentation.memory_tables import CONFIGURATIONS, DENSE, GPU, PAGES, Row, written

BILLIONS = {"Llama-3.1-8B": 8.030, "Qwen3-8B": 8.191, "Qwen2.5-14B": 14.770, "Qwen2.5-32B": 32.764}  # as published


@pytest.fixture
def uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was counted before."""
    monkeypatch.setattr(activations, "_FOLDER", tmp_path)


@pytest.mark.parametrize("model", DENSE)
def test_the_configurations_have_the_published_sizes(model: str) -> None:
    config = json.loads((CONFIGURATIONS / model / "config.json").read_text())
    hidden, heads, shared = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    each = config.get("head_dim", hidden // heads)
    attention = 2 * hidden * each * (heads + shared)
    if config["model_type"] == "qwen2":
        attention += each * (heads + 2 * shared)  # biases
    layer = attention + 3 * hidden * config["intermediate_size"]
    total = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden
    assert total / 1e9 == pytest.approx(BILLIONS[model], abs=0.001)


@pytest.mark.ci
def test_a_cell(uncounted: None) -> None:
    """All cells are compared by the next test, which takes minutes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    with planning_for(GPU):
        peak = Row("Qwen3-8B", quantized=True).peak(1024)
    assert f"\n| Qwen3-8B | 4-bit | {peak:.1f} |" in text, "run python -m tools.documentation.memory_tables"


@pytest.mark.parametrize(
    ("page", "title"),
    [pytest.param(page, title, marks=pytest.mark.slow) for page, tables in PAGES.items() for title in tables],
)
def test_a_table(page: str, title: str) -> None:
    committed = (ROOT / page).read_text(encoding="utf-8")
    assert committed == written(committed, page, title), "run python -m tools.documentation.memory_tables"
