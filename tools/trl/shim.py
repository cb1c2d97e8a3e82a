"""The package ``trl`` that TRL's tests import, which provides the public names of ``alignment``.

It has the modules that exist in the checkout, so that ``from trl.trainer.kto_trainer import KTOTrainer`` works like
``from trl import KTOTrainer``. A name that ``alignment`` does not have is a :class:`Missing`: it can be imported, but
a test that uses it is skipped with the name as the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PRIVATE = "private helper: "


class Missing:
    """A name, in full, that exists in ``trl`` but not in ``alignment``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Skip the test."""
        import pytest

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
