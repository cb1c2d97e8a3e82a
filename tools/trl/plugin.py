"""A pytest plugin for TRL's tests: the substitute package ``trl``, a time limit, and what cannot run here."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.trl import shim

_LIMIT = 150  # seconds
_LEFT_OUT = ("vision", "vllm", "liger", "accelerator", "flash", "kernels", "ampere", "llm-blender", "wandb")


def pytest_addoption(parser: Any) -> None:
    """Register the plugin's option."""
    parser.addoption("--checkout", type=Path, required=True, help="the checkout of TRL")


def pytest_configure(config: Any) -> None:
    """Install the shim before anything is imported from TRL."""
    shim.install(config.getoption("--checkout"))
    for name in ("slow", "low_priority", "require_torch_accelerator", "is_staging_test"):
        config.addinivalue_line("markers", f"{name}: a marker of TRL")
    importlib.import_module("transformers.testing_utils")  # imports transformers once more
    transformers: Any = importlib.import_module("transformers")
    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText  # for the tests of older releases


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip TRL's slow tests, and those that need what a CPU without a network does not have."""
    for item in items:
        said = " ".join(str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")).lower()
        if item.get_closest_marker("slow") or "VLM" in item.nodeid or any(word in said for word in _LEFT_OUT):
            item.add_marker(pytest.mark.skip(reason="slow, about images, or needs a GPU or another package"))


@pytest.fixture(autouse=True)
def _limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test in a folder of its own, for a limited time."""
    monkeypatch.chdir(tmp_path)

    def stop(*_: Any) -> None:
        raise TimeoutError(f"timed out after {_LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT)
    yield
    signal.alarm(0)


@pytest.fixture
def lazy_shared_datadir(request: Any) -> Path:
    """Replace pytest-datadir's fixture, for tests that only read."""
    return next(parent / "data" for parent in Path(request.node.fspath).parents if (parent / "data").is_dir())
