"""The arguments of a trainer's constructor that are not options: models, tokenizer, datasets; and those refused."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from alignment.config.compatibility.model_kwargs import loading_keywords
from alignment.config.compatibility.names import older_names
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.registry import option_names
from alignment.data.formats import Kind
from alignment.data.shown.rows import Collator
from alignment.models.source import ModelSource, check_positions, model_source
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.models.vocabulary import Vocabulary
from alignment.training.data import NamedMixture, NamedSplit, limits_of

_REFUSED = {
    "model_init": "not supported yet; pass the model itself",
    "compute_metrics": "not supported yet; the metrics of the method are logged",
    "preprocess_logits_for_metrics": "no logits exist: log-probs are computed without them",
}


# Collators of transformers and TRL that make one padded batch of rows of a kind, and leave every token as it is.
_OF_PAIRS = ("DataCollatorForPreference", "DPODataCollatorWithPadding", "DataCollatorWithPadding")
_PADS_ONLY: dict[Kind, tuple[str, ...]] = {
    "unpaired_preference": ("DataCollatorForUnpairedPreference", "DPODataCollatorWithPadding"),
    "preference": _OF_PAIRS,
    "preference_margin": (*_OF_PAIRS, "RewardDataCollatorWithPadding"),
    "prompt_completion": ("DataCollatorWithPadding",),
    "prompt_only": ("DPODataCollatorWithPadding", "DataCollatorWithPadding"),
}


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse TRL's arguments that do nothing here, unless they are None.

    Raises:
        OptionError: one is set.
        TypeError: one is unknown, as Python does.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            raise OptionError(f"{name}: {_REFUSED[name]}")


def check_collator(collator: Any, kind: Kind) -> None:
    """Refuse a collator that may do more than to pad, which rows here do not need.

    Raises:
        OptionError: it is none of those that are known to do no more for rows of this kind.
    """
    known = isinstance(collator, Collator) or (
        type(collator).__module__.partition(".")[0] in ("transformers", "trl")
        and type(collator).__name__ in _PADS_ONLY[kind]
    )
    if collator is not None and not known:
        raise OptionError(
            f"data_collator: {type(collator).__name__} would not be called, for batches are planned over the whole "
            "window and scored without padding; change the rows with dataset.map(), and lengths with max_length"
        )


def model_and_options(
    trainer: str,
    kind: type[AlignmentConfig],
    model: str | PreTrainedModel | None,
    args: AlignmentConfig | TrainingArguments | None,
) -> tuple[str | PreTrainedModel, AlignmentConfig]:
    """The model and the options of a trainer, each of which can stand in for the other.

    Args:
        trainer: name of the trainer's class, for messages.
        kind: the class of its options.
        model: path, hub name or live model; None takes ``args.model_name_or_path``.
        args: the options, which may have been changed since they were made, or plain ``TrainingArguments``; None takes
            the defaults, and a folder named after model and method.

    Raises:
        OptionError: options of another method, no model, or no folder.
    """
    if isinstance(args, TrainingArguments):
        args = taken_over(args, kind)
    if args is not None and not isinstance(args, kind):
        raise OptionError(f"args: {trainer} needs a {kind.__name__}, not {type(args).__name__}")
    if args is not None:
        args.check_again()
    model = model if model is not None else args.model_name_or_path if args is not None else None
    if model is None:
        raise OptionError(f"model: {trainer} got none; pass a path or a model, or set model_name_or_path")
    if args is None:
        source = model if isinstance(model, str) else model.config.name_or_path
        args = kind(output_dir=f"{Path(source).name or 'model'}-{kind.method.upper()}")
    return model, args


def taken_over(args: TrainingArguments, kind: type[AlignmentConfig]) -> AlignmentConfig:
    """transformers' own arguments as options of ``kind``: every value of theirs, as TRL takes them.

    Raises:
        OptionError: one of them cannot be used.
    """
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    given["accelerator_config"] = args.accelerator_config.to_dict()
    names = option_names(kind) | set(older_names(kind))
    unknown = sorted(name for name in given if name not in names)
    if unknown:
        raise OptionError(
            f"args: {', '.join(unknown)} of {type(args).__name__} cannot be taken over; pass a {kind.__name__}"
        )
    return kind(**given)


def with_adapter_names(args: AlignmentConfig, trained: str | None, reference: str | None) -> AlignmentConfig:
    """The options with the names of adapters that the constructor was given.

    Raises:
        OptionError: both say something.
    """
    for name, value in (("model_adapter_name", trained), ("ref_adapter_name", reference)):
        if value is None:
            continue
        if getattr(args, name) not in (None, value):
            raise OptionError(f"{name}={value!r}: the options say {getattr(args, name)!r}; leave one out")
        args = copy.copy(args)
        setattr(args, name, value)
    return args


def with_quantization(
    args: AlignmentConfig, model: str | PreTrainedModel, quantization_config: Any
) -> AlignmentConfig:
    """The options with the ``quantization_config`` that the constructor was given, for ``from_pretrained``.

    Raises:
        OptionError: the model is there already, or ``model_init_kwargs`` has one as well.
    """
    if quantization_config is None:
        return args
    if not isinstance(model, str):
        raise OptionError(
            "quantization_config: model is a live model, whose weights are what they are; pass its path, or load it "
            "with from_pretrained(quantization_config=...)"
        )
    keywords = args.model_init_kwargs or {}
    if keywords.get("quantization_config") is not None:
        raise OptionError("quantization_config: model_init_kwargs has one as well; leave one out")
    args = copy.copy(args)
    args.model_init_kwargs = {**keywords, "quantization_config": quantization_config}
    return args


def check_data_source(args: AlignmentConfig | None, train_dataset: Any) -> None:
    """Refuse a dataset that is given twice: as an object and by an option, which would then do nothing.

    Raises:
        OptionError: both are there.
    """
    if args is None or train_dataset is None or isinstance(train_dataset, (NamedSplit, NamedMixture)):
        return
    for name in ("dataset_name", "dataset_mixture"):
        if getattr(args, name, None) is not None:  # plain TrainingArguments have neither
            raise OptionError(f"{setting(name, getattr(args, name))}: train_dataset was given as well; leave one out")


def check_rows_given(args: AlignmentConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse a trainer that could neither train nor evaluate.

    Raises:
        OptionError: it has no data of either kind.
    """
    if train_dataset is None and not named_datasets(eval_dataset):
        raise OptionError(
            f"`train_dataset` is required{data_of_commands(args)}; a trainer that only evaluates takes eval_dataset "
            "alone"
        )


def data_of_commands(args: AlignmentConfig) -> str:
    """Why an option that names data gives a trainer none; empty where no option does."""
    named = args.dataset_name or args.dataset_mixture
    return " (dataset_name is read by the command; pass load_dataset(...) in Python)" if named else ""


def check_optimizers(optimizers: tuple[Any, Any], model: Any) -> None:
    """Refuse an optimizer without its model, and a schedule without its optimizer.

    Raises:
        OptionError: they could not act on what is trained.
    """
    optimizer, schedule = optimizers
    if optimizer is not None and isinstance(model, str):
        raise OptionError("optimizers: they need a live model; pass the model object that they were made for")
    if schedule is not None and (optimizer is None or schedule.optimizer is not optimizer):
        raise OptionError("optimizers: the schedule steps another optimizer; pass the one that it was made for")


def load_tokenizer(given: Any, older_name: Any, policy: ModelSource, options: AlignmentConfig) -> Any:
    """The tokenizer that was given, or that was saved with the adapters to go on with, or the policy's own.

    Raises:
        OptionError: two different ones were given.
        ModelError: the model's folder has none, or it is not a tokenizer.
    """
    if given is not None and older_name is not None and given is not older_name:
        raise OptionError("tokenizer: processing_class was given as well; leave the older name out")
    tokenizer = given if given is not None else older_name
    saved = options.adapter_name_or_path
    if tokenizer is None and saved is not None and (Path(saved) / "tokenizer_config.json").is_file():
        policy = replace(policy, path=saved, live=None, init_kwargs={})  # with the chat template of their training
    return policy.tokenizer(tokenizer, "processing_class", options.trust_remote_code)


def with_vocabulary(
    source: ModelSource, vocabulary: Vocabulary, optimizers: tuple[Any, Any]
) -> tuple[ModelSource, str | None]:
    """The policy with the vocabulary that ``chat_template_path`` has given its tokenizer, and what to tell of it.

    Raises:
        OptionError: what a live model was made with would no longer fit it.
    """
    if vocabulary.rows is None and not vocabulary.new:
        return source.knowing(vocabulary), None
    if vocabulary.rows is not None and any(optimizers):
        raise OptionError(
            "chat_template_path: its tokens are new to the model, whose embeddings get further rows: optimizers was "
            "made for those of before; leave it out, or clone_chat_template() before making it"
        )
    if getattr(source.live, "peft_config", None):
        raise OptionError(
            "chat_template_path: its tokens are new to the model, which has adapters already; clone_chat_template() "
            "before making them, or set a .jinja file to write these tokens as text"
        )
    before = source.config.get_text_config().vocab_size
    note = f"chat_template_path: the tokenizer of {source.name} gets {len(vocabulary.new)} new tokens"
    if vocabulary.rows is not None:
        note += (
            f"; embeddings grow from {before} rows to {vocabulary.rows}, and new ones begin as the mean of the others"
        )
    return source.knowing(vocabulary), note


def named_datasets(value: Any) -> dict[str, Any]:
    """None, one dataset, or a dict of several -> datasets by name; a single one is called ``""``."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return {"": value}


def balancing_coefficient(options: AlignmentConfig, config: PretrainedConfig) -> float | None:
    """The weight of the balancing loss, or None for a model without one or a weight of 0.

    Raises:
        OptionError: the option is set, but the model is a mixture of experts that does not output router logits.
            Of a dense model it asks nothing.
    """
    text = config.get_text_config()
    asked, puts_out = options.router_aux_loss_coef, getattr(text, "output_router_logits", None)
    if not puts_out:
        if asked and puts_out is not None:
            raise OptionError(
                f"router_aux_loss_coef={asked}: the model's configuration has output_router_logits off; "
                'set model_init_kwargs: {"output_router_logits": true}, or leave router_aux_loss_coef unset'
            )
        if asked and getattr(text, "num_experts_per_tok", None):
            raise OptionError(
                f"router_aux_loss_coef={asked}: {type(text).__name__} has experts and no output_router_logits, so "
                "there is nothing to balance them by; leave router_aux_loss_coef unset"
            )
        return None
    coefficient = asked if asked is not None else getattr(text, "router_aux_loss_coef", None)
    return coefficient or None


def model_sources(
    model: str | PreTrainedModel,
    ref_model: str | PreTrainedModel | None,
    options: AlignmentConfig,
    needs_reference: bool,
    task: Task = CAUSAL_LM,
) -> tuple[ModelSource, ModelSource]:
    """Policy and reference as they were given, each loaded for ``task``; the same one twice where no reference was.

    Raises:
        OptionError: a reference that the method does not need, or that is the very policy.
        ModelError: one of them cannot be used.
    """
    ref_model = ref_model if ref_model is not None else options.ref_model_name_or_path
    if ref_model is not None and not needs_reference:
        raise OptionError(f"ref_model: {options.method} has no reference model; leave it out, and name args=")
    if ref_model is not None and ref_model is model and not isinstance(model, str):
        raise OptionError(
            "ref_model: is the very object given as model, so it would be trained too; leave ref_model out "
            "(a copy is taken) or pass a copy"
        )
    kwargs = loading_keywords(options.model_init_kwargs)
    policy = reference = model_source(model, "model_name_or_path", options, kwargs, task)
    if ref_model is not None:
        kwargs = loading_keywords(options.ref_model_init_kwargs) or kwargs
        reference = model_source(ref_model, "ref_model_name_or_path", options, kwargs, task)
    for source in (policy, reference):
        check_positions(source.config, limits_of(options).max_length)
    return policy, reference
