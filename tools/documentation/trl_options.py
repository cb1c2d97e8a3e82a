"""The page docs/reference/trl-options.md: options of TRL and transformers, from the tables that the checks use."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transformers import TrainingArguments

from alignment.cli.help import default_text
from alignment.compat.trl.names import older_names
from alignment.compat.trl.table import REMOVED, TransformersOptions
from alignment.compat.trl.verdicts import Verdict, verdict_of
from alignment.config.fields import option_fields
from alignment.config.registry import METHODS
from tools.documentation.page import table, with_generated


def trl_options_page() -> str:
    """Return the text of docs/reference/trl-options.md."""
    return with_generated("trl-options.md", _lines())


def _lines() -> Iterator[str]:
    shared = {field.name for field in option_fields(TransformersOptions)}
    yield from ("## Options of `TrainingArguments`", "")
    yield from table("option | status", _rows(sorted({*_training_arguments(), *shared})))
    yield from ("", "## Options of TRL's configurations", "")
    yield from table("option | methods | status", _rows(sorted(_of_trl() - shared), methods=True))
    yield from ("", "## Other names", "")
    yield "These names are aliases that take the same values. Setting both names to different values is an error.\n"
    yield from table("name | alias of", ((f"`{older}`", name) for older, name in sorted(_names())))
    yield from ("", "## Rejected names", "")
    removed = ((f"`{name}`", f"{instead[0].upper()}{instead[1:]}") for name, instead in sorted(REMOVED.items()))
    yield from table("name | instead", removed)


def _training_arguments() -> set[str]:
    """Return the options of transformers' ``TrainingArguments`` that are options here."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return names & {field.name for cls in METHODS.values() for field in option_fields(cls)}


def _of_trl() -> set[str]:
    """Return the options that are judged, or of which TRL has another default."""
    judged = {field.name for cls in METHODS.values() for field in option_fields(cls) if verdict_of(field) is not None}
    return judged | ({name for cls in METHODS.values() for name in cls.TRL_DEFAULTS} - _training_arguments())


def _rows(names: Iterable[str], methods: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield a row per option, or several rows if methods treat it differently."""
    for name in names:
        by_text: dict[str, list[str]] = {}
        for method, cls in METHODS.items():
            for field in (each for each in option_fields(cls) if each.name == name):
                by_text.setdefault(_text(verdict_of(field)), []).append(method)
        for text, owners in by_text.items():
            yield f"`{name}`", *([", ".join(owners)] if methods else ()), text + _other_defaults(name, owners)


def _text(verdict: Verdict | None) -> str:
    if verdict is None:
        return "*supported*"
    if verdict.values is None:
        return f"*accepted*: {verdict.reason}"
    return f"*must be* {_values(verdict.values)}: {verdict.reason}"


def _values(values: Collection[Any]) -> str:
    shown = ("unset" if value is None else f"`{str(value).lower()}`" for value in values if value not in ("", [], {}))
    return " or ".join(shown) or "unset"


def _other_defaults(name: str, owners: list[str]) -> str:
    theirs = {method: METHODS[method].TRL_DEFAULTS.get(name) for method in owners}
    other = {method: default for method, default in theirs.items() if default is not None}
    if not other:
        return ""
    fields = {method: {each.name: each for each in option_fields(METHODS[method])}[name] for method in other}
    pairs = {(default, default_text(fields[method])) for method, default in other.items()}
    if len(pairs) == 1 and set(other) == set(METHODS):
        default, ours = pairs.pop()
        return f"; defaults to `{ours}` (`{default}` in TRL)"
    said = (f"`{default_text(fields[name])}` for {name} (`{default}` in TRL)" for name, default in other.items())
    return "; defaults to " + ", ".join(said)


def _names() -> set[tuple[str, str]]:
    """Return the aliases, each with the option that it stands for."""
    found = {(older, f"`{name}`") for cls in METHODS.values() for older, name in older_names(cls).items()}
    found |= {("gamma_beta_ratio", "`simpo_gamma`, which is this ratio times `beta`")}
    return found | {("use_transformers_paged", "`rollout_backend`: `continuous` if true")}
