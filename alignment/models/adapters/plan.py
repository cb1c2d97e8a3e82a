"""The adapters that a run asks for, in whichever way: what cannot work is named before weights are loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.config.errors import ModelError, OptionError, first_line, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_model import changed_lora
from alignment.models.adapters.kinds import check_kind, check_variant, classifies
from alignment.models.adapters.record import Adapters, is_adapter_config
from alignment.models.adapters.score import HeadPlan, plan_live, task_type
from alignment.models.adapters.skeleton import has_grown, tried
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel


def plan_adapters(
    options: AlignmentConfig,
    source: ModelSource,
    *,
    peft_config: Any = None,
    live: PeftModel | None = None,
    quantization: Quantization | None = None,
    stage: int = 0,
) -> Adapters | None:
    """What is trained beside a frozen base; None where the whole model is.

    Args:
        options: the run's.
        source: the policy's model.
        peft_config: PEFT's configuration, in place of the options.
        live: the user's model, if it has adapters already.
        quantization: of the base weights.
        stage: ZeRO stage of the policy's engine.

    Raises:
        OptionError: settings that contradict each other, or that do not suit the model.
        ModelError: adapters that cannot be read, or that are not this model's.
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
        raise OptionError(f"{given[1]}: {given[0]} was given as well, and both say what to train; leave one out")
    if live is None:
        _refuse_names(options)
        _refuse_injected(source)
    if not given:
        if quantization is not None:
            raise OptionError(
                f"{source.name}: {quantization.bits}-bit weights cannot be trained themselves; set use_peft: true to "
                "train adapters on them, or leave the quantisation out"
            )
        if options.merged_output_dir is not None:
            raise OptionError(
                f"{setting('merged_output_dir', options.merged_output_dir)}: there are no adapters to merge; leave it "
                "out, the whole model is saved in output_dir"
            )
        return None
    _check_folders(options, source)
    if live is not None:
        return _of_live(options, live, source)
    if path is not None:
        config = _read(path)
    elif peft_config is not None:
        if not is_adapter_config(peft_config):
            raise OptionError(f"peft_config: {type(peft_config).__name__} is not a configuration of PEFT")
        changed = changed_lora(options)
        if changed is not None:
            raise OptionError(
                f"{setting(changed, getattr(options, changed))}: has no effect with peft_config; set it there"
            )
        config = copy.deepcopy(peft_config)
    else:
        config = _lora(options)
    check_kind(config, "adapter_name_or_path" if path else "peft_config" if peft_config else "use_peft")
    check_variant(config, quantization, stage)
    in_python = path is None and peft_config is not None
    adapters = tried(config, path, source, quantization, options.trust_remote_code, given=in_python)
    check_variant(adapters.config, quantization, stage)  # PEFT may have found other targets in the model
    return adapters


def _check_folders(options: AlignmentConfig, source: ModelSource) -> None:
    """Adapters replace no base, and what they are merged into is another folder than theirs."""
    out, base = Path(options.output_dir or "").resolve(), source.name
    if Path(base).is_dir() and Path(base).resolve() == out:
        raise OptionError(
            f"{setting('output_dir', options.output_dir)}: it holds the base, which adapters need and would replace; "
            "choose another folder"
        )
    if options.merged_output_dir is None:
        return
    merged, named = Path(options.merged_output_dir).resolve(), setting("merged_output_dir", options.merged_output_dir)
    if source.path is None:
        raise OptionError(
            f"{named}: the base is a live model, whose weights may be in no folder; pass its path, or call "
            "merge_and_unload() of the PeftModel"
        )
    if merged == out or merged in out.parents:
        raise OptionError(f"{named}: the adapters go to {options.output_dir}; choose a folder of its own")
    further = sorted(set(source.init_kwargs) & {"subfolder", "cache_dir", "token"})
    if further:
        raise OptionError(f"{named}: the base is loaded with {further[0]}, which merging does not know; leave one out")


def _refuse_names(options: AlignmentConfig) -> None:
    for name in ("model_adapter_name", "ref_adapter_name"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: names an adapter of a live PeftModel with several; pass "
                "such a model, or leave it out"
            )


def _refuse_injected(source: ModelSource) -> None:
    """A transformers model that has adapters inside, and comes without the ``PeftModel`` that tells about them."""
    there = list(getattr(source.live, "peft_config", None) or ())
    if there:
        raise OptionError(
            f"model: it has adapters inside already ({', '.join(there)}), from an earlier run or from transformers; "
            "pass it as a PeftModel to train them further, or load the base anew"
        )


def _lora(options: AlignmentConfig) -> LoraConfig:
    from peft import LoraConfig

    targets = options.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():
        targets = [targets]  # one name; PEFT would take it for a regular expression of the whole path
    return LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        target_parameters=options.lora_target_parameters,
        modules_to_save=options.lora_modules_to_save,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
    )


def _read(path: str) -> PeftConfig:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(path)
    except Exception as error:  # each library has its own classes for one broken file
        raise ModelError(
            f"adapter_name_or_path: {path!r} has no usable adapter_config.json: {first_line(error)}"
        ) from error


def _of_live(options: AlignmentConfig, live: PeftModel, source: ModelSource) -> Adapters:
    """The adapters that a live model has."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    known = list(live.peft_config)
    for key in ("model_adapter_name", "ref_adapter_name"):
        wanted = getattr(options, key)
        if wanted is not None and wanted not in known:
            raise OptionError(f"{setting(key, wanted)}: the model has no such adapter; it has {', '.join(known)}")
    active = list(live.active_adapters)
    name = options.model_adapter_name or active[0]
    if options.model_adapter_name is None and len(active) > 1:
        raise OptionError(
            f"model: its adapters {', '.join(active)} are all active, and one can be trained; set model_adapter_name"
        )
    if name == options.ref_adapter_name:
        raise OptionError(
            f"{setting('ref_adapter_name', name)}: it is the adapter that is trained; leave it out for the policy as "
            "given"
        )
    for module in live.modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise OptionError("model: its adapters are merged into the base; call unmerge_adapter() before")
    config = copy.deepcopy(live.peft_config[name])
    check_kind(config, "model")
    head = plan_live(config, source) if classifies(source) else HeadPlan()
    if config.task_type is None:
        config.task_type = task_type(config, source)
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
        head=head.kept,
        notes=(head.note,) if head.note else (),
    )
