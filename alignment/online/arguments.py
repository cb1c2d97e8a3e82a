"""Check the arguments that name reward models, reward functions and judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.lookup import load_callable
from alignment.config.options_online import OnlineOptions
from alignment.rewards.llm_judge import NAMED, named_judge


def given_once(name: str, given: Any, option: Any) -> Any:
    """Return the constructor argument, or the option if the argument is None.

    Raises:
        OptionError: if both are set.
    """
    if given is not None and option is not None:
        raise OptionError(f"{name}: set both as an argument and in the options; remove one")
    return option if given is None else given


def listed(given: Any) -> list[Any]:
    """Return a single object or a sequence as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def is_of(given: Any, path: Any) -> bool:
    """Whether a reward model was loaded from a path: TRL's scripts load the model of their option and pass both."""
    name = given if isinstance(given, str) else getattr(given, "name_or_path", None)
    return isinstance(path, str) and path == name


def is_classifier(given: Any) -> bool:
    """Whether a source is a model or a model path; ``file.py:function`` names a function."""
    is_path = isinstance(given, str) and ":" not in given and not given.endswith(".py")
    return is_path or isinstance(given, PreTrainedModel)


def given_judge(
    given: Any, options: OnlineOptions, reward_model: Any, functions: Sequence[Any], tokenizers: Any
) -> Any:
    """Return the judge passed to the constructor or named by the option; None if neither is set.

    TRL's scripts create the judge that their option names, and pass both.

    Raises:
        OptionError: if both are set and differ, the named judge cannot be used, or it is combined with rewards.
    """
    named_class = NAMED.get(options.judge) if isinstance(options.judge, str) else None
    if given is None or named_class is None or not isinstance(given, named_class):
        given = given_once("judge", given, options.judge)
        named = named_judge(given)
        if named is not None:
            given = named
        elif isinstance(given, str):
            given = load_callable(given, "judge", "judge")
    if given is None:
        return None
    rewards = {"reward_model": reward_model, "reward_funcs": functions or None, "reward_processing_class": tokenizers}
    for name, value in rewards.items():
        if value is not None:
            raise OptionError(
                f"judge: cannot be combined with {name}, since a judge ranks completions without rewards; remove one"
            )
    options.check_judge(str(getattr(given, "__name__", type(given).__name__)))
    return given


def reward_sources(reward_model: Any, functions: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Return the sources of rewards: the reward model, unless it is among the functions as well, then the functions.

    Raises:
        OptionError: if there is none, or a live model is used twice, since each has one engine.
    """
    if reward_model is not None and not is_classifier(reward_model):
        raise OptionError(
            f"reward_model: {reward_model!r} is neither a path nor a model; pass functions as reward_funcs"
        )
    also = reward_model is None or any(one is reward_model or is_of(one, reward_model) for one in functions)
    given = [*([] if also else [reward_model]), *functions]
    if not given:
        raise OptionError(
            "reward_model: nothing ranks the completions; pass reward_model, reward_funcs or judge, or set "
            "reward_model_path, reward_funcs or judge"
        )
    seen = [model for model in trained if isinstance(model, PreTrainedModel)]
    for model in given:
        if any(model is other for other in seen):
            raise OptionError(
                f"reward_model: this {type(model).__name__} is already used as policy, reference or another reward "
                "model; pass its path or a copy"
            )
        if isinstance(model, PreTrainedModel):
            seen.append(model)
    return given


def tokenizer_of_each(tokenizers: Any, sources: Sequence[Any]) -> list[Any]:
    """Return a tokenizer or None for each source of rewards.

    Raises:
        OptionError: if the tokenizers cannot be matched to the reward models.
    """
    models = [is_classifier(source) for source in sources]
    if isinstance(tokenizers, (list, tuple)):
        if len(tokenizers) != len(sources):
            raise OptionError(
                f"reward_processing_classes: {len(tokenizers)} for {len(sources)} reward sources; pass one per source"
            )
        for number, (tokenizer, model) in enumerate(zip(tokenizers, models)):
            if tokenizer is not None and not model:
                raise OptionError(f"reward_processing_classes[{number}]: a function has no tokenizer; pass None")
        return list(tokenizers)
    if tokenizers is not None and sum(models) != 1:
        raise OptionError(
            f"reward_processing_class: one tokenizer, but {sum(models)} reward models; pass "
            "reward_processing_classes, one per source, or remove it"
        )
    return [tokenizers if model else None for model in models]
