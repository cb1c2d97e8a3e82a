"""The adapters that a run asks for, tried on its model without weights: what cannot work is named before loading."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from alignment.config.errors import ModelError, OptionError, did_you_mean, first_line, setting
from alignment.config.options import AlignmentConfig
from alignment.models.adapters import Adapters, adapter_shapes, is_adapter_config, plain_start, read_adapter
from alignment.models.classifier import HEAD
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # those that a test trains, saves and reads back
_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")
# LoRA's further settings that change what a layer is, or that start from data that a trainer has not got.
_LORA_REFUSED = ("layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config", "velora_config")
_BY_DATA = ("eva", "corda", "loftq", "lora_ga")
_REWRITING = ("pissa", "olora")


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
    if options.merged_output_dir is not None and source.path is None:
        raise OptionError(
            f"{setting('merged_output_dir', options.merged_output_dir)}: the base is a live model, whose weights may "
            "be in no folder; pass its path, or call merge_and_unload() of the PeftModel"
        )
    if live is not None:
        return _of_live(options, live, source)
    if path is not None:
        config = _read(path)
    elif peft_config is not None:
        if not is_adapter_config(peft_config):
            raise OptionError(f"peft_config: {type(peft_config).__name__} is not a configuration of PEFT")
        config = copy.deepcopy(peft_config)
    else:
        config = _lora(options)
    _check_kind(config, "adapter_name_or_path" if path else "peft_config" if peft_config else "use_peft")
    if path is not None:
        _check_score(config, source, "adapter_name_or_path")
    _check_variant(config, quantization, stage)
    return _tried(config, path, source, quantization, options.trust_remote_code)


def _refuse_names(options: AlignmentConfig) -> None:
    for name in ("model_adapter_name", "ref_adapter_name"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: names an adapter of a live PeftModel with several; pass "
                "such a model, or leave it out"
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


def _check_kind(config: PeftConfig, key: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise OptionError(
            f"{key}: {kind} learns prompts, which change every sequence's length and positions; use LoRA instead"
        )
    if kind not in KINDS:
        raise OptionError(f"{key}: {kind} adapters have not been tried here; use one of {', '.join(KINDS)}")


def _check_score(config: Any, source: ModelSource, key: str) -> None:
    """A reward model's head has to be trained with adapters that are there already, or rewards stay as they began."""
    if _classifies(source) and HEAD not in (config.modules_to_save or ()):
        raise OptionError(
            f"{key}: these adapters leave out {HEAD}, the head of a reward model, so that it would not be trained; "
            f"begin with new ones, or make them with modules_to_save: [{HEAD!r}]"
        )


def _classifies(source: ModelSource) -> bool:
    return source.task.noun != CAUSAL_LM.noun


def _check_variant(config: Any, quantization: Quantization | None, stage: int) -> None:
    """Variants that are known to fail, by name."""
    kind = str(config.peft_type.value)
    if kind == "LOHA" and stage == 3:
        raise OptionError(
            "peft_config: LOHA adapters are made after the weights' shapes, which are divided at ZeRO stage 3; set "
            "deepspeed to zero2, or use LORA"
        )
    if kind in ("LOHA", "LOKR") and quantization is not None:
        raise OptionError(
            f"peft_config: {kind} adapters are added to the weights, which are quantised; use LORA, IA3 or OFT"
        )
    for name in _LORA_REFUSED:
        if getattr(config, name, None):
            raise OptionError(f"peft_config: {setting(name, getattr(config, name))} is not supported; leave it out")
    start = str(getattr(config, "init_lora_weights", True)).lower()
    if start.startswith(_BY_DATA):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} starts from data or from another copy of the weights; prepare "
            "the model with PEFT and pass the PeftModel, or use another start"
        )
    if start.startswith(_REWRITING) and (stage == 3 or quantization is not None):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} rewrites the base weights, which are "
            + ("divided at ZeRO stage 3; set deepspeed to zero2" if stage == 3 else "quantised; load them whole")
            + ", or use another start"
        )
    if getattr(config, "use_dora", False) and quantization is not None and stage == 3:
        raise OptionError(
            f"use_dora=True: DoRA reads the norms of the base weights, and PEFT cannot gather {quantization.bits}-bit "
            "ones at ZeRO stage 3; set deepspeed to zero2, or leave use_dora out"
        )
    if getattr(config, "target_parameters", None):
        if config.lora_dropout:
            raise OptionError(
                f"lora_dropout={config.lora_dropout}: lora_target_parameters cannot have dropout; set lora_dropout: 0"
            )
        if stage == 3:
            raise OptionError(
                "lora_target_parameters: adapters of parameters are added to them before they are gathered at ZeRO "
                "stage 3; set deepspeed to zero2"
            )


def skeleton(source: ModelSource, trust_remote_code: bool) -> PreTrainedModel:
    """The model with its modules and shapes, without memory for weights."""
    config = copy.deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        if source.live is not None:
            return type(source.live)(config)
        model: PreTrainedModel = source.task.auto.from_config(config, trust_remote_code=trust_remote_code)
        return model


def _tried(
    config: Any, path: str | None, source: ModelSource, quantization: Quantization | None, trust_remote_code: bool
) -> Adapters:
    """Complete a configuration and inject it into a model without weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = skeleton(source, trust_remote_code)
    classifies = _classifies(source)
    config.task_type = "SEQ_CLS" if classifies else "CAUSAL_LM"
    config.inference_mode = False
    config.base_model_name_or_path = source.name
    config.revision = source.init_kwargs.get("revision")
    head = _head_name(model, classifies)
    linear = dict(_linear(model, head))
    if path is None:
        _complete(config, linear, model, head)
        if classifies:
            config.modules_to_save = sorted({*(config.modules_to_save or ()), HEAD})
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights on the meta device that nobody fills
            model.add_adapter(plain_start(config), "default")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise OptionError(
            f"{'adapter_name_or_path' if path else 'lora_target_modules'}: {first_line(error)}; the linear layers of "
            f"{source.name} are {', '.join(sorted(set(linear.values())))}"
        ) from error
    shapes = adapter_shapes(model, "default")
    if path is not None:
        _check_shapes(path, shapes, source)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    added = sum(parameter.numel() for parameter in model.parameters()) - total
    layers = tuple(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    adapters = Adapters(config, path=path, layers=layers, trained=trained, total=total + added)
    return replace(adapters, notes=tuple(_notes(config, model, experts, quantization)))


def _complete(config: Any, linear: dict[str, str], model: nn.Module, head: str | None) -> None:
    """Name the modules to adapt where none are named, and check those that are."""
    targets = getattr(config, "target_modules", None)
    if targets is None or targets == "all-linear":
        others = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
                  and name not in linear}  # fmt: skip
        config.target_modules = sorted(set(linear.values()) if not others & set(linear.values()) else linear)
        if str(config.peft_type.value) == "IA3":
            config.feedforward_modules = []
    elif not isinstance(targets, str):
        config.target_modules = sorted(targets)
        _check_named(targets, [name for name, _ in model.named_modules()], "lora_target_modules", linear)
    parameters = getattr(config, "target_parameters", None)
    if parameters:
        known = [name for name, _ in model.named_parameters()]
        _check_named(parameters, known, "lora_target_parameters", {n: n.rpartition(".")[2] for n in known})
    if config.modules_to_save:
        known = [name for name, _ in model.named_modules()]
        _check_named(
            config.modules_to_save, known, "lora_modules_to_save", {n: n for n in (head, "embed_tokens") if n}
        )


def _check_named(wanted: Iterable[str], known: list[str], option: str, shown: dict[str, str]) -> None:
    ends = sorted(set(shown.values()))
    for name in wanted:
        if not any(one == name or one.endswith(f".{name}") for one in known):
            raise OptionError(
                f"{option}: the model has no {name!r}{did_you_mean(name, ends)}; it has {', '.join(ends)}"
            )


def _head_name(model: PreTrainedModel, classifies: bool) -> str | None:
    head = getattr(model, HEAD, None) if classifies else model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _linear(model: nn.Module, head: str | None) -> Iterator[tuple[str, str]]:
    """Names of the linear layers, whole and their last parts, without head and routers."""
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, (nn.Linear, Conv1D)) and name != head and last not in _ROUTERS:
            yield name, last


def _check_shapes(path: str, shapes: dict[str, tuple[int, ...]], source: ModelSource) -> None:
    """Whether an adapter's weights are those of this model.

    Raises:
        ModelError: naming the first tensor that is not.
    """
    state = {name.removeprefix("base_model.model."): value for name, value in read_adapter(path).items()}
    for name, value in sorted(state.items()):
        expected = shapes.get(name)
        if expected is not None and expected != tuple(value.shape):
            raise ModelError(
                f"adapter_name_or_path: {path!r} was not made for {source.name}: its {name} is "
                f"{tuple(value.shape)}, and this model's would be {expected}; set model_name_or_path to its own base"
            )
    missing = sorted(set(shapes) - set(state))
    if missing and not any(name in shapes for name in state):
        raise ModelError(
            f"adapter_name_or_path: {path!r} was not made for {source.name}: it has no {missing[0]}; set "
            "model_name_or_path to its own base"
        )
    extra = sorted(name for name in set(state) - set(shapes) if "embed" in name)
    if extra:
        raise ModelError(
            f"adapter_name_or_path: {path!r} has {extra[0]} of its own, of {state[extra[0]].shape[0]} tokens: merge "
            "it into its base (deepspeed-alignment export) and start from that"
        )


def _notes(
    config: Any, model: PreTrainedModel, experts: Iterable[str], quantization: Quantization | None
) -> Iterator[str]:
    """What a user may not expect of these adapters on this model."""
    left = sorted({name.rpartition(".")[2] for name in experts if not _is_adapted(name, config)})
    if left:
        kept = "" if quantization is None else ", and are kept whole: they are not linear layers"
        names = ", ".join(left)
        yield f"the experts ({names}) get no adapter{kept}; name them in lora_target_parameters to train them"
    touched = {name.rpartition(".")[2] for name in (config.modules_to_save or ())} & {"lm_head", "embed_tokens"}
    if touched and model.config.get_text_config().tie_word_embeddings:
        yield (
            f"{' and '.join(sorted(touched))}: head and embeddings of this model are one tensor; trained is a copy of "
            "its own, so that they differ afterwards"
        )


def _is_adapted(name: str, config: Any) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in getattr(config, "target_parameters", None) or ())


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
    config = live.peft_config[name]
    _check_kind(config, "model")
    _check_score(config, source, "model")
    if config.task_type is None:
        config.task_type = "SEQ_CLS" if _classifies(source) else "CAUSAL_LM"
    trained = sum(p.numel() for n, p in live.named_parameters() if f".{name}." in f"{n}.")
    total = live.get_nb_trainable_parameters()[1]
    return Adapters(
        config,
        name=name,
        live=live,
        reference=options.ref_adapter_name,
        trained=trained,
        total=total,
        embeddings=_has_grown(source),
    )


def _has_grown(source: ModelSource) -> bool:
    """Whether a live model has embeddings of another size than the checkpoint that it came from."""
    try:
        before = AutoConfig.from_pretrained(source.config.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return False
    return bool(before.get_text_config().vocab_size != source.config.get_text_config().vocab_size)
