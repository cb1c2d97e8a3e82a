"""Check the arguments that name reward models, reward functions and judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.lookup import load_callable
from alignment.config.options_online import OnlineOptions
from alignment.rewards.named import is_named, named_judge


def given_once(name: str, given: Any, option: Any) -> Any:
    """Return the constructor argument, or the option if the argument is None.

    Raises:
        OptionError: if both are set.
    """
    if given is not None and option is not None:
        raise OptionError(f"{name}: set both as an argument and in the options; remove one")
    return option if given is None else given


def is_of(given: Any, path: Any) -> bool:
    """Whether a reward model was loaded from a path: TRL's scripts load the model of their option and pass both."""
    return isinstance(path, str) and path == (
        given if isinstance(given, str) else getattr(given, "name_or_path", None)
    )


def given_judge(given: Any, option: Any) -> Any:
    """Return the judge passed to the constructor or named by the option; None if neither is set.

    TRL's scripts create the judge that their option names, and pass both.

    Raises:
        OptionError: if both are set and differ, or the named judge cannot be used.
    """
    if given is not None and is_named(given, option):
        return given
    given = given_once("judge", given, option)
    found = named_judge(given)
    return loaded(given, "judge", "judge") if found is None else found


def listed(given: Any) -> list[Any]:
    """Return a single object or a sequence as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def loaded(given: Any, option: str, method: str | None = None) -> Any:
    """Return the callable, loading it if it is a name; see :func:`~alignment.config.lookup.load_callable`."""
    return load_callable(given, option, method) if isinstance(given, str) else given


def is_classifier(given: Any) -> bool:
    """Whether a source is a model or a model path; ``file.py:function`` names a function."""
    return isinstance(given, PreTrainedModel) or (isinstance(given, str) and ":" not in given)


def check_apart(classifiers: Sequence[PreTrainedModel], trained: Sequence[Any]) -> None:
    """Check that no live model is used twice, since each has one engine.

    Raises:
        OptionError: if a model appears twice, or is also the policy or the reference.
    """
    seen = [model for model in trained if isinstance(model, PreTrainedModel)]
    for model in classifiers:
        if any(model is other for other in seen):
            raise OptionError(
                f"reward_model: this {type(model).__name__} is already used as policy, reference or another reward "
                "model; pass its path or a copy"
            )
        seen.append(model)


def tokenizer_of_each(tokenizers: Any, sources: int, owners: Sequence[int]) -> list[Any]:
    """Return a tokenizer or None for each source; ``owners`` are the indices of the sources that need one.

    Raises:
        OptionError: if the tokenizers cannot be matched to the sources.
    """
    found: list[Any] = [None] * sources
    if tokenizers is None:
        return found
    if not isinstance(tokenizers, (list, tuple)):
        if len(owners) != 1:
            raise OptionError(
                f"reward_processing_class: one tokenizer, but {len(owners)} reward models; "
                + ("pass reward_processing_classes, one per source" if owners else "remove it")
            )
        found[owners[0]] = tokenizers
        return found
    if len(tokenizers) != sources:
        raise OptionError(
            f"reward_processing_classes: {len(tokenizers)} for {sources} reward sources; pass one per source, and "
            "None for functions"
        )
    for number, tokenizer in enumerate(tokenizers):
        if tokenizer is not None and number not in owners:
            raise OptionError(f"reward_processing_classes[{number}]: a function has no tokenizer; pass None")
        found[number] = tokenizer
    return found


def check_judge_alone(
    judge: Any, options: OnlineOptions, reward_model: Any, functions: Sequence[Any], tokenizers: Any
) -> None:
    """Check that a judge is not combined with rewards.

    Raises:
        OptionError: if rewards are set as well, or more completions than a judge compares.
    """
    if reward_model is not None or functions:
        which = "reward_model" if reward_model is not None else "reward_funcs"
        raise OptionError(
            f"judge: cannot be combined with {which}, since a judge ranks completions without rewards; remove one"
        )
    if tokenizers is not None:
        raise OptionError("reward_processing_class: has no effect with a judge; remove it")
    options.check_judge(str(getattr(judge, "__name__", type(judge).__name__)))
