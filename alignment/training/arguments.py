"""Constructor arguments that are not options: models, tokenizer, datasets, and unsupported arguments of TRL."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from alignment.compat.trl.names import older_names
from alignment.config.errors import OptionError, setting
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import mixture_parts
from alignment.config.options_model import loading_keywords
from alignment.config.registry import option_names
from alignment.data.mixture import Part
from alignment.internals.datasets import was_saved
from alignment.models.source import ModelSource, check_positions, model_source
from alignment.models.tasks import CAUSAL_LM, Task

_REFUSED = {
    "model_init": "not supported; pass the model",
    "compute_metrics": "not supported; the method's own metrics are logged",
    "preprocess_logits_for_metrics": "not supported; log-probs are computed without materializing logits",
}
# Collators of transformers and TRL that only pad rows, and leave every token unchanged.
_PADS_ONLY = (
    *("DataCollatorForUnpairedPreference", "DataCollatorForPreference", "DPODataCollatorWithPadding"),
    *("DataCollatorWithPadding", "RewardDataCollatorWithPadding"),
)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse TRL's arguments that are not supported here unless they are None, and unknown ones (TypeError)."""
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            raise OptionError(f"{name}: {_REFUSED[name]}")


def reference_of(trainer: str, positional: Sequence[Any], ref_model: Any, takes_reference: bool) -> Any:
    """Return the reference, which may follow the model by position; TypeError for further positional arguments."""
    if takes_reference and len(positional) == 1 and ref_model is None:
        return positional[0]
    if positional:
        first = "model and ref_model" if takes_reference else "model"
        raise TypeError(
            f"{trainer}: arguments after {first} are passed by keyword, as their order differs between releases of "
            f"TRL; write {trainer}(model, args=..., train_dataset=...)"
        )
    return ref_model


def check_collator(collator: Any) -> None:
    """Refuse a collator that may do more than pad (OptionError); rows are not padded here."""
    theirs = type(collator).__module__.partition(".")[0] in ("transformers", "trl")
    if collator is not None and not (theirs and type(collator).__name__ in _PADS_ONLY):
        raise OptionError(
            f"data_collator: {type(collator).__name__} would not be called, since batches are planned over the whole "
            "window and computed without padding; change rows with dataset.map(), and lengths with max_length"
        )


def model_and_options(
    trainer: str,
    kind: type[AlignmentConfig],
    model: str | PreTrainedModel | None,
    args: AlignmentConfig | TrainingArguments | None,
) -> tuple[str | PreTrainedModel, AlignmentConfig]:
    """Return the model and the options of a trainer, each of which can be derived from the other.

    Plain ``TrainingArguments`` are converted with every value, as TRL does. Without ``args``, the output folder is
    named after model and method.

    Raises:
        OptionError: if the options are of another method, or there is no model.
    """
    if isinstance(args, TrainingArguments):
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
        given["accelerator_config"] = args.accelerator_config.to_dict()
        if unknown := sorted(set(given) - option_names(kind) - set(older_names(kind))):
            raise OptionError(
                f"args: {', '.join(unknown)} of {type(args).__name__} cannot be converted; pass a {kind.__name__}"
            )
        args = kind(**given)
    if args is not None and not isinstance(args, kind):
        raise OptionError(f"args: {trainer} expects a {kind.__name__}, not a {type(args).__name__}")
    model = model if model is not None else args.model_name_or_path if args is not None else None
    if model is None:
        raise OptionError(f"model: {trainer} has no model; pass a path or a model, or set model_name_or_path")
    if args is None:
        source = model if isinstance(model, str) else model.config.name_or_path
        args = kind(output_dir=f"{Path(source).name or 'model'}-{kind.method.upper()}")
    return model, args


def with_arguments(
    args: AlignmentConfig, model: str | PreTrainedModel, quantization_config: Any = None, **names: str | None
) -> AlignmentConfig:
    """Return the options with the constructor's arguments that are options too: adapter names, and how to quantize."""
    changed: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    for name, value in changed.items():
        if getattr(args, name) not in (None, value):
            raise OptionError(f"{name}={value!r}: the options have {getattr(args, name)!r}; remove one")
    if quantization_config is not None:
        if not isinstance(model, str):
            raise OptionError(
                "quantization_config: cannot be applied to a live model; pass the model's path, or load it "
                "with from_pretrained(quantization_config=...)"
            )
        given = keywords(args.model_init_kwargs)
        if given.get("quantization_config") is not None:
            raise OptionError("quantization_config: also set in model_init_kwargs; remove one")
        changed["model_init_kwargs"] = {**given, "quantization_config": quantization_config}
    args = copy.copy(args) if changed else args
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def check_datasets(args: AlignmentConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse (OptionError) a training set that an option names too, and a trainer without any rows."""
    for name in ("dataset_name", "dataset_mixture"):
        value = getattr(args, name)
        if value is not None and train_dataset is not None and not isinstance(train_dataset, Part):
            raise OptionError(f"{setting(name, value)}: train_dataset is also passed; remove one")
    if train_dataset is None and not named_datasets(eval_dataset):
        raise OptionError(
            f"`train_dataset` is required{data_of_commands(args)}; for evaluation only, pass eval_dataset"
        )


def data_of_commands(args: AlignmentConfig) -> str:
    """Explain why an option that names data has no effect on a trainer; empty if no such option is set."""
    named = args.dataset_name or args.dataset_mixture
    return " (only the command line reads dataset_name; pass load_dataset(...) in Python)" if named else ""


def named_datasets(value: Any) -> dict[str, Any]:
    """Return datasets by name for None, one dataset, or a dict of several; a single one is called ``""``."""
    return {} if value is None else dict(value) if isinstance(value, dict) else {"": value}


def balancing_coefficient(options: AlignmentConfig, config: PretrainedConfig) -> float | None:
    """Return the weight of the load-balancing loss; None for a model without one or for a weight of 0.

    The option is ignored for dense models, and refused (OptionError) for experts without router logits.
    """
    text, asked = config.get_text_config(), options.router_aux_loss_coef
    if getattr(text, "output_router_logits", None):
        return (asked if asked is not None else getattr(text, "router_aux_loss_coef", None)) or None
    if asked and (hasattr(text, "output_router_logits") or getattr(text, "num_experts_per_tok", None)):
        raise OptionError(
            f"router_aux_loss_coef={asked}: {type(text).__name__} does not output router logits, so the balancing "
            'loss cannot be computed; set model_init_kwargs: {"output_router_logits": true} if the model has this '
            "setting, or remove router_aux_loss_coef"
        )
    return None


def model_sources(
    model: str | PreTrainedModel,
    ref_model: str | PreTrainedModel | None,
    options: AlignmentConfig,
    needs_reference: bool,
    task: Task = CAUSAL_LM,
) -> tuple[ModelSource, ModelSource]:
    """Return the sources of policy and reference, each loaded for ``task``; the policy twice without ``ref_model``.

    Raises:
        OptionError: if the method needs no reference, or the reference is the same object as the policy.
        ModelError: if one of them cannot be used.
    """
    ref_model = ref_model if ref_model is not None else options.ref_model_name_or_path
    if ref_model is not None and not needs_reference:
        raise OptionError(f"ref_model: {options.method} has no reference model; remove it, and pass args by keyword")
    if ref_model is not None and ref_model is model and not isinstance(model, str):
        raise OptionError(
            "ref_model: is the same object as model, so it would be trained too; remove ref_model (the policy is "
            "copied) or pass a copy"
        )
    kwargs, further = loading_keywords(options.model_init_kwargs), loading_keywords(options.ref_model_init_kwargs)
    if ref_model is None and further not in ({}, kwargs):  # TRL's scripts pass the same arguments for both
        raise OptionError(
            f"{setting('ref_model_init_kwargs', further)}: has no effect on the initial policy as the reference; "
            "remove it, or set ref_model_name_or_path"
        )
    policy = reference = model_source(model, "model_name_or_path", options, kwargs, task)
    if ref_model is not None:
        reference = model_source(ref_model, "ref_model_name_or_path", options, further or kwargs, task)
    for source in (policy, reference):
        check_positions(source.config, options.max_length)  # type: ignore[attr-defined]
    return policy, reference


def inputs_of(
    args: AlignmentConfig, models: Iterable[tuple[str, Any]], datasets: Iterable[Any]
) -> Iterator[tuple[str, str]]:
    """Yield the options and paths or Hub names of the models and data that a run reads, as far as they have one."""
    names = ("ref_model_name_or_path", "adapter_name_or_path", "reward_model_path", "dataset_name")
    given = [(option, getattr(model, "name_or_path", model)) for option, model in models]
    given += [(option, getattr(args, option, None)) for option in names]
    parts = mixture_parts(args.dataset_mixture) if args.dataset_mixture is not None else ()
    given += [("dataset_mixture", part.dataset_name) for part in parts]
    yield from ((option, str(name)) for option, name in given if name)
    for dataset in (each for sets in datasets for each in named_datasets(sets).values()):
        for file in getattr(dataset, "cache_files", None) or ():
            path = Path(file["filename"])
            yield "train_dataset", str(path.parent if was_saved(path.parent) else path)
