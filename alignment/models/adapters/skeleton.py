"""Complete and check an adapter configuration by injecting it into the model on the meta device."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alignment.config.dtypes import planned
from alignment.config.errors import ModelError, OptionError, did_you_mean, first_line
from alignment.models.adapters.record import (
    PREFIX,
    Adapters,
    adapter_tensors,
    adapter_weights,
    kind_of,
    with_initialization,
)
from alignment.models.classifier import HEAD, HEAD_TENSORS
from alignment.models.partitioning import decoder_layers, whole_parameters
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM, is_classifier

_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")
_ALL = "all-linear"


def skeleton(source: ModelSource, trust_remote_code: bool) -> PreTrainedModel:
    """Create the model on the meta device, with its modules and shapes but without weights."""
    config = copy.deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        if source.live is not None:
            return type(source.live)(config)
        model: PreTrainedModel = source.task.auto.from_config(config, trust_remote_code=trust_remote_code)
        return model


def known_skeleton(source: ModelSource) -> PreTrainedModel | None:
    """Create the model without weights; return None if that takes remote code or fails, as loading it will report."""
    if source.live is None and type(source.config) not in source.task.mapping:
        return None
    try:
        return skeleton(source, trust_remote_code=False)
    except Exception:
        return None


def largest_layer(source: ModelSource, dtype: torch.dtype) -> int:
    """Return the number of elements of this dtype of the largest decoder layer, packed if it is; 0 if unknown."""
    model, plan = known_skeleton(source), source.quantization
    numel = 0 if model is None else max(map(whole_parameters, decoder_layers(model)), default=0)
    return numel if plan is None else numel * plan.bits // (8 * dtype.itemsize)


def tried(config: Any, path: str | None, source: ModelSource, trust_remote_code: bool, key: str) -> Adapters:
    """Complete a configuration and inject it into a model without weights.

    Args:
        config: the PEFT configuration, which is modified.
        path: the folder that it was read from; None for new adapters. Without its weights, if the machine that is
            planned for reads none, a head that it does not train is assumed to be among them.
        source: the policy's model.
        trust_remote_code: run code that comes with the model.
        key: option or argument that the configuration comes from. Names in ``peft_config`` that the model does not
            have are ignored by PEFT if at least one is left; in options they are errors.

    Raises:
        OptionError: the configuration does not fit the model.
        ModelError: the weights in the folder do not fit the model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, machine = skeleton(source, trust_remote_code), planned()
    reads = machine is None or machine.reads_weights
    saved = None if path is None else _saved(path) if reads else dict.fromkeys(HEAD_TENSORS, torch.empty(0))
    config.inference_mode = False
    config.base_model_name_or_path = source.name
    config.revision = source.init_kwargs.get("revision")
    kept, note = plan_head(config, source, saved)
    linear = dict(_linear_layers(model, source))
    new_rows: tuple[str, ...] = ()
    packed = () if source.quantization is None else source.quantization.packed_experts
    completed = path is None and _complete(config, linear, model)
    if path is None:
        _check_names(config, linear, model, key)
    left = ""
    if packed:
        trial = copy.deepcopy(config)
        trial.lora_dropout = 0.0  # as adapters on experts require, which are to be found
        found = _injected(skeleton(source, trust_remote_code), trial, source, key)
        left = _leave_experts(config, found, packed, completed)
    if path is None:
        new_rows = _train_new_rows(config, model, source)
    experts = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.ndim == 3}
    _take_converted(config, _injected(model, config, source, key))
    if saved is not None and reads:
        _check_shapes(str(path), saved, model, source)
    idle = experts - {name.rpartition(".")[2] for name in getattr(config, "target_parameters", None) or ()}
    notes = [note] if note else []
    if idle:
        further = " and set bnb_4bit_skip_experts: true" if packed else ""
        names = ", ".join(sorted(idle))
        notes.append(
            f"the experts ({names}) get no adapters; add them to lora_target_parameters{further} to train them"
        )
    if left:
        notes.append(f"{left} get no adapters: PEFT adapts layers of these names only together with the experts")
    if new_rows:
        notes.append(
            f"chat_template_path: {' and '.join(new_rows)} are trained in full and saved with the adapters, because "
            "the embeddings of new tokens would otherwise keep their initial values; use a .jinja file to write such "
            "tokens as text instead"
        )
    return Adapters(
        config,
        path=path,
        layers=tuple(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        total=sum(parameter.numel() for parameter in model.parameters()),
        notes=tuple(notes),
        embeddings=source.live is not None and has_grown(source) and not new_rows,
        head=kept,
    )


def _saved(path: str) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in adapter_weights(path).items()}


def plan_head(
    config: Any, source: ModelSource, saved: Mapping[str, Tensor] | None = None, *, live: bool = False
) -> tuple[bool, str]:
    """Plan the head of a reward model, and set PEFT's task type.

    A head that the configuration names is trained in full (``modules_to_save``, or ``task_type="SEQ_CLS"``) or gets
    an adapter (``target_modules``). Otherwise a head from a checkpoint is frozen, as in PEFT, and new adapters train
    a newly initialized one in full. A head that may not be in a checkpoint is saved with the adapters.

    Args:
        config: the PEFT configuration, which is modified.
        source: the policy's model.
        saved: the tensors of adapters from a folder.
        live: whether the model already has the adapters.

    Returns:
        Whether the head is saved unchanged with the adapters, and a message for the user or an empty string.

    Raises:
        ModelError: the head for which saved adapters were trained is missing.
    """
    if not classifies(source):
        config.task_type = "CAUSAL_LM"
        return False, ""
    stored, whole, targets = is_classifier(source.config), {*(config.modules_to_save or ())}, config.target_modules
    named = HEAD in whole or str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS"
    if targets == _ALL:
        adapted = stored
    else:
        adapted = re.fullmatch(targets, HEAD) is not None if isinstance(targets, str) else HEAD in (targets or ())
    if saved is None and not live and (named or not (stored or adapted)):
        config.modules_to_save = sorted({*whole, HEAD})
    config.task_type = "SEQ_CLS" if HEAD in (config.modules_to_save or ()) else None
    if config.task_type is not None:
        return False, "" if named else f"{HEAD}, the head, is not in a checkpoint; it is trained with the adapters"
    if saved is not None:
        kept = any(name in saved for name in HEAD_TENSORS)
        if not kept and not stored:
            raise ModelError(
                f"adapter_name_or_path: neither the adapters nor {source.name} contain {HEAD}, the head of a reward "
                f"model; train new adapters, or recreate them with modules_to_save: [{HEAD!r}]"
            )
    else:
        kept = source.live is not None or not stored
    if adapted:
        return kept, "" if stored else f"{HEAD}, the head, gets an adapter and is saved with the adapters"
    frozen = stored or saved is not None
    state = "is frozen" if frozen else "keeps its random initial values and is saved with the adapters"
    return kept, f"{HEAD}, the head, {state}; to train it, add modules_to_save=[{HEAD!r}] to the configuration"


def classifies(source: ModelSource) -> bool:
    """Return whether the model is loaded with a classifier's head."""
    return source.task.noun != CAUSAL_LM.noun


def has_grown(source: ModelSource) -> bool:
    """Return whether a live model's vocabulary size differs from that of its checkpoint."""
    try:
        before = AutoConfig.from_pretrained(source.config.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return False
    return bool(before.get_text_config().vocab_size != source.config.get_text_config().vocab_size)


def _linear_layers(model: Any, source: ModelSource) -> Iterator[tuple[str, str]]:
    """Yield the full name and the last component of each linear layer, except the head and routers."""
    head = getattr(model, HEAD, None) if classifies(source) else model.get_output_embeddings()
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not {*_ROUTERS} & {*parts}:
            yield name, parts[-1]


def _complete(config: Any, linear: dict[str, str], model: nn.Module) -> bool:
    """Fill in ``target_modules`` if the configuration does not name any; return whether that was so."""
    targets = getattr(config, "target_modules", None)
    if targets is None or targets == _ALL:
        others = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
                  and name not in linear}  # fmt: skip
        config.target_modules = sorted(set(linear.values()) if not others & set(linear.values()) else linear)
        if targets == _ALL and config.task_type is None:  # a reward model's head that is not trained in full
            config.target_modules.append(HEAD)
        if kind_of(config) == "IA3":
            config.feedforward_modules = []
        return True
    if not isinstance(targets, str):
        config.target_modules = sorted(targets)
    return False


def _injected(model: PreTrainedModel, config: Any, source: ModelSource, key: str) -> Any:
    """Inject adapters, and return their configuration with targets that PEFT may have converted."""
    names = ", ".join(sorted({last for _, last in _linear_layers(model, source)}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights on the meta device are not initialized
            model.add_adapter(with_initialization(copy.deepcopy(config), True), "default")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise OptionError(f"{key}: {first_line(error)}; the linear layers of {source.name} are {names}") from error
    return model.peft_config["default"]


def _leave_experts(config: Any, found: Any, packed: tuple[str, ...], completed: bool) -> str:
    """Check that no adapters are added to ``packed`` experts, which PEFT would silently ignore.

    In ``found``, PEFT has converted the targets of ``config``: in many types of models it takes the names of linear
    layers for those of experts in older transformers releases. If targets were ``completed``, these layers are removed
    from them; their names are returned.
    """
    given = {*(getattr(config, "target_parameters", None) or ())}
    targets = sorted(getattr(found, "target_parameters", None) or ())
    adapted = [name for name in targets if any(_is_named(one, name) for one in packed)]
    for name in adapted:
        if name in given or not completed:
            key = "lora_target_parameters" if name in given else "lora_target_modules"
            raise OptionError(
                f"{key}: adapters would be added to the experts in {name!r}, which are quantized; remove its name, or "
                "set bnb_4bit_skip_experts: true to leave the experts unquantized"
            )
    if not adapted:
        return ""
    before, config.target_modules = config.target_modules, sorted(found.target_modules)
    return ", ".join(name for name in before if name not in found.target_modules)


def _train_new_rows(config: Any, model: PreTrainedModel, source: ModelSource) -> tuple[str, ...]:
    """If tokens are added to the model, train the embeddings and the head in full, and return their names.

    Modules that have adapters are not included. Nothing is changed if the configuration has
    ``trainable_token_indices``.
    """
    if not source.vocabulary.new or getattr(config, "trainable_token_indices", None):
        return ()
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in ends]
    targets = config.target_modules
    names = [name for name in names if isinstance(targets, str) or name not in targets]
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *names})
    return tuple(names)


def _is_named(full: str, name: str) -> bool:
    return f".{full}".endswith(f".{name}")


def _check_names(config: Any, linear: dict[str, str], model: PreTrainedModel, key: str) -> None:
    """Check that the model has the modules and parameters named in the options; PEFT ignores unknown ones.

    Of those in another configuration, PEFT also ignores modules if another one is found, but parameters in any case.
    """
    modules, parameters = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    for field, known, shown in (
        ("target_modules", modules, {*linear.values()}),
        ("target_parameters", parameters, {name.rpartition(".")[2] for name in parameters}),
        ("modules_to_save", modules, {"embed_tokens", "lm_head", HEAD}),
    ):
        wanted = getattr(config, field, None) or ()
        if isinstance(wanted, str) or (key != "lora_target_modules" and field != "target_parameters"):
            continue
        for name in sorted(wanted):
            if not any(_is_named(one, name) for one in known):
                where = f"lora_{field}" if key == "lora_target_modules" else f"{key}: {field}"
                raise OptionError(
                    f"{where}: the model has no {name!r}{did_you_mean(name, sorted(shown))}; available: "
                    f"{', '.join(sorted(shown))}"
                )


def _take_converted(config: Any, found: Any) -> None:
    """Take over the targets that PEFT converted from module names of older transformers releases.

    Experts are now parameters of one module. The saved configuration must have the names used by the adapters.
    """
    old, new = (set(getattr(one, "target_parameters", None) or ()) for one in (config, found))
    if new - old:
        config.target_modules, config.target_parameters = sorted(found.target_modules), sorted(old | new)
        config.rank_pattern, config.alpha_pattern = found.rank_pattern, found.alpha_pattern


def _check_shapes(path: str, saved: Mapping[str, Tensor], model: PreTrainedModel, source: ModelSource) -> None:
    """Check that an adapter's weights fit this model.

    Raises:
        ModelError: a tensor does not fit; the message names the first one.
    """
    own = adapter_tensors(model, "default", dict(model.state_dict()))
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {n: tuple(one.shape) for n, one in saved.items() if n not in HEAD_TENSORS or n in shapes}
    embeddings = sorted(name for name in found.keys() - shapes.keys() if "embed" in name)
    if embeddings:
        raise ModelError(
            f"adapter_name_or_path: {path!r} contains its own {embeddings[0]} with {found[embeddings[0]][0]} rows; "
            "merge it into its base model (deepspeed-alignment export) and train the merged model"
        )
    converted = any("experts" in name for name in found)  # PEFT converts experts saved by older releases while loading
    for name in sorted(found.keys() & shapes.keys() if converted else found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            what = f"{name} has shape {found.get(name)}; expected {shapes.get(name)}"
            raise ModelError(
                f"adapter_name_or_path: {path!r} does not fit {source.name}: {what}; set model_name_or_path to the "
                "adapter's base model"
            )
