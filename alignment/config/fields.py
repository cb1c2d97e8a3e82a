"""How an option is declared, and the one typed conversion of its value, from YAML, the command line or Python.

pydantic converts values to the declared type of the field: ``"5e-7"`` becomes a number, ``"true"`` a boolean, a JSON
string a mapping. For invalid values, the error names the key, the value and the expected type in one line.
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

    Names and values are those of transformers' ``IntervalStrategy``, and members of the two compare equal, so that
    transformers' callbacks accept it although this layer does not import transformers.
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"

    def __str__(self) -> str:
        return self.value


class SaveStrategy(str, Enum):
    """When the model is saved, with the values of transformers' ``SaveStrategy``."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"

    def __str__(self) -> str:
        return self.value


class Read(NamedTuple):
    """Annotates a type that ``HfArgumentParser`` can parse with the type that values are converted to."""

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
    # An option that scripts also declare in argument classes of their own, which HfArgumentParser then fills. It is an
    # InitVar, which `dataclasses.fields` omits and `dataclasses.replace` preserves.
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
    """Declare an option as a dataclass field, whose metadata ``HfArgumentParser`` passes on to ``argparse``.

    Args:
        default: default value.
        help: help text.
        choices: possible values of a string.
        older: aliases, which accept the same values.
        several: whether the command line accepts several values.
        switch: whether the option without a value means true on the command line, although it can be unset.
        shown: false for secrets, which are omitted when options are printed.
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
    """Class decorator, applied before ``@dataclass``, that replaces :data:`Shared` annotations by the type they hold.

    ``typing.get_type_hints`` of Python 3.10 does not support ``InitVar``.
    """
    for name, text in cls.__annotations__.items():
        if text.startswith("Shared["):
            cls.__annotations__[name] = text[len("Shared[") : -1]
    return cls


def option_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the options of a class or object, including :data:`Shared` ones, which ``dataclasses.fields`` omits."""
    shown = {field.name for field in dataclasses.fields(cls)}
    declared: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__
    return [field for name, field in declared.items() if name in shown or "help" in field.metadata]


def keeping_shared(post_init: Callable[[Any], None]) -> Callable[..., None]:
    """Wrap a ``__post_init__`` to store the values of :data:`Shared` options, which ``__init__`` passes in order."""

    @functools.wraps(post_init)
    def with_shared(self: Any, *shared: Any) -> None:
        shown = {field.name for field in dataclasses.fields(self)}
        names = [field.name for field in option_fields(self) if field.name not in shown]
        vars(self).update(zip(names, shared))
        post_init(self)

    return with_shared


def words(text: str) -> tuple[str, ...]:
    """Split a text into words, to write a long list of names readably."""
    return tuple(text.split())


_EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping (JSON on the command line)",
    list: "a list of strings",
    Strategy: "one of no, steps, epoch",
    SaveStrategy: "one of no, steps, epoch, best",
}


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Return the types that the values of a class's fields are converted to."""
    declared = typing.get_type_hints(cls, include_extras=True)
    return {name: _read(hint) for name, hint in declared.items()}


def _read(hint: Any) -> Any:
    further = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((each.hint for each in further if isinstance(each, Read)), hint)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # a class that a script uses in a subclass of our configurations
        return TypeAdapter(Any)


def members(hint: Any) -> tuple[type, ...]:
    """Return the plain types of an annotation: ``str | dict[str, Any] | None`` gives ``(str, dict, NoneType)``."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def expected(hint: Any) -> str:
    """Describe a type in words."""
    words = " or ".join(_EXPECTED[part] for part in members(hint) if part in _EXPECTED)
    return words.replace("strings", "numbers") if "list[float]" in str(hint) else words


def parse_json(text: str) -> Any:
    """Parse JSON strictly.

    Raises:
        json.JSONDecodeError: the text is not JSON.
        OptionError: a duplicate key, an invalid number, or values that are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, OptionError):
        raise
    except ValueError as error:
        raise OptionError(one_line(error)) from None
    except RecursionError:
        raise OptionError("the JSON is nested too deeply; flatten it") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a mapping. By default, ``json`` silently drops all but the last duplicate."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise OptionError(f"{setting(key, value)}: duplicate key; remove one of them")
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise OptionError(f"{name} is not a JSON value; write a number, or remove the key")


def _prepared(value: Any, kinds: tuple[type, ...]) -> Any:
    """Convert notations that pydantic would misread."""
    if isinstance(value, os.PathLike) and str in kinds:
        return os.fspath(value)
    if value is False and {Strategy, SaveStrategy} & set(kinds):
        return "no"  # YAML 1.1 reads a bare `no` as false
    if isinstance(value, Enum):
        return value.value  # transformers' enums too, whose values are the same
    if isinstance(value, str):
        if type(None) in kinds and str not in kinds and value.strip().lower() in ("none", "null"):
            return None
        if {str, bool} <= set(kinds) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"  # a string is valid too, but not what the user means
        opening = value.lstrip()[:1]
        if (dict in kinds and (opening == "{" or str not in kinds)) or (list in kinds and opening == "["):
            return parse_json(value)
    return value


def _refusal(name: str, value: Any, hint: Any, default: Any) -> OptionError:
    """Return the error for a value of the wrong type."""
    text = f"{setting(name, value)}: expected {expected(hint)}"
    if value is None:
        return OptionError(f"{setting(name, value)}: cannot be empty; remove it to use the default, {str(default)!r}")
    if default is None:
        return OptionError(f"{text}; remove it to unset it")
    return OptionError(f"{text}, such as {str(default)!r}")


def convert(name: str, value: Any, hint: Any, default: Any = None) -> Any:
    """Convert a value to the type ``hint``.

    Raises:
        OptionError: the value is invalid; the message names key, value and expected type.
    """
    kinds = members(hint)
    numeric_only = (int in kinds or float in kinds) and bool not in kinds
    # pydantic would convert these to numbers, strings and lists.
    if (isinstance(value, bool) and numeric_only) or isinstance(value, (bytes, set)):
        raise _refusal(name, value, hint, default)
    if isinstance(value, str) and "\0" in value:
        raise OptionError(f"{setting(name, value)}: contains a NUL character; remove it")
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        raise OptionError(f"{setting(name, value)}: is not valid UTF-8; rename it")
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
    """Parse further arguments of the optimizer.

    Args:
        value: a mapping, ``"key=value,key=value"`` (numbers, booleans, ``none`` and bracketed lists are converted), or
            None.

    Raises:
        OptionError: a part without ``=``, or a duplicate key.
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
            raise OptionError(f"{setting('optim_args', value)}: duplicate key {key!r}; remove one of them")
        result[key] = _plain_value(text)
    return result


def _plain_value(text: str) -> Any:
    """Convert a text to a number, boolean, list or None if it is one; otherwise return it."""
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
    """Convert every option in place, and check those that have choices.

    Raises:
        OptionError: the first invalid value.
    """
    declared = hints(options.__class__)
    for field in option_fields(options):
        value = convert(field.name, getattr(options, field.name), declared[field.name], field.default)
        choices = field.metadata.get("choices")
        if choices is not None and value is not None and value not in choices:
            raise OptionError(
                f"{setting(field.name, value)}: expected one of {', '.join(choices)}"
                f"{did_you_mean(str(value), choices)}"
            )
        setattr(options, field.name, value)
