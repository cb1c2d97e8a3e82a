"""Plan the adapters of a run from options, ``peft_config``, a folder or a live model, before weights are loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.config.errors import ModelError, OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_model import changed_lora
from alignment.models.adapters.record import Adapters, kind_of, unsupported
from alignment.models.adapters.skeleton import classifies, has_grown, plan_head, tried
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource, unread

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def plan_adapters(
    options: AlignmentConfig,
    source: ModelSource,
    *,
    peft_config: Any = None,
    live: PeftModel | None = None,
    quantization: Quantization | None = None,
    stage: int = 0,
) -> Adapters | None:
    """Return the adapters to train on a frozen base model, or None if the full model is trained.

    Args:
        options: the run's options.
        source: the policy's model.
        peft_config: a PEFT configuration that replaces the options.
        live: the user's model if it already has adapters.
        quantization: quantization of the base weights.
        stage: ZeRO stage of the policy's engine.

    Raises:
        OptionError: settings contradict each other or do not fit the model.
        ModelError: the adapters cannot be read or do not fit the model.
    """
    path = options.adapter_name_or_path
    ways = {
        "a model that has adapters": live is not None,
        "peft_config": peft_config is not None,
        "adapter_name_or_path": path is not None,
        "use_peft": options.use_peft and path is None,
    }
    given = [name for name, there in ways.items() if there]
    if len(given) > 1 and given != ["peft_config", "use_peft"]:  # TRL's scripts set both
        raise OptionError(f"{given[1]}: conflicts with {given[0]}: both define the adapters to train; remove one")
    if live is None:
        _refuse_live_only(options, source)
    if not given:
        if quantization is not None:
            raise OptionError(
                f"{source.name}: {quantization.bits}-bit weights cannot be trained directly; set use_peft: true to "
                "train adapters on them, or load the model without quantization"
            )
        if options.merged_output_dir is not None:
            raise OptionError(
                f"{setting('merged_output_dir', options.merged_output_dir)}: the run trains the full model, so there "
                "are no adapters to merge; remove it (the model is saved in output_dir)"
            )
        return None
    _check_folders(options, source)
    if live is not None:
        return _of_live(options, live, source)
    config: Any
    if path is not None:
        from peft import PeftConfig

        key = "adapter_name_or_path"
        try:
            config = PeftConfig.from_pretrained(path)
        except Exception as error:  # every library raises its own classes for a corrupt file
            if (Path(path) / "config.json").is_file() and not (Path(path) / "adapter_config.json").exists():
                raise ModelError(
                    f"{key}: {path!r} is a full model, not an adapter; set model_name_or_path to it and remove {key}"
                ) from error
            why = unread(path, error, "adapter_config.json")
            raise ModelError(f"{key}: adapter_config.json of {path!r} could not be loaded: {why}") from error
    elif peft_config is not None:
        config, key = _copied(peft_config, options), "peft_config"
    else:
        config, key = _lora(options, classifies(source)), "lora_target_modules"
    _check_variant(config, quantization, stage, key)
    adapters = tried(config, path, source, options.trust_remote_code, key)
    _check_variant(adapters.config, quantization, stage, key)  # PEFT may have replaced the targets
    return adapters


def _check_variant(config: Any, quantization: Quantization | None, stage: int, key: str) -> None:
    """Reject adapters that are not supported, at all or on these weights."""
    reason, kind = unsupported(config), kind_of(config)
    if reason is not None:
        raise OptionError(f"{key}: {reason}")
    if kind != "LORA" and (stage == 3 or quantization is not None):
        raise OptionError(f"{key}: {kind} adapters need unquantized weights below ZeRO stage 3; use LORA")
    start = getattr(config, "init_lora_weights", True)
    if start not in (True, False, "gaussian", "orthogonal"):
        raise OptionError(
            f"{key}: init_lora_weights={start!r} needs data or rewrites the base weights; use the default, or prepare "
            "the model with PEFT and pass the PeftModel"
        )
    if getattr(config, "use_dora", False) and quantization is not None and stage == 3:
        raise OptionError(
            f"use_dora=True: DoRA reads the norms of the base weights, but PEFT cannot gather {quantization.bits}-bit "
            "weights at ZeRO stage 3; set deepspeed: zero2, or remove use_dora"
        )
    if getattr(config, "target_parameters", None) and stage == 3:
        raise OptionError(
            "lora_target_parameters: not supported at ZeRO stage 3, where PEFT adds adapters to parameters before "
            "they are gathered; set deepspeed: zero2"
        )


def _copied(peft_config: Any, options: AlignmentConfig) -> Any:
    """Return a copy of the user's configuration, which replaces the options ``lora_*``."""
    if not (hasattr(peft_config, "peft_type") and hasattr(peft_config, "to_dict")):
        raise OptionError(f"peft_config: {type(peft_config).__name__} is not a PEFT configuration")
    changed = changed_lora(options)
    if changed is not None:
        raise OptionError(
            f"{setting(changed, getattr(options, changed))}: has no effect with peft_config; set it there"
        )
    return copy.deepcopy(peft_config)


def _check_folders(options: AlignmentConfig, source: ModelSource) -> None:
    """Check that adapters do not overwrite the base model, and that the merged model has its own folder."""
    out, base = Path(options.output_dir or "").resolve(), source.name
    if Path(base).is_dir() and Path(base).resolve() == out:
        raise OptionError(
            f"{setting('output_dir', options.output_dir)}: this folder contains the base model, which the adapters "
            "need and would overwrite; choose another folder"
        )
    if options.merged_output_dir is None:
        return
    merged, named = Path(options.merged_output_dir).resolve(), setting("merged_output_dir", options.merged_output_dir)
    if source.path is None:
        raise OptionError(
            f"{named}: the base model is a live object, whose weights may not be on disk; pass its path, or call "
            "merge_and_unload() on the PeftModel"
        )
    if merged == out or merged in out.parents:
        raise OptionError(f"{named}: the adapters are saved in {options.output_dir}; choose a separate folder")
    for name in sorted({"subfolder", "cache_dir", "token"} & source.init_kwargs.keys()):
        raise OptionError(f"{named}: merging does not support {name} in model_init_kwargs; remove one of the two")


def _refuse_live_only(options: AlignmentConfig, source: ModelSource) -> None:
    """Reject options of a ``PeftModel``, and a transformers model with adapters that was passed without it."""
    for name in ("model_adapter_name", "ref_adapter_name"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: it selects an adapter of a live PeftModel; pass one as "
                "model, or remove it"
            )
    there = list(getattr(source.live, "peft_config", None) or ())
    if there:
        raise OptionError(
            f"model: it already contains adapters ({', '.join(there)}) from an earlier run or from transformers; pass "
            "a PeftModel to continue training them, or reload the base model"
        )


def _lora(options: AlignmentConfig, classifier: bool) -> LoraConfig:
    from peft import LoraConfig

    targets = options.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():
        targets = [targets]  # PEFT would match a single name against full paths as a regular expression
    return LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        target_parameters=options.lora_target_parameters,
        modules_to_save=options.lora_modules_to_save,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        task_type="SEQ_CLS" if classifier else "CAUSAL_LM",
    )


def _of_live(options: AlignmentConfig, live: PeftModel, source: ModelSource) -> Adapters:
    """Plan the adapters of a live model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    known = list(live.peft_config)
    for key in ("model_adapter_name", "ref_adapter_name"):
        wanted = getattr(options, key)
        if wanted is not None and wanted not in known:
            raise OptionError(
                f"{setting(key, wanted)}: the model has no adapter of this name; available: {', '.join(known)}"
            )
    active = list(live.active_adapters)
    name = options.model_adapter_name or active[0]
    if options.model_adapter_name is None and len(active) > 1:
        raise OptionError(
            f"model: several adapters are active ({', '.join(active)}), but only one can be trained; set "
            "model_adapter_name"
        )
    if name == options.ref_adapter_name:
        raise OptionError(
            f"{setting('ref_adapter_name', name)}: this adapter is being trained; remove the option to use the "
            "initial policy as the reference"
        )
    for module in live.modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise OptionError("model: its adapters are merged into the base; call unmerge_adapter() before training")
    config = copy.deepcopy(live.peft_config[name])
    reason = unsupported(config)
    if reason is not None:
        raise OptionError(f"model: {reason}")
    kept, note = plan_head(config, source, live=True)
    trained = sum(p.numel() for n, p in live.named_parameters() if f".{name}." in f"{n}.")
    total = live.get_nb_trainable_parameters()[1]
    return Adapters(
        config,
        name=name,
        live=live,
        reference=options.ref_adapter_name,
        trained=trained,
        total=total,
        embeddings=has_grown(source),
        head=kept,
        notes=(note,) if note else (),
    )
