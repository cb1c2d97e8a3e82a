"""The registry of methods by name. The command line, the public names and the option tables are derived from it.

:mod:`alignment.methods` registers the built-in methods. A third-party method is named as ``file.py:Trainer`` or
``package.module:Trainer``, or registered by an installed package under the entry point group ``alignment.methods``.
From Python, no registration is needed: call its trainer class.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeAlias, TypeVar

from alignment.compat.trl.names import older_names
from alignment.compat.trl.table import REMOVED
from alignment.config.errors import OptionError, did_you_mean, listing, setting
from alignment.config.fields import once_per_class, option_fields
from alignment.config.lookup import load_named, packaged_names, running

GROUP = "alignment.methods"
_NAME = "_method_name"  # attribute of options: the name by which their method was requested
# A subclass of AlignmentConfig, whose name cannot be used here, because options.py imports this module.
OptionsClass: TypeAlias = type[Any]
Options = TypeVar("Options")


class Paper(NamedTuple):
    """A paper that a model card cites."""

    title: str
    url: str


class Registry(UserDict[str, Any]):
    """A mapping from method name to options class, imported on access. Iterates over the registered names."""

    @property
    def entries(self) -> dict[str, tuple[str, str]]:
        """``module:Class`` of the options, whose module does not import torch, and of the trainer of each method."""
        return self.data

    def enter(self, name: str, options: str, trainer: str) -> None:
        """Register the two classes of a method, as ``module:Class``, under ``name``."""
        self.data[name] = (options, trainer)

    def __getitem__(self, name: str) -> OptionsClass:
        found: OptionsClass = _imported(self.data[name][0]) if name in self.data else self._loaded(name).config_class
        return found

    def named(self, options: Options, name: str) -> Options:
        """Record in the options the name by which their method was requested, and return them."""
        vars(options)[_NAME] = name
        return options

    def trainer(self, options: Any) -> Any:
        """Return the trainer class for these options. Raises :class:`OptionError` if there is none."""
        name = name_of(options)
        if self.is_outside(name):
            return self._loaded(name)
        if name not in self.data or type(options) is not self[name]:
            kind = type(options).__name__
            raise OptionError(f"method={name!r}: no trainer is registered for {kind}; call the trainer class directly")
        return _imported(self.data[name][1])

    def is_outside(self, name: str | None) -> bool:
        """Whether a name is that of a third-party method, whose options are known only after importing it."""
        return name is not None and name not in self.data and (":" in name or name in _installed())

    def check(self, name: str) -> None:
        """Raise :class:`OptionError` if there is no such method, without importing it."""
        if name not in self.data and not self.is_outside(name):
            known = [*self.data, *_installed()]
            instead = f"set one of {listing(known)}, or file.py:Trainer{did_you_mean(name, known)}"
            if name in packaged_names("recipes"):
                instead = f"it is a recipe, which is passed before the options: train {name}"
            raise OptionError(f"{setting('method', name)}: unknown method; {instead}")

    def _loaded(self, name: str) -> Any:
        self.check(name)
        given = setting("method", name)
        if ":" in name:
            trainer = load_named(name, "method")
        else:
            entry = entry_points(group=GROUP)[name]
            with running(f"{given}: importing {entry.value}", "fix or uninstall the package that provides it"):
                trainer = entry.load()
        options = getattr(trainer, "config_class", None)
        if not isinstance(trainer, type) or not dataclasses.is_dataclass(options):
            raise OptionError(f"{given}: not a trainer class; its config_class has to be a dataclass of options")
        if not getattr(options, "method", ""):
            raise OptionError(f"{given}: its config_class has no name; set method = ... in that class")
        return trainer


METHODS = Registry()


def name_of(options: Any) -> str:
    """Return the value of ``method`` for these options: the method's name, or the path of a third-party method."""
    return str(vars(options).get(_NAME, options.method))


@once_per_class
def option_names(cls: OptionsClass) -> frozenset[str]:
    """Return the names of all options of a method."""
    return frozenset(field.name for field in option_fields(cls))


def check_names(cls: OptionsClass, names: Mapping[str, Any]) -> None:
    """Raise :class:`OptionError` for the first name that is neither an option of a class nor an alias of one."""
    known = option_names(cls) | older_names(cls).keys()
    for name, value in names.items():
        if name in known:
            continue
        instead = REMOVED.get(name)
        owner = next((method for method, other in METHODS.items() if name in option_names(other)), None)
        why = f"an option of method {owner}, not of {cls.method}; remove it or use {owner}"
        if owner is None or instead:
            near = f"; {instead}" if instead else did_you_mean(name, known) or "; --help lists the options"
            why = f"unknown option{near}"
        raise OptionError(f"{setting(name, value)}: {why}")


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _installed() -> set[str]:
    return entry_points(group=GROUP).names
