"""The registry of methods by name. The command line, the public names and the option tables are derived from it.

:mod:`alignment.methods` registers the built-in methods. A third-party method is named as ``file.py:Trainer`` or
``package.module:Trainer``, or registered by an installed package under the entry point group ``alignment.methods``.
From Python, no registration is needed: call its trainer class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeAlias, TypeVar

from alignment.config.errors import OptionError, did_you_mean, listing, setting
from alignment.config.fields import once_per_class, option_fields
from alignment.config.lookup import load_named, running

GROUP = "alignment.methods"
_NAME = "_method_name"  # attribute of options: the name by which their method was requested
# A subclass of AlignmentConfig, whose name cannot be used here, because options.py imports this module.
OptionsClass: TypeAlias = type[Any]
Options = TypeVar("Options")


class Entry(NamedTuple):
    """The classes of a method, as ``module:Class``. The module of the options must not import torch."""

    options: str
    trainer: str


class Paper(NamedTuple):
    """A paper that a model card cites."""

    title: str
    url: str


class Registry(Mapping[str, OptionsClass]):
    """A mapping from method name to options class, imported on access. Iterates over the registered names."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def enter(self, name: str, options: str, trainer: str) -> None:
        """Register a method under ``name``."""
        self.entries[name] = Entry(options, trainer)

    def __getitem__(self, name: str) -> OptionsClass:
        if name in self.entries:
            return _imported(self.entries[name].options)
        options: OptionsClass = self._loaded(name).config_class
        return options

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def named(self, options: Options, name: str) -> Options:
        """Record in the options the name by which their method was requested, and return them."""
        vars(options)[_NAME] = name
        return options

    def trainer(self, options: Any) -> Any:
        """Return the trainer class for these options.

        Raises:
            OptionError: the options belong to no known method.
        """
        name = name_of(options)
        if self.is_outside(name):
            return self._loaded(name)
        if name not in self.entries or type(options) is not self[name]:
            kind = type(options).__name__
            raise OptionError(f"method={name!r}: no trainer is registered for {kind}; call the trainer class directly")
        return _imported(self.entries[name].trainer)

    def is_outside(self, name: str | None) -> bool:
        """Whether a name is that of a third-party method, whose options are known only after importing it."""
        return name is not None and name not in self.entries and (":" in name or name in _installed())

    def check(self, name: str) -> None:
        """Check that there is such a method, without importing it.

        Raises:
            OptionError: there is no such method; the message suggests the closest name.
        """
        if name not in self.entries and not self.is_outside(name):
            known = [*self.entries, *_installed()]
            instead = f"set one of {listing(known)}, or file.py:Trainer{did_you_mean(name, known)}"
            raise OptionError(f"{setting('method', name)}: unknown method; {instead}")

    def _loaded(self, name: str) -> Any:
        self.check(name)
        given = setting("method", name)
        trainer = load_named(name, "method") if ":" in name else _entry_point(name, given)
        options = getattr(trainer, "config_class", None)
        if not isinstance(trainer, type) or not dataclasses.is_dataclass(options):
            raise OptionError(f"{given}: not a trainer class; its config_class has to be a dataclass of options")
        if not getattr(options, "method", ""):
            raise OptionError(
                f"{given}: its config_class does not define the method's name; set method = ... in that class"
            )
        return trainer


METHODS = Registry()


def name_of(options: Any) -> str:
    """Return the value of ``method`` for these options: the method's name, or the path of a third-party method."""
    return str(vars(options).get(_NAME, options.method))


@once_per_class
def option_names(cls: OptionsClass) -> frozenset[str]:
    """Return the names of all options of a method."""
    return frozenset(field.name for field in option_fields(cls))


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _installed() -> set[str]:
    return entry_points(group=GROUP).names


def _entry_point(name: str, given: str) -> Any:
    """Import the class of a method that an installed package registers."""
    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(entries) > 1:
        raise OptionError(f"{given}: provided by several packages; set method to one of {listing(entries)}")
    ((value, entry),) = entries.items()
    with running(f"{given}: importing {value}", "fix or uninstall the package that provides it"):
        return entry.load()
