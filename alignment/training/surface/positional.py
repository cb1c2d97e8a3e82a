"""Arguments by position, in the orders of TRL's trainers. Its releases differ, so each is known by its type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig


def are_options(value: Any) -> bool:
    """Whether an argument is the options of a trainer, ours or transformers'."""
    return isinstance(value, AlignmentConfig) or any(
        kind.__name__ == "TrainingArguments" for kind in type(value).__mro__
    )


def is_collator(value: Any) -> bool:
    """Whether an argument is a data collator: to be called with rows, and neither data nor a tokenizer."""
    return callable(value) and not _makes_rows(value) and not _is_data(value)


def _makes_rows(value: Any) -> bool:
    """Whether rows come of calling it, as data may be given: without arguments, or as a source that says where."""
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):  # it needs arguments, or does not say which
        return hasattr(value, "where")
    return True


def _is_data(value: Any) -> bool:
    return hasattr(value, "column_names") or isinstance(value, (list, dict))


class Order(Enum):
    """In which order TRL's trainers of a method take what follows ``model``."""

    PLAIN = "args, data_collator, train_dataset, eval_dataset, processing_class"
    REFERENCE = "ref_model, args, data_collator, train_dataset, eval_dataset, processing_class"
    EITHER = "ref_model, args, and the collator before train_dataset or, in older releases, after processing_class"


def taking_positions(init: Callable[..., None]) -> Callable[..., None]:
    """Let a trainer's constructor take what follows ``model`` by position in the order of TRL's releases.

    Raises:
        TypeError: an argument is given twice, as Python does.
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
    """The arguments after ``model`` that were given by position, by name; without those that are None.

    The options are known by their type, and what follows ``processing_class`` as well.

    Args:
        positional: as they were given.
        order: of the method.

    Raises:
        OptionError: None and rows, which are the rows to train on in some releases and to evaluate on in others.
        TypeError: an argument whose type does not say what it is.
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
    """0 where ``args`` is the first argument after ``model``, 1 where it follows the reference."""
    found = [number for number, value in enumerate(positional) if are_options(value)]
    if len(found) > 1:
        raise TypeError("got multiple values for argument 'args'")
    if found and found[0] > 1:
        raise TypeError(f"args is argument {found[0] + 2} by position; pass it, and what is before it, by name")
    if found:
        return found[0]
    return 0 if order is Order.PLAIN and positional and positional[0] is None else 1


def _has_collator(rest: Sequence[Any], order: Order, place: int) -> bool:
    """Whether the collator comes before the rows.

    Args:
        rest: the arguments after the options.
        order: of the method.
        place: of the options.
    """
    if rest[0] is not None:
        return is_collator(rest[0])
    if place == 0 or order is Order.REFERENCE or len(rest) < 2 or rest[1] is None:
        return True
    third = rest[2] if len(rest) > 2 else None
    if third is None:
        raise OptionError(
            "train_dataset, eval_dataset: None and rows by position are the rows to evaluate on in some releases of "
            "TRL, and those to train on in others; pass them by name"
        )
    return _is_data(third)


def _name_of(value: Any, number: int) -> str:
    """What an argument behind the tokenizer is."""
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
        f"argument {number} by position, of type {kind.__name__}, is not the same in all releases: name it"
    )


def online_arguments(positional: Sequence[Any], tokenizers: str) -> dict[str, Any]:
    """The arguments of Online DPO after ``model`` and ``ref_model``, by name.

    The first is where rewards come from, then in older releases a judge, then ``args, data_collator, train_dataset,
    eval_dataset, processing_class``, the rewards' tokenizers and ``peft_config``.

    Args:
        positional: as they were given.
        tokenizers: the name of the rewards' tokenizers.

    Raises:
        TypeError: there are more than that.
    """
    place = next((number for number, value in enumerate(positional) if are_options(value)), min(len(positional), 2))
    if place > 2:
        raise TypeError(f"args is argument {place + 3} by position; pass it by name")
    if not any(are_options(value) for value in positional) and any(value is not None for value in positional[2:]):
        raise TypeError("arguments by position without args among them are not the same in all releases: name them")
    named = dict(zip(("reward_funcs", "judge"), positional[:place]))
    rest = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class", tokenizers, "peft_config")
    if len(positional) - place > len(rest):
        raise TypeError(f"{len(positional) - place - len(rest)} arguments by position too many; pass them by name")
    return named | dict(zip(rest, positional[place:]))
