"""A pytest plugin for TRL's tests: the package ``trl`` that they import, a time limit, and what cannot run here.

The package provides the public names of ``alignment``. It has the modules that exist in the checkout, so that ``from
trl.trainer.kto_trainer import KTOTrainer`` works like ``from trl import KTOTrainer``. A name that ``alignment`` does
not have is a :class:`Missing`: it can be imported, but a test that uses it is skipped with the name as the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PRIVATE = "private helper: "
_LIMIT = 150  # seconds
_LEFT_OUT = ("vision", "vllm", "liger", "accelerator", "flash", "kernels", "ampere", "llm-blender", "wandb")


class Missing:
    """A name, in full, that exists in ``trl`` but not in ``alignment``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Skip the test."""
        pytest.skip(PRIVATE + self._name)

    def __getattr__(self, name: str) -> Any:
        """Skip the test, except for attributes that Python itself looks up."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Allow subclasses to be defined; instantiating them skips the test."""
        return (type(self._name.rpartition(".")[2], (), {"__init__": self.__call__}),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, because ``datasets`` hashes functions before they are called."""
        return Missing, (self._name,)


class _Module(ModuleType):
    """A module of the shim."""

    def __getattr__(self, name: str) -> Any:
        import alignment

        if name.startswith("__"):
            raise AttributeError(name)
        if _FINDER.find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("is_") and name.endswith("_available"):
            package = name.removeprefix("is_").removesuffix("_available")
            return lambda: package != "liger_kernel" and importlib.util.find_spec(package) is not None
        if name in alignment.__all__ or name in _OF_TRL:
            return _OF_TRL.get(name) or getattr(alignment, name)
        return Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that exist in the checkout."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module if a checkout has it."""
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname in _MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Create an empty module, whose names are looked up on access."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


_FINDER, _MODULES = _Finder(), set[str]()
_OF_TRL: dict[str, Any] = {}  # what alignment imports from the installed release of TRL


def install(checkout: Path) -> None:
    """Make ``import trl`` find the shim in this process, even if TRL is installed."""
    import alignment
    from alignment.compat.trl.scripts import NAMES

    for name in sorted(NAMES) if importlib.util.find_spec("trl") is not None else ():
        with contextlib.suppress(ImportError):  # names that only other releases have
            _OF_TRL[name] = getattr(alignment, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    files = [file.relative_to(checkout) for file in (checkout / "trl").rglob("*.py")]
    _MODULES.update(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
    sys.meta_path.insert(0, _FINDER)


def pytest_addoption(parser: Any) -> None:
    """Register the plugin's option."""
    parser.addoption("--checkout", type=Path, required=True, help="the checkout of TRL")


def pytest_configure(config: Any) -> None:
    """Install the substitute before anything is imported from TRL."""
    install(config.getoption("--checkout"))
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
