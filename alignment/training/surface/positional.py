"""Positional arguments in the order of TRL's trainers, which differs between releases: types identify arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig


def are_options(value: Any) -> bool:
    """Whether an argument is the options of a trainer, of this package or of transformers."""
    return isinstance(value, AlignmentConfig) or any(
        kind.__name__ == "TrainingArguments" for kind in type(value).__mro__
    )


def is_collator(value: Any) -> bool:
    """Whether an argument is a data collator: callable with rows, and neither data nor a tokenizer."""
    return callable(value) and not _makes_rows(value) and not _is_data(value)


def _makes_rows(value: Any) -> bool:
    """Whether it is a callable source of rows: without required arguments, or with a name for messages."""
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):  # it has required arguments, or no signature
        return hasattr(value, "where")
    return True


def _is_data(value: Any) -> bool:
    return hasattr(value, "column_names") or isinstance(value, (list, dict))


class Order(Enum):
    """The order of arguments after ``model`` in TRL's trainers of a method."""

    PLAIN = "args, data_collator, train_dataset, eval_dataset, processing_class"
    REFERENCE = "ref_model, args, data_collator, train_dataset, eval_dataset, processing_class"
    EITHER = "ref_model, args, and the collator before train_dataset or, in older releases, after processing_class"


def taking_positions(init: Callable[..., None]) -> Callable[..., None]:
    """Let a trainer's constructor accept arguments after ``model`` by position, in the order of TRL's releases.

    Raises:
        TypeError: if an argument is passed twice, as in Python.
    """

    @functools.wraps(init)
    def taking(self: Any, model: Any = None, *positional: Any, **named: Any) -> None:
        placed = arguments(positional, self.order)
        for name in placed:
            if named.get(name) is not None:
                raise TypeError(f"got multiple values for argument {name!r}")
        init(self, model, **{**named, **placed})

    return taking


_DATA = ("train_dataset", "eval_dataset", "processing_class")


def arguments(positional: Sequence[Any], order: Order) -> dict[str, Any]:
    """Return the positional arguments after ``model`` by name, without those that are None.

    The options and what follows ``processing_class`` are identified by type.

    Args:
        positional: the positional arguments.
        order: the method's order.

    Raises:
        OptionError: if None precedes rows, which are training rows in some releases and evaluation rows in others.
        TypeError: if the type of an argument does not identify it.
    """
    place = _place_of_options(positional, order)
    named = dict(zip(("ref_model", "args")[1 - place :], positional))
    rest = list(positional[place + 1 :])
    if rest and _has_collator(rest, order, place):
        named["data_collator"] = rest.pop(0)
    named |= dict(zip(_DATA, rest))
    first = len(positional) - len(rest[len(_DATA) :])
    for number, value in enumerate(rest[len(_DATA) :], first + 2):
        if value is not None:
            name = _name_of(value, number)
            if named.get(name) is not None:
                raise TypeError(f"got multiple values for argument {name!r}")
            named[name] = value
    return {name: value for name, value in named.items() if value is not None}


def _place_of_options(positional: Sequence[Any], order: Order) -> int:
    """Return 0 if ``args`` is the first argument after ``model``, 1 if it follows the reference."""
    found = [number for number, value in enumerate(positional) if are_options(value)]
    if len(found) > 1:
        raise TypeError("got multiple values for argument 'args'")
    if found and found[0] > 1:
        raise TypeError(f"args is positional argument {found[0] + 2}; pass it and the arguments before it by keyword")
    if found:
        return found[0]
    return 0 if order is Order.PLAIN and positional and positional[0] is None else 1


def _has_collator(rest: Sequence[Any], order: Order, place: int) -> bool:
    """Whether the collator comes before the rows.

    Args:
        rest: the arguments after the options.
        order: the method's order.
        place: the position of the options.
    """
    if rest[0] is not None:
        return is_collator(rest[0])
    if place == 0 or order is Order.REFERENCE or len(rest) < 2 or rest[1] is None:
        return True
    third = rest[2] if len(rest) > 2 else None
    if third is None:
        raise OptionError(
            "train_dataset, eval_dataset: rows after None by position are evaluation rows in some releases of TRL and "
            "training rows in others; pass them by keyword"
        )
    return _is_data(third)


def _name_of(value: Any, number: int) -> str:
    """Return the name of an argument after the tokenizer."""
    kind = type(value)
    if isinstance(value, list):
        return "callbacks"
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], type):
        return "optimizers"
    if hasattr(value, "peft_type"):
        return "peft_config"
    if hasattr(value, "quant_method"):
        return "quantization_config"
    if "Collator" in kind.__name__:
        return "data_collator"
    raise TypeError(
        f"positional argument {number}, of type {kind.__name__}, differs between releases of TRL; pass it by keyword"
    )


def online_arguments(positional: Sequence[Any], tokenizers: str) -> dict[str, Any]:
    """Return the arguments of Online DPO after ``model`` and ``ref_model`` by name.

    The first is the reward source, followed in older releases by a judge, then ``args, data_collator, train_dataset,
    eval_dataset, processing_class``, the rewards' tokenizers and ``peft_config``.

    Args:
        positional: the positional arguments.
        tokenizers: the name of the argument for the rewards' tokenizers.

    Raises:
        TypeError: if there are more.
    """
    place = next((number for number, value in enumerate(positional) if are_options(value)), min(len(positional), 2))
    if place > 2:
        raise TypeError(f"args is positional argument {place + 3}; pass it by keyword")
    if not any(are_options(value) for value in positional) and any(value is not None for value in positional[2:]):
        raise TypeError("positional arguments without args differ between releases of TRL; pass them by keyword")
    named = dict(zip(("reward_funcs", "judge"), positional[:place]))
    rest = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class", tokenizers, "peft_config")
    if len(positional) - place > len(rest):
        raise TypeError(f"{len(positional) - place - len(rest)} positional arguments too many; pass them by keyword")
    return named | dict(zip(rest, positional[place:]))
