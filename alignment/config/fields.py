"""How an option is declared, and how pydantic validates its value, from YAML, the command line or Python.

An option is a field of a standard dataclass: a plain default, the help text in its metadata, and the rest in its
annotation: type, range, and the marks below. transformers' ``HfArgumentParser`` reads the type and the metadata, and
strips the rest. :func:`validated` converts values to these types: ``"5e-7"`` becomes a number, ``"true"`` a boolean, a
JSON string a mapping. A range is part of the type: ``Positive`` and others are names of ``Annotated[float, Gt(0)]``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import types
import typing
from collections import UserString
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

from annotated_types import Ge, Gt, Lt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

from alignment.config.errors import OptionError, did_you_mean, listing, setting

_Type = TypeVar("_Type")
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Marks of options.
SHARED = "also declared by the argument classes of scripts"
LATE = "may be set on a trainer until it trains"
EARLY = "may be set on a trainer until its engines are built"
FREE = "may differ when a run is resumed"  # it affects only rounding, or fingerprints cover it, or it sets the length
_JSON = "a text is JSON"
_PAIRS = "a text may also be name=value,name=value"
_LOSS = "a name in the table LOSSES of the class"
Shared: TypeAlias = Annotated[_Type, SHARED]
Late: TypeAlias = Annotated[_Type, LATE]
Early: TypeAlias = Annotated[_Type, EARLY]
Free: TypeAlias = Annotated[_Type, FREE]


def once_per_class(function: _Function) -> _Function:
    """Cache what a function returns for a class."""
    return cast(_Function, functools.cache(function))


def _or_list(value: Any, one: ValidatorFunctionWrapHandler) -> Any:
    return [one(each) for each in value] if isinstance(value, list) else one(value)


# Marks a number that may also be a list of such numbers, a type that ``HfArgumentParser`` does not support.
OrList = WrapValidator(_or_list)


AUTO = "auto"


def _or_auto(value: Any, one: ValidatorFunctionWrapHandler) -> Any:
    if str(value).strip().lower() == AUTO:
        return AUTO
    try:
        return one(value)
    except ValidationError:
        raise ValueError("must be true, false or auto") from None


# Marks a boolean that may also be ``auto``, which is true for code that expects a boolean. The default is no ``str``,
# which ``argparse`` would parse.
OrAuto = WrapValidator(_or_auto)
AUTO_BY_DEFAULT = UserString(AUTO)


def _whole_or_share(value: float) -> float:
    """Return a number of steps as an integer, or a fraction of all steps as it is."""
    if value > 1 and value != int(value):
        raise ValueError("must be an integer number of optimizer steps, or a fraction of all steps less than 1")
    return value if 0 < value < 1 else int(value)


def value_text(value: Any) -> Any:
    """Return a value of data as JSON and YAML write it: ``true``, ``1`` (also for 1.0), or the text without spaces."""
    if isinstance(value, (bool, int, float)):
        return json.dumps(value).removesuffix(".0")
    return value.strip() if isinstance(value, str) else value


def _lower_case(value: Any) -> Any:
    """Return the mapping with its names in lower case."""
    lower = {name.lower(): meaning for name, meaning in value.items()} if isinstance(value, dict) else value
    if isinstance(value, dict) and any(lower[name.lower()] is not meaning for name, meaning in value.items()):
        raise ValueError("a value that differs only in case has another meaning; case is ignored")
    return lower


Count: TypeAlias = Annotated[int, Ge(1)]
Natural: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Steps: TypeAlias = Annotated[float, Gt(0), AfterValidator(_whole_or_share)]
WarmupSteps: TypeAlias = Annotated[float, Ge(0), AfterValidator(_whole_or_share)]
Strategy: TypeAlias = Literal["no", "steps", "epoch"]
Choice: TypeAlias = Annotated[Literal["auto", "true", "false"], BeforeValidator(value_text)]
LossName: TypeAlias = Annotated[str, _LOSS]  # a subclass that extends the table extends the type
# The second of several types is the one that HfArgumentParser converts to. A value is never a text: it is parsed.
Keywords: TypeAlias = Annotated[dict[str, Any] | str | None, _JSON]
TextKeywords: TypeAlias = Annotated[dict[str, str] | str | None, _JSON, _PAIRS]
Meanings: TypeAlias = Annotated[
    dict[Annotated[str, BeforeValidator(value_text)], bool] | str | None, _JSON, _PAIRS, AfterValidator(_lower_case)
]
ListOrKeywords: TypeAlias = Annotated[dict[str, Any] | str | list[Any] | None, _JSON]


def option(
    default: Any, help: str, *, older: tuple[str, ...] = (), several: bool = False, switch: bool = False,
    shown: bool = True,
) -> Any:  # fmt: skip
    """Declare an option as a dataclass field, whose metadata ``HfArgumentParser`` passes on to ``argparse``.

    Args:
        default: default value.
        help: help text.
        older: aliases, which accept the same values.
        several: whether ``HfArgumentParser`` accepts several values of a type other than ``list``.
        switch: whether the option without a value means true on the command line, although it can be unset.
        shown: false for secrets, which are omitted when options are printed.
    """
    metadata: dict[str, Any] = {"help": help, "aliases": [f"--{name}" for name in older]} if older else {"help": help}
    metadata |= {"nargs": "+"} if several else {"nargs": "?", "const": True} if switch else {}
    return dataclasses.field(default=default, metadata=metadata, repr=shown)


def option_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the options of a class or object, including :data:`Shared` ones, which ``dataclasses.fields`` omits."""
    shown = {field.name for field in dataclasses.fields(cls)}
    declared: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__
    return [field for name, field in declared.items() if name in shown or "help" in field.metadata]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of an option, see :data:`AUTO_BY_DEFAULT`."""
    return str(field.default) if isinstance(field.default, UserString) else field.default


def hide_shared(cls: Any) -> None:
    """Replace the :data:`Shared` fields of a dataclass by an ``InitVar`` with a default, as its subclasses inherit it.

    ``dataclasses.fields`` omits it, so that ``HfArgumentParser`` adds no argument that another class of a script adds,
    but ``dataclasses.replace`` passes it on. In the class itself, it would hide the attribute from type checkers.
    """
    for name in marked(cls, SHARED):
        old = cls.__dataclass_fields__[name]
        field = dataclasses.field(default=old.default, metadata=old.metadata, repr=old.repr, kw_only=True)
        made: Any = dataclasses.make_dataclass(cls.__name__, [(name, dataclasses.InitVar, field)])
        cls.__dataclass_fields__[name] = made.__dataclass_fields__[name]


@once_per_class
def hints(cls: Any) -> dict[str, Any]:
    """Return the annotations of a class's fields; a :data:`LossName` is a ``Literal`` of the class's losses."""
    found = typing.get_type_hints(cls, include_extras=True)
    for name, hint in found.items():
        if _LOSS in (parts := [*_parts(hint)]):
            losses = cast(Any, Literal)[tuple(cls.LOSSES)]
            found[name] = losses | None if types.NoneType in parts else losses
    return found


@once_per_class
def marked(cls: Any, mark: str) -> frozenset[str]:
    """Return the names of a class's options that have a mark, there or in a class that declares them first."""
    return frozenset(name for base in cls.__mro__ for name, hint in hints(base).items() if mark in _parts(hint))


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the plain types of an annotation, its marks and its constraints."""
    if typing.get_origin(hint) is Annotated:
        inner, *further = typing.get_args(hint)
        yield from further
        yield from _parts(inner)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of the values of an annotation: ``str | dict[str, Any] | None`` gives str, dict, NoneType."""
    parts = list(_parts(hint))
    kinds = [typing.get_origin(part) or part for part in parts if isinstance(part, type) or typing.get_args(part)]
    kinds += [list for part in parts if part is OrList]
    return tuple(kind for kind in kinds if kind is not str or _JSON not in parts)


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal``; none for other annotations."""
    return sum((typing.get_args(part) for part in _parts(hint) if typing.get_origin(part) is Literal), ())


def keywords(value: Any) -> dict[str, Any]:
    """Return the mapping of an option, empty if it is unset. (A text was parsed when the options were created.)"""
    return value or {}


def words(text: str) -> tuple[str, ...]:
    """Split a text into words, to write a long list of names readably."""
    return tuple(text.split())


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, or has a duplicate key, which ``json`` would accept."""
    from_json(text, allow_inf_nan=False)  # unlike json, refuses NaN and values that are nested too deeply
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{setting(key, value)}: duplicate key; remove one of them")
        result[key] = value
    return result


def validated(cls: Any, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return values of options of a dataclass, converted to their types; ``where`` is a prefix of names in messages.

    Raises:
        OptionError: the first unknown name or invalid value.
    """
    known = hints(cls)
    plain = {name: _plain(where + name, value, known.get(name)) for name, value in given.items()}
    try:
        return _adapter(cls).validate_python(plain)
    except ValidationError as error:
        raise _option_error(cls, error, given, where) from None


@once_per_class
def _adapter(cls: Any) -> TypeAdapter[dict[str, Any]]:
    types_of = {field.name: hints(cls)[field.name] for field in option_fields(cls)}
    typed_dict: Any = TypedDict
    table = typed_dict(cls.__name__, types_of, total=False)
    # A script may use classes of its own in a subclass of our configurations.
    table.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(table)


def checked_text(name: str, value: str) -> str:
    """Return a text. Raises :class:`OptionError` if it cannot be passed on, for example as a path."""
    if any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value):
        raise OptionError(f"{setting(name, value)}: contains a NUL character, or is not valid UTF-8; rename it")
    return value


_MISREAD = object()  # takes the place of a value that pydantic would accept, but with another meaning


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Return a value as pydantic reads it in the meaning that it has here."""
    kinds, choices = members(hint), choices_of(hint)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    value = value.value if isinstance(value, Enum) else value  # transformers' enums
    if value is False and "no" in choices:
        return "no"  # YAML 1.1 reads a bare `no` as false
    if isinstance(value, bool) and bool not in kinds and {int, float} & {*kinds}:
        return _MISREAD
    if not isinstance(value, str) or value in choices:
        return value
    checked_text(name, value)
    if types.NoneType in kinds and str not in kinds and value.strip().lower() in ("none", "null"):
        return None
    opening = value.lstrip()[:1]
    if _PAIRS in _parts(hint) and opening not in ("{", "["):
        return _pairs(name, value)
    if (dict in kinds and (opening == "{" or str not in kinds)) or (list in kinds and opening == "["):
        try:
            found = parse_json(value)
        except ValueError as error:
            raise OptionError(f"{setting(name, value)}: invalid JSON: {error}; correct it") from None
        return _MISREAD if isinstance(found, str) else found
    return [value] if list in kinds and not {str, dict} & {*kinds} else value  # a list of one


def _pairs(name: str, value: str) -> dict[str, str]:
    """Return the mapping that a text ``name=value,name=value`` describes."""
    parts = [[side.strip() for side in part.split("=", 1)] for part in value.split(",")]
    found = {part[0]: part[-1] for part in parts}
    if len(found) < len(parts) or not all(len(part) == 2 and all(part) for part in parts):
        raise OptionError(f"{setting(name, value)}: expected name=value,name=value, each name once, or JSON") from None
    return found


def _option_error(cls: Any, error: ValidationError, given: Mapping[str, Any], where: str) -> OptionError:
    """Return the message of the first invalid value: name, value, and the expected type, limit or nearest name."""
    errors = error.errors(include_url=False)
    name, names = str(errors[0]["loc"][0]), [field.name for field in option_fields(cls)]
    text = setting(where + name, given[name])
    if name not in names:
        return OptionError(f"{text}: no such key{did_you_mean(name, names) or f'; expected one of {listing(names)}'}")
    texts = [each["msg"].removeprefix("Value error, ") for each in errors if each["loc"][0] == name]
    reasons = dict.fromkeys(" ".join(each.replace("Input should", "must").split()) for each in texts)
    near = did_you_mean(str(given[name]), choices_of(hints(cls)[name]))
    return OptionError(f"{text}: {' or '.join(reasons)}{near}")


def parse_optim_args(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """Parse further arguments of the optimizer: a mapping, or ``"key=value,key=value"`` with Python's literals.

    Unquoted words are texts, except ``true``, ``false`` and ``none``.

    Raises:
        OptionError: a part that is not ``key=value``, or a duplicate key.
    """
    if not isinstance(value, str):
        return dict(value or {})
    try:
        call: Any = ast.parse(f"dict({value})", mode="eval").body
        found = {part.arg: _literal(part.value) for part in call.keywords}
        if call.args or None in found or len(found) < len(call.keywords):
            raise ValueError
    except (SyntaxError, ValueError, AttributeError):
        raise OptionError(f"{setting('optim_args', value)}: expected key=value,key=value, each key once") from None
    return found


def _literal(node: ast.expr) -> Any:
    """Return a constant, or a word as text. Raises ValueError for other expressions."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)
