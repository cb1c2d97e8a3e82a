"""The package ``trl`` that TRL's tests import: its names are the public ones of ``alignment``.

A module of it exists where the checkouts have one, so that ``from trl.trainer.kto_trainer import KTOTrainer`` works
as ``from trl import KTOTrainer`` does. A name that ``alignment`` does not have is a :class:`Missing`: importing it is
harmless, and a test that uses it is left out, with the name as the reason.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PRIVATE = "private helper: "
_AVAILABLE = {"math_verify": "math_verify", "llm_blender": "llm_blender", "liger_kernel": ""}


class Missing:
    """A name that is in ``trl`` and not in ``alignment``.

    Args:
        name: where a test imports it from.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _leave_out(self) -> Any:
        import pytest

        pytest.skip(PRIVATE + self._name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Leave the test out."""
        return self._leave_out()

    def __getattr__(self, name: str) -> Any:
        """Leave the test out, but for what Python itself looks up."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._leave_out()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class derived from it can be defined; making an object of it leaves the test out."""
        return (type(self._name.rpartition(".")[2], (), {"__init__": self.__call__}),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions are hashed by ``datasets`` before they are called."""
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
            return lambda: _installed(_AVAILABLE.get(package, package))
        if name in alignment.__all__:
            return getattr(alignment, name)
        return Missing(f"{self.__name__}.{name}")


def _installed(package: str) -> bool:
    return bool(package) and importlib.util.find_spec(package) is not None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that the checkouts have."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module, if a checkout has it."""
        if fullname not in self.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module, whose names are looked up when they are asked for."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


_FINDER = _Finder()


def modules(checkout: Path) -> set[str]:
    """The names of all modules of a checkout's package."""
    files = [file.relative_to(checkout) for file in (checkout / "trl").rglob("*.py")]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}


def install(checkouts: Iterable[Path]) -> None:
    """Let ``import trl`` find the shim from now on in this process; an installed TRL is not looked at."""
    for checkout in checkouts:
        _FINDER.modules |= modules(checkout)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
