"""Arguments by position, in the orders of TRL's trainers. Its releases differ, so each is known by its type."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Arguments(NamedTuple):
    """What the arguments that TRL's trainers take by position are."""

    ref_model: Any
    args: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any


def in_place(
    ref_model: Any, args: Any, train_dataset: Any, eval_dataset: Any, processing_class: Any, data_collator: Any
) -> Arguments:
    """The same with each in its place.

    ``(model, ref_model, args, train_dataset, eval_dataset, processing_class)`` is the order of KTO's older releases,
    ``(model, ref_model, args, data_collator, train_dataset, eval_dataset)`` that of its newer ones, and
    ``(model, args, data_collator, train_dataset, eval_dataset, processing_class)`` that of CPO, SFT and reward models.

    Raises:
        TypeError: an argument is given twice, as Python does.
    """
    if are_options(ref_model):
        if are_options(args):
            raise TypeError("got multiple values for argument 'args'")
        ref_model, args, moved = None, ref_model, args
        data_collator = _once("data_collator", data_collator, moved)
    elif is_collator(train_dataset) or (processing_class is not None and _is_data(processing_class)):
        data_collator = _once("data_collator", data_collator, train_dataset)
        train_dataset, eval_dataset, processing_class = eval_dataset, processing_class, None
    return Arguments(ref_model, args, data_collator, train_dataset, eval_dataset, processing_class)


def _once(name: str, given: Any, moved: Any) -> Any:
    if given is not None and moved is not None:
        raise TypeError(f"got multiple values for argument {name!r}")
    return moved if given is None else given


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
    named = dict(zip(("reward_funcs", "judge"), positional[:place]))
    rest = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class", tokenizers, "peft_config")
    if len(positional) - place > len(rest):
        raise TypeError(f"{len(positional) - place - len(rest)} arguments by position too many; pass them by name")
    return named | dict(zip(rest, positional[place:]))
