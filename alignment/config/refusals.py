"""Options that are refused by name, each with its reason and the nearest thing that works.

Two tables: fields that exist but do nothing yet, or not with every value (``NOT_YET``), and names that this project
does not have (``REMOVED``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import words

WORKING_OPTIMIZERS = words(
    "adamw_torch adamw_torch_fused adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit deepspeed_cpu_adam "
    "deepspeed_fused_adam sgd"
)
# transformers' OptimizerNames and DeepSpeed's own two; a test compares.
KNOWN_OPTIMIZERS = WORKING_OPTIMIZERS + words(
    "adamw_torch_xla adamw_torch_npu_fused adafactor adamw_anyprecision "
    "adamw_torch_4bit adamw_torch_8bit ademamix adagrad ademamix_8bit lion_8bit lion_32bit "
    "paged_ademamix_32bit paged_ademamix_8bit "
    "paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw "
    "galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise "
    "galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam schedule_free_adamw "
    "schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw"
)


@dataclass(frozen=True)
class NotYet:
    """A field of which only some values work: ``allowed`` ones pass, any other is refused with ``reason``.

    ``partial`` is true where the allowed values differ from each other in effect, so that the field is read.
    """

    allowed: tuple[Any, ...]
    reason: str
    instead: str
    partial: bool = False


_SYNC = "a reference that follows the policy is not supported yet"

NOT_YET: dict[str, NotYet] = {
    "optim": NotYet(
        WORKING_OPTIMIZERS, "this optimizer is not supported yet", "the nearest that works is", partial=True
    ),
    "sync_ref_model": NotYet((False,), _SYNC, "leave it out: the reference stays the policy as given"),
    "ref_model_mixup_alpha": NotYet((0.6,), _SYNC, "leave it out: the reference stays the policy as given"),
    "ref_model_sync_steps": NotYet((512,), _SYNC, "leave it out: the reference stays the policy as given"),
    "activation_offloading": NotYet(
        (False,), "activations in host memory are not supported yet", "keep gradient_checkpointing=true"
    ),
    "auto_find_batch_size": NotYet(
        (False,),
        "searching for a batch size is not supported yet",
        "set per_device_train_batch_size=1 and gradient_accumulation_steps to the rows of a step",
    ),
    "rollout_backend": NotYet(
        ("auto", "continuous", "generate"),
        "generation by vLLM is not supported yet",
        "set auto, continuous or generate",
        partial=True,
    ),
}

_NO_PAD_LABEL = "there is no pad label here: completions are marked by position"
_DECODER = "encoder-decoder models are not supported; use a causal language model"

REMOVED: dict[str, str] = {
    "fsdp": "the engine is DeepSpeed; set deepspeed to zero3, which shards parameters likewise",
    "tpu": "DeepSpeed does not run on TPUs; use a GPU or the CPU",
    "use_ipex": "Intel's extension is no longer needed; leave it out",
    "label_pad_token_id": _NO_PAD_LABEL + "; leave it out",
    "padding_value": _NO_PAD_LABEL + "; leave it out",
    "is_encoder_decoder": _DECODER,
    "max_target_length": _DECODER + " and max_completion_length",
    "local_rank": "the launcher sets it in the environment; leave it out",
    "evaluation_strategy": "set eval_strategy",
    "torch_dtype": "set dtype",
    "max_seq_length": "set max_length",
    "tokenizer": "the model's own tokenizer is used; in Python pass processing_class to the trainer",
    "tokenizer_name_or_path": "the model's own tokenizer is used; save the other one in the model's folder",
    "model": "set model_name_or_path",
    "model_name": "set model_name_or_path",
    "ref_model": "set ref_model_name_or_path",
    "dataset": "set dataset_name",
    "data_path": "set dataset_name",
    "lr": "set learning_rate",
    "epochs": "set num_train_epochs",
    "batch_size": "set per_device_train_batch_size",
    "train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "no_cuda": "set use_cpu",
    "fp16_full_eval": "evaluation computes as training does; set fp16 or bf16",
    "bf16_full_eval": "evaluation computes as training does; set fp16 or bf16",
    "logging_dir": "the log lies in output_dir",
    "padding_free": "set max_tokens_per_batch",
    "group_by_length": "set max_tokens_per_batch",
    "remove_unused_columns": "columns that a method does not need are always left aside; leave it out",
    "gamma": "set simpo_gamma",
    "fsdp_config": "the engine is DeepSpeed; set deepspeed to zero3",
    "reward_model": "set reward_model_path",
    "reward_func": "set reward_funcs",
    "reward_fn": "set reward_funcs",
    "response_length": "set max_new_tokens",
    "use_vllm": "completions are generated by transformers; set rollout_backend",
    "use_transformers_paged": "set rollout_backend: continuous",
    "loss_weights": "a sum of several losses is not supported; set one loss_type",
    "f_divergence_type": "log-ratios are those of the reverse KL; leave it out",
    "f_alpha_divergence_coef": "log-ratios are those of the reverse KL; leave it out",
    "ld_alpha": "log-probs are not weighted by length; leave it out",
    "use_weighting": "pairs are not weighted by their likelihood; leave it out",
    "discopop_tau": "discopop is not supported; leave it out",
    "rpo_alpha": "the likelihood of the chosen answers is a term of cpo; set method cpo and cpo_alpha",
    "cache_implementation": "the cache is the rollout's own; leave it out",
}
_DEEPSPEED = "the engine is DeepSpeed, configured by deepspeed"
_REMOVED_PREFIXES = {
    **dict.fromkeys(("fsdp_", "tpu_", "ddp_"), _DEEPSPEED),
    "vllm_": "completions are generated by transformers; leave it out",
}


def refused_fields() -> set[str]:
    """The fields of which only the default works: those that nothing reads yet."""
    return {name for name, entry in NOT_YET.items() if not entry.partial}


def refuse_not_yet(options: Any) -> None:
    """Raise :class:`OptionError` for the first field whose value does not work yet."""
    for name, entry in NOT_YET.items():
        value = getattr(options, name, entry.allowed[0])
        # False == 0 in Python: the type decides as well.
        if any(value == allowed and type(value) is type(allowed) for allowed in entry.allowed):
            continue
        instead = entry.instead
        if name == "optim":
            if value not in KNOWN_OPTIMIZERS:
                close = did_you_mean(value, KNOWN_OPTIMIZERS)
                raise OptionError(
                    f"{setting(name, value)}: no such optimizer{close}; set one of {', '.join(WORKING_OPTIMIZERS)}"
                )
            instead += " sgd" if "sgd" in value else " adamw_8bit" if "bit" in value else " adamw_torch"
        raise OptionError(f"{setting(name, value)}: {entry.reason}; {instead}")


def unknown_option(method: str, name: str, value: Any, known: Collection[str] = ()) -> OptionError:
    """The error for a name that is not among the ``known`` options of a method; without any, of all methods."""
    text = setting(name, value)
    if name in REMOVED:
        return OptionError(f"{text}: not an option here; {REMOVED[name]}")
    for prefix, instead in _REMOVED_PREFIXES.items():
        if name.startswith(prefix):
            return OptionError(f"{text}: not an option here; {instead}")
    from alignment.config.registry import METHODS, option_names

    for other, cls in METHODS.items():
        if other != method and name in option_names(cls):
            return OptionError(f"{text}: an option of method {other}, not of {method}; leave it out or use {other}")
    known = known or set().union(*map(option_names, METHODS.values()))
    return OptionError(f"{text}: unknown option{did_you_mean(name, known) or '; --help lists the options'}")


def check_names(cls: type, values: dict[str, Any]) -> None:
    """Raise :class:`OptionError` for the first name that is not a field of ``cls``."""
    known = {f.name for f in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in known:
            raise unknown_option(getattr(cls, "method", ""), name, value, known)
