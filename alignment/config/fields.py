"""How an option is declared, and the one typed conversion of its value, from YAML, the command line or Python.

Values are converted by pydantic to the type that the field declares: ``"5e-7"`` becomes a number, ``"true"`` a
boolean, a JSON text a mapping. What does not fit is refused in one line that names key, value and type.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from alignment.config.errors import OptionError, did_you_mean, one_line, setting


class Strategy(str, Enum):
    """When something happens during training.

    The names and values are those of transformers' ``IntervalStrategy``, and members of the two compare equal, so
    that transformers' callbacks read it as their own without this floor importing transformers.
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"

    def __str__(self) -> str:
        return self.value


class SaveStrategy(str, Enum):
    """When the model is saved; the same, with the values of transformers' ``SaveStrategy``."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"

    def __str__(self) -> str:
        return self.value


class Read(NamedTuple):
    """Annotates a type that transformers' ``HfArgumentParser`` can parse with the one that values are converted to."""

    hint: Any


_Type = TypeVar("_Type")
_Class = TypeVar("_Class", bound=type)
if TYPE_CHECKING:
    Shared: TypeAlias = Annotated[_Type, "hidden"]
    Keywords: TypeAlias = dict[str, Any] | None
    TextOrKeywords: TypeAlias = str | dict[str, Any] | None
    Texts: TypeAlias = str | list[str]
    OptionalTexts: TypeAlias = str | list[str] | None
    TextKeywords: TypeAlias = dict[str, str] | None
    ListOrKeywords: TypeAlias = list[Any] | dict[str, Any] | None
    Numbers: TypeAlias = float | list[float]
    TextOrTruth: TypeAlias = str | bool | None
else:
    # An option that scripts have among arguments of their own as well, which HfArgumentParser then fills: an InitVar,
    # which `dataclasses.fields` leaves out and `dataclasses.replace` keeps.
    Shared = dataclasses.InitVar
    Keywords = Annotated[dict[str, Any] | str | None, Read(dict[str, Any] | None)]
    TextOrKeywords = Annotated[dict[str, Any] | str | None, Read(str | dict[str, Any] | None)]
    Texts = Annotated[str, Read(str | list[str])]
    OptionalTexts = Annotated[str | None, Read(str | list[str] | None)]
    TextKeywords = Annotated[dict[str, str] | str | None, Read(dict[str, str] | None)]
    ListOrKeywords = Annotated[str | None, Read(list[Any] | dict[str, Any] | None)]
    Numbers = Annotated[float, Read(float | list[float])]
    TextOrTruth = Annotated[str | None, Read(str | bool | None)]


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    older: tuple[str, ...] = (),
    several: bool = False,
    switch: bool = False,
    shown: bool = True,
) -> Any:
    """A dataclass field; its metadata are what ``HfArgumentParser`` hands on to ``argparse``.

    Args:
        default: its value where none is given.
        help: one sentence.
        choices: for text options, the values that it may take.
        older: further names of it, each of which takes the same values.
        several: whether a command line may give several values.
        switch: whether it is true where a command line names it without a value, though it may be unset.
        shown: false for a secret, which is left out where the options are printed.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = choices
    if older:
        metadata["aliases"] = [f"--{name}" for name in older]
    if several:
        metadata["nargs"] = "+"
    if switch:
        metadata |= {"nargs": "?", "const": True}
    return dataclasses.field(default=default, metadata=metadata, repr=shown)


def sharing(cls: _Class) -> _Class:
    """To stand above ``@dataclass``: the annotations of :data:`Shared` options become those of what they hold.

    ``typing.get_type_hints`` of Python 3.10 refuses an ``InitVar``.
    """
    for name, text in cls.__annotations__.items():
        if text.startswith("Shared["):
            cls.__annotations__[name] = text[len("Shared[") : -1]
    return cls


def option_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The options of a class or an object, also those that ``dataclasses.fields`` leaves out: :data:`Shared` ones."""
    shown = {field.name for field in dataclasses.fields(cls)}
    declared: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__
    return [field for name, field in declared.items() if name in shown or "help" in field.metadata]


def keeping_shared(post_init: Callable[[Any], None]) -> Callable[..., None]:
    """A ``__post_init__`` that keeps the values of :data:`Shared` options, which ``__init__`` hands it in order."""

    @functools.wraps(post_init)
    def with_shared(self: Any, *shared: Any) -> None:
        shown = {field.name for field in dataclasses.fields(self)}
        names = [field.name for field in option_fields(self) if field.name not in shown]
        vars(self).update(zip(names, shared))
        post_init(self)

    return with_shared


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a long list of names that stays readable."""
    return tuple(text.split())


_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping (on the command line as JSON)",
    list: "a list of texts",
    Strategy: "one of no, steps, epoch",
    SaveStrategy: "one of no, steps, epoch, best",
}


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """The types that values of a class's fields are converted to."""
    declared = typing.get_type_hints(cls, include_extras=True)
    return {name: _read(hint) for name, hint in declared.items()}


def _read(hint: Any) -> Any:
    further = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((each.hint for each in further if isinstance(each, Read)), hint)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # a class of a script, in a configuration derived from ours
        return TypeAdapter(Any)


def members(hint: Any) -> tuple[type, ...]:
    """The plain types of an annotation: ``str | dict[str, Any] | None`` gives ``(str, dict, NoneType)``."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def expected(hint: Any) -> str:
    """A type in words."""
    words = " or ".join(_EXPECTED[part] for part in members(hint) if part in _EXPECTED)
    return words.replace("texts", "numbers") if "list[float]" in str(hint) else words


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is not JSON.
        OptionError: a key is there twice, a number cannot be one, or values are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, OptionError):
        raise
    except ValueError as error:
        raise OptionError(one_line(error)) from None
    except RecursionError:
        raise OptionError("it is nested too deeply; write out what is meant") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a mapping; of two equal keys the first would be lost without a word."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise OptionError(f"{setting(key, value)}: the key is there twice; remove one")
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise OptionError(f"{name} is not a JSON value; write a number, or leave the key out")


def _prepared(value: Any, kinds: tuple[type, ...]) -> Any:
    """The value with the notations undone that pydantic would misread."""
    if isinstance(value, os.PathLike) and str in kinds:
        return os.fspath(value)
    if value is False and {Strategy, SaveStrategy} & set(kinds):
        return "no"  # YAML 1.1 reads a bare `no` as false
    if isinstance(value, Enum):
        return value.value  # also transformers' own, whose values are the same
    if isinstance(value, str):
        if type(None) in kinds and str not in kinds and value.strip().lower() in ("none", "null"):
            return None
        if {str, bool} <= set(kinds) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"  # a text would do as well, and nobody means that
        opening = value.lstrip()[:1]
        if (dict in kinds and (opening == "{" or str not in kinds)) or (list in kinds and opening == "["):
            return parse_json(value)
    return value


def _refusal(name: str, value: Any, hint: Any, default: Any) -> OptionError:
    """The message for a value that does not fit its type."""
    text = f"{setting(name, value)}: expected {expected(hint)}"
    if value is None:
        return OptionError(f"{setting(name, value)}: cannot be empty; leave it out for its default {str(default)!r}")
    if default is None:
        return OptionError(f"{text}; leave it out for none")
    return OptionError(f"{text}; set it to a value such as {str(default)!r}")


def convert(name: str, value: Any, hint: Any, default: Any = None) -> Any:
    """The value as the type ``hint`` asks.

    Raises:
        OptionError: it does not fit; the message names key, value and the expected type.
    """
    kinds = members(hint)
    numeric_only = (int in kinds or float in kinds) and bool not in kinds
    # Of these pydantic would make numbers, texts and lists.
    if (isinstance(value, bool) and numeric_only) or isinstance(value, (bytes, set)):
        raise _refusal(name, value, hint, default)
    if isinstance(value, str) and "\0" in value:
        raise OptionError(f"{setting(name, value)}: it has a NUL character in it; remove that")
    try:
        result = _adapter(hint).validate_python(_prepared(value, kinds))
    except (ValidationError, json.JSONDecodeError):
        raise _refusal(name, value, hint, default) from None
    except OptionError as error:
        raise OptionError(f"{setting(name, value)}: {error}") from None
    if isinstance(result, float) and not math.isfinite(result):
        raise OptionError(f"{setting(name, value)}: expected a finite number")
    return result


def parse_optim_args(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """The further arguments of the optimizer as a mapping.

    Args:
        value: a mapping, ``"key=value,key=value"`` (numbers, booleans, ``none`` and bracketed
            lists become what they say), or None.

    Raises:
        OptionError: a part without ``=``, or a key given twice.
    """
    if not isinstance(value, str):
        return dict(value or {})
    result: dict[str, Any] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", value):  # a comma inside brackets belongs to the value
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not (key and equals and text):
            raise OptionError(
                f"{setting('optim_args', value)}: {part.strip()!r} is not key=value; write key=value,key=value"
            )
        if key in result:
            raise OptionError(f"{setting('optim_args', value)}: {key} is there twice; keep one")
        result[key] = _plain_value(text)
    return result


def _plain_value(text: str) -> Any:
    """A number, boolean, list or none where the text is one, else the text."""
    try:
        return float(text) if any(c in text for c in ".eE") else int(text)
    except ValueError:
        pass
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    if text[0] in "([" and text[-1] in ")]":
        return tuple(_plain_value(part.strip()) for part in text[1:-1].split(",") if part.strip())
    return text


def convert_options(options: Any) -> None:
    """Convert every field of an options object in place, and check those that have a list of choices.

    Raises:
        OptionError: the first value that does not fit.
    """
    declared = hints(options.__class__)
    for field in option_fields(options):
        value = convert(field.name, getattr(options, field.name), declared[field.name], field.default)
        choices = field.metadata.get("choices")
        if choices is not None and value is not None and value not in choices:
            raise OptionError(
                f"{setting(field.name, value)}: not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
            )
        setattr(options, field.name, value)
