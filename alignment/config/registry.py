"""The methods by name, as import paths: the command line, the public names and the tables of options derive from it.

:mod:`alignment.methods` enters its own. A method from outside is named as ``file.py:Trainer`` or
``package.module:Trainer``, or is entered by an installed package under the entry point group ``alignment.methods``.
From Python it needs no entry: its trainer class is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeAlias, TypeVar

from alignment.config.errors import Leaving, OptionError, did_you_mean, setting
from alignment.config.fields import option_fields
from alignment.config.lookup import FAILURES, load_named, raised

GROUP = "alignment.methods"
_NAME = "_method_name"  # on options: by which name their method was asked for
# An options class is derived from AlignmentConfig; options.py imports this module, so its name cannot be used here.
OptionsClass: TypeAlias = type[Any]
Options = TypeVar("Options")


@dataclass(frozen=True)
class Entry:
    """Where a method's classes are, as ``module:Class``; its options import without torch, its trainer does not."""

    options: str
    trainer: str


class Paper(NamedTuple):
    """What a model card cites."""

    title: str
    url: str


class Registry(Mapping[str, OptionsClass]):
    """Method name -> its options class, imported when it is asked for. Iterates over the entered names."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def enter(self, name: str, options: str, trainer: str) -> None:
        """Make a method known by ``name``."""
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
        """The same options, which remember the name that their method was asked for by."""
        vars(options)[_NAME] = name
        return options

    def trainer(self, options: Any) -> Any:
        """The trainer class of a run with these options.

        Raises:
            OptionError: they are of no method that is known here.
        """
        name = name_of(options)
        if self.is_outside(name):
            return self._loaded(name)
        if name not in self.entries or type(options) is not self[name]:
            raise OptionError(
                f"method={name!r}: no trainer is known for {type(options).__name__}; call the trainer class itself"
            )
        return _imported(self.entries[name].trainer)

    def is_outside(self, name: str | None) -> bool:
        """Whether a name is that of a method from outside, which has to be imported for its options to be known."""
        return name is not None and name not in self.entries and (":" in name or name in _installed())

    def check(self, name: str) -> None:
        """Whether there is such a method; nothing is imported.

        Raises:
            OptionError: there is not; with the nearest one that there is.
        """
        if name in self.entries or self.is_outside(name):
            return
        known = [*self.entries, *_installed()]
        raise OptionError(
            f"{setting('method', name)}: no such method{did_you_mean(name, known)}; set one of {', '.join(known)}, or "
            "file.py:Trainer"
        )

    def _loaded(self, name: str) -> Any:
        self.check(name)
        trainer = load_named(name, "method") if ":" in name else _imported_entry(_installed()[name])
        options = getattr(trainer, "config_class", None)
        if not isinstance(trainer, type) or not dataclasses.is_dataclass(options):
            raise OptionError(
                f"{setting('method', name)}: it is no trainer class; name one that is derived from AlignmentTrainer, "
                "with a config_class and a method_class"
            )
        if not getattr(options, "method", ""):
            raise OptionError(
                f"{setting('method', name)}: its config_class has no name; set method = ... in that class"
            )
        return trainer


METHODS = Registry()


def name_of(options: Any) -> str:
    """What to give as ``method`` for a run like this one: its name, or the path that it was asked for by."""
    return str(vars(options).get(_NAME, options.method))


def option_names(cls: OptionsClass) -> set[str]:
    """The names of all options of one method."""
    return {field.name for field in option_fields(cls)}


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _imported_entry(entry: EntryPoint) -> Any:
    several = [other.value for other in entry_points(group=GROUP, name=entry.name) if other.value != entry.value]
    if several:
        raise OptionError(
            f"{setting('method', entry.name)}: several packages provide it: {', '.join([entry.value, *several])}; "
            "name one of these"
        )
    try:
        return entry.load()
    except Leaving:
        raise
    except FAILURES as error:
        raise OptionError(
            f"{setting('method', entry.name)}: importing {entry.value} raised {raised(error)}; correct or uninstall "
            "the package that provides it"
        ) from error
