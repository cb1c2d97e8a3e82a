"""The arguments that say who scores completions: each given once, each apart from what is trained, none unused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.lookup import load_callable
from alignment.config.options_online import OnlineOptions
from alignment.rewards.named import is_named, named_judge


def given_once(name: str, given: Any, option: Any) -> Any:
    """What the constructor was given, or else the option says.

    Raises:
        OptionError: both are there.
    """
    if given is not None and option is not None:
        raise OptionError(f"{name}: given both to the trainer and in its options; leave one out")
    return option if given is None else given


def is_of(given: Any, path: Any) -> bool:
    """Whether a reward model is that of a path: TRL's scripts load the one of their option, and hand over both."""
    return isinstance(path, str) and path == (
        given if isinstance(given, str) else getattr(given, "name_or_path", None)
    )


def given_judge(given: Any, option: Any) -> Any:
    """The judge that the constructor was given, or the one that the option names; None for neither.

    TRL's scripts make the judge that their option names themselves, and hand over both.

    Raises:
        OptionError: both are there and differ, or the one that is named cannot be used.
    """
    if given is not None and is_named(given, option):
        return given
    given = given_once("judge", given, option)
    found = named_judge(given)
    return loaded(given, "judge", "judge") if found is None else found


def listed(given: Any) -> list[Any]:
    """One or several as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def loaded(given: Any, option: str, method: str | None = None) -> Any:
    """The callable itself, or what a text names; see :func:`~alignment.config.lookup.load_callable`."""
    return load_callable(given, option, method) if isinstance(given, str) else given


def is_classifier(given: Any) -> bool:
    """Whether a source is a model or the path of one; ``file.py:function`` is a function's name."""
    return isinstance(given, PreTrainedModel) or (isinstance(given, str) and ":" not in given)


def check_apart(classifiers: Sequence[PreTrainedModel], trained: Sequence[Any]) -> None:
    """Each live model has one engine.

    Raises:
        OptionError: one is there twice, or is the policy or the reference.
    """
    seen = [model for model in trained if isinstance(model, PreTrainedModel)]
    for model in classifiers:
        if any(model is other for other in seen):
            raise OptionError(
                f"reward_model: this {type(model).__name__} is in use already, as policy, reference or another reward "
                "model; pass its path, or a copy"
            )
        seen.append(model)


def tokenizer_of_each(tokenizers: Any, sources: int, owners: Sequence[int]) -> list[Any]:
    """A tokenizer or None for each source; ``owners`` are the numbers of those that need one.

    Raises:
        OptionError: they cannot be told to belong to anything.
    """
    found: list[Any] = [None] * sources
    if tokenizers is None:
        return found
    if not isinstance(tokenizers, (list, tuple)):
        if len(owners) != 1:
            raise OptionError(
                f"reward_processing_class: given for {len(owners)} reward models; "
                + ("give reward_processing_classes, one for each source" if owners else "leave it out")
            )
        found[owners[0]] = tokenizers
        return found
    if len(tokenizers) != sources:
        raise OptionError(
            f"reward_processing_classes: {len(tokenizers)} for {sources} sources of rewards; give one for each, and "
            "None for functions"
        )
    for number, tokenizer in enumerate(tokenizers):
        if tokenizer is not None and number not in owners:
            raise OptionError(f"reward_processing_classes[{number}]: given for a function, which has none; set None")
        found[number] = tokenizer
    return found


def check_judge_alone(
    judge: Any, options: OnlineOptions, reward_model: Any, functions: Sequence[Any], tokenizers: Any
) -> None:
    """A judge decides without rewards.

    Raises:
        OptionError: there are rewards as well, or more completions than it compares.
    """
    if reward_model is not None or functions:
        which = "reward_model" if reward_model is not None else "reward_funcs"
        raise OptionError(
            f"judge: given beside {which}, and decides by itself which completion is better; leave one out"
        )
    if tokenizers is not None:
        raise OptionError("reward_processing_class: has no effect with a judge; leave it out")
    options.check_judge(str(getattr(judge, "__name__", type(judge).__name__)))
