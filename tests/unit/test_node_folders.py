"""Folders that another node has filled, as seen from this node."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from alignment.checkpoint import node_folders
from alignment.checkpoint.node_folders import check_filled
from alignment.config.errors import DataError
from alignment.engines.launch_env import init_distributed

pytestmark = pytest.mark.usefixtures("own_process_group")


def test_a_folder_that_appears_late_on_a_shared_disk_is_waited_for(tmp_path: Path) -> None:
    init_distributed(use_cpu=True)
    cache = tmp_path / "cache"
    late = threading.Timer(0.3, (cache / "rows").mkdir, kwargs={"parents": True})
    late.start()
    check_filled(cache, ["rows"], "train_dataset")
    late.join()


def test_a_folder_that_never_appears_is_reported_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_distributed(use_cpu=True)
    monkeypatch.setattr(node_folders, "_PATIENCE_S", 0.0)
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match="train_dataset: .* not in the cache of .*give every node the same"):
        check_filled(tmp_path, ["rows", "others"], "train_dataset")
