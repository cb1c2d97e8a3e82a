"""Tokenized rows with a shared cache, and with a separate cache per node. Here, a node is a local rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS
from support.helpers import make_model

from tools.ranks import RankServer

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def found(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    done = ranks.run(DRIVERS / "node_caches.py", folder, make_model(folder / "model"), timeout=120)
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in done.ranks]


def test_a_shared_cache_has_one_writer(found: list[dict[str, Any]]) -> None:
    assert [entry["shared"]["tokenized"] for entry in found] == [1, 0]
    assert all(entry["shared"]["cache"] == ["both"] for entry in found)


def test_a_node_with_a_separate_cache_fills_it(found: list[dict[str, Any]]) -> None:
    assert [entry["apart"]["tokenized"] for entry in found] == [1, 1]
    assert [entry["apart"]["cache"] for entry in found] == [["node0"], ["node1"]]
    for entry in found:
        assert entry["apart"]["log"] == entry["shared"]["log"] == found[0]["shared"]["log"]
        assert entry["apart"]["left"] == ["deepspeed-alignment"], "nothing is left behind"


def test_stored_log_probs_need_no_second_copy(found: list[dict[str, Any]]) -> None:
    for entry in found:
        assert entry["precomputed"]["log"][0]["loss"] == pytest.approx(0.5)
        assert entry["precomputed"]["log"] == found[0]["precomputed"]["log"]


def test_nodes_with_different_rows_are_refused(found: list[dict[str, Any]]) -> None:
    for entry in found:
        assert "train_dataset: " in entry["other rows"]["error"] and "/unlike1/" in entry["other rows"]["error"]
        assert "the same data files" in entry["other rows"]["error"]
