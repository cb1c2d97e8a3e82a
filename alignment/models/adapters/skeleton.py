"""Complete and check an adapter configuration by injecting it into the model on the meta device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alignment.config.errors import ModelError, OptionError, did_you_mean, first_line
from alignment.models.adapters.injection import plain_start
from alignment.models.adapters.kinds import classifies
from alignment.models.adapters.record import Adapters, adapter_shapes, adapter_weights
from alignment.models.adapters.score import (
    HeadPlan,
    is_target,
    is_whole,
    plan_new,
    plan_saved,
    task_type,
)
from alignment.models.classifier import HEAD, HEAD_TENSORS
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource

_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")


def skeleton(source: ModelSource, trust_remote_code: bool) -> PreTrainedModel:
    """Create the model on the meta device, with its modules and shapes but without weights."""
    config = copy.deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        if source.live is not None:
            return type(source.live)(config)
        model: PreTrainedModel = source.task.auto.from_config(config, trust_remote_code=trust_remote_code)
        return model


def tried(
    config: Any,
    path: str | None,
    source: ModelSource,
    quantization: Quantization | None,
    trust_remote_code: bool,
    *,
    given: bool = False,
) -> Adapters:
    """Complete a configuration and inject it into a model without weights.

    Args:
        config: the PEFT configuration, which is modified.
        path: the folder that it was read from; None for new adapters.
        source: the policy's model.
        quantization: quantization of the base weights.
        trust_remote_code: run code that comes with the model.
        given: whether the user made the configuration in Python. Names that the model does not have are then ignored
            with a message, as PEFT does, if at least one is left; in options they are errors.

    Raises:
        OptionError: the configuration does not fit the model.
        ModelError: the weights in the folder do not fit the model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = skeleton(source, trust_remote_code)
    classifier = classifies(source)
    config.inference_mode = False
    config.base_model_name_or_path = source.name
    config.revision = source.init_kwargs.get("revision")
    head = HeadPlan()
    if classifier:
        head = _plan_head(config, path, source, given)
    config.task_type = task_type(config, source)
    name = _head_name(model, classifier)
    linear, known = dict(_linear_layers(model, name)), _Names.of(model)
    if path is None:
        _complete(config, linear, model, name)
        if not given:
            _check_options(config, linear, known, name)
    new_rows = _train_new_rows(config, model, source) if path is None else ()
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    _inject(
        config, model, "adapter_name_or_path" if path else "peft_config" if given else "lora_target_modules", linear
    )
    if path is not None:
        _check_shapes(path, adapter_shapes(model, "default"), source)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    added = sum(parameter.numel() for parameter in model.parameters()) - total
    layers = tuple(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    adapters = Adapters(config, path=path, layers=layers, trained=trained, total=total + added, head=head.kept)
    if source.live is not None:
        adapters = replace(adapters, embeddings=has_grown(source) and not new_rows)
    notes = [head.note] if head.note else []
    if given:
        notes += [*_take_converted(config, model), *_leave_aside(config, linear, known)]
    notes += _notes(config, model, experts, quantization)
    if new_rows:
        notes.append(
            f"chat_template_path: {' and '.join(new_rows)} are trained in full and saved with the adapters, because "
            "the embeddings of new tokens would otherwise keep their initial values; use a .jinja file to write such "
            "tokens as text instead"
        )
    return replace(adapters, notes=tuple(notes))


def _plan_head(config: Any, path: str | None, source: ModelSource, given: bool) -> HeadPlan:
    """Plan the head of a reward model, and update the configuration."""
    if path is not None:
        return plan_saved(config, source, path, adapter_weights(path))
    head = plan_new(config, source) if given else HeadPlan(whole=True)
    if head.whole:
        config.modules_to_save = sorted({*(config.modules_to_save or ()), HEAD})
    return head


def _inject(config: Any, model: PreTrainedModel, key: str, linear: dict[str, str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights on the meta device are not initialized
            model.add_adapter(plain_start(config), "default")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise OptionError(
            f"{key}: {first_line(error)}; the linear layers of {config.base_model_name_or_path} are "
            f"{', '.join(sorted(set(linear.values())))}"
        ) from error


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
    adapted = [] if isinstance(targets, str) else list(targets or ())
    names = [name for name in names if name not in adapted]
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *names})
    return tuple(names)


def _complete(config: Any, linear: dict[str, str], model: nn.Module, head: str | None) -> None:
    """Fill in ``target_modules`` if the configuration does not name any."""
    targets = getattr(config, "target_modules", None)
    if targets is None or targets == "all-linear":
        others = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
                  and name not in linear}  # fmt: skip
        found = sorted(set(linear.values()) if not others & set(linear.values()) else linear)
        with_head = head == HEAD and is_target(config) and not is_whole(config)
        config.target_modules = found + [HEAD] * with_head
        if str(config.peft_type.value) == "IA3":
            config.feedforward_modules = []
    elif not isinstance(targets, str):
        config.target_modules = sorted(targets)


class _Names(NamedTuple):
    """Names of modules and parameters to which a configuration may refer."""

    modules: list[str]
    parameters: list[str]

    @classmethod
    def of(cls, model: nn.Module) -> _Names:
        return cls([name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()])

    def missing(self, config: Any) -> Iterator[tuple[str, list[str]]]:
        """Yield the fields of a configuration and the names in them that the model does not have."""
        fields = {
            "target_modules": self.modules,
            "target_parameters": self.parameters,
            "modules_to_save": self.modules,
        }
        for field, known in fields.items():
            wanted = getattr(config, field, None) or ()
            if not isinstance(wanted, str):
                yield field, [name for name in sorted(wanted) if not any(_ends(one, name) for one in known)]


def _ends(one: str, name: str) -> bool:
    return one == name or one.endswith(f".{name}")


def _check_options(config: Any, linear: dict[str, str], known: _Names, head: str | None) -> None:
    """Check that the model has the modules and parameters named in the options.

    Raises:
        OptionError: the model has no module or parameter of a name.
    """
    shown = {
        "target_modules": linear.values(),
        "target_parameters": [name.rpartition(".")[2] for name in known.parameters],
        "modules_to_save": [name for name in (head, "embed_tokens") if name],
    }
    for field, missing in known.missing(config):
        if missing:
            ends = sorted(set(shown[field]))
            raise OptionError(
                f"lora_{field}: the model has no {missing[0]!r}{did_you_mean(missing[0], ends)}; available: "
                f"{', '.join(ends)}"
            )


def _take_converted(config: Any, model: Any) -> Iterator[str]:
    """Copy into a configuration the targets that PEFT converted from module names of older transformers releases.

    Experts are now parameters of one module. The saved configuration must have the names used by the adapters.
    """
    found = model.peft_config["default"]
    before = set(getattr(config, "target_parameters", None) or ())
    new = sorted(set(getattr(found, "target_parameters", None) or ()) - before)
    if not new:
        return
    old = sorted(set(config.target_modules) - set(found.target_modules))
    config.target_modules, config.target_parameters = sorted(found.target_modules), sorted(before | set(new))
    config.rank_pattern, config.alpha_pattern = found.rank_pattern, found.alpha_pattern
    yield f"peft_config: {', '.join(old)} of the experts are called {', '.join(new)} in this transformers release"


def _leave_aside(config: Any, linear: dict[str, str], known: _Names) -> Iterator[str]:
    """Remove names that the model does not have from a configuration, as PEFT does, and yield a message for each."""
    for field, missing in known.missing(config):
        if missing:
            left = sorted(set(getattr(config, field)) - set(missing))
            setattr(config, field, left or None)
            yield (
                f"peft_config: {field} contains {', '.join(missing)}, which the model does not have; ignored. Its "
                f"linear layers are {', '.join(sorted(set(linear.values())))}"
            )


def _head_name(model: PreTrainedModel, classifier: bool) -> str | None:
    head = getattr(model, HEAD, None) if classifier else model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _linear_layers(model: nn.Module, head: str | None) -> Iterator[tuple[str, str]]:
    """Yield the full name and the last component of each linear layer, except the head and routers."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, (nn.Linear, Conv1D)) and name != head and last not in _ROUTERS:
            yield name, last


def _check_shapes(path: str, shapes: dict[str, tuple[int, ...]], source: ModelSource) -> None:
    """Check that an adapter's weights fit this model.

    Raises:
        ModelError: a tensor does not fit; the message names the first one.
    """
    state = {name.removeprefix("base_model.model."): value for name, value in adapter_weights(path).items()}
    state = {name: value for name, value in state.items() if name not in HEAD_TENSORS or name in shapes}
    for name, value in sorted(state.items()):
        expected = shapes.get(name)
        if expected is not None and expected != tuple(value.shape):
            raise ModelError(
                f"adapter_name_or_path: {path!r} does not fit {source.name}: {name} has shape {tuple(value.shape)}; "
                f"expected {expected}; set model_name_or_path to the adapter's base model"
            )
    embeddings = sorted(name for name in set(state) - set(shapes) if "embed" in name)
    if embeddings:
        raise ModelError(
            f"adapter_name_or_path: {path!r} contains its own {embeddings[0]} with {state[embeddings[0]].shape[0]} "
            "rows; merge it into its base model (deepspeed-alignment export) and train the merged model"
        )
    if any("experts" in name for name in state):
        return  # PEFT converts experts saved by older releases while loading
    for what, names in (("has no", set(shapes) - set(state)), ("has the unexpected", set(state) - set(shapes))):
        if names:
            raise ModelError(
                f"adapter_name_or_path: {path!r} does not fit {source.name}: it {what} tensor {min(names)}; set "
                "model_name_or_path to the adapter's base model"
            )


def _notes(
    config: Any, model: PreTrainedModel, experts: Iterable[str], quantization: Quantization | None
) -> Iterator[str]:
    """Yield messages about effects of these adapters that the user may not expect."""
    left = sorted({name.rpartition(".")[2] for name in experts if not _is_adapted(name, config)})
    if left:
        kept = "" if quantization is None else " and are not quantized, because they are not linear layers"
        names = ", ".join(left)
        yield f"the experts ({names}) get no adapters{kept}; add them to lora_target_parameters to train them"
    touched = {name.rpartition(".")[2] for name in (config.modules_to_save or ())} & {"lm_head", "embed_tokens"}
    if touched and model.config.get_text_config().tie_word_embeddings:
        yield (
            f"{' and '.join(sorted(touched))}: the head and the embeddings of this model are tied; a separate copy is "
            "trained, so they are untied after training"
        )


def _is_adapted(name: str, config: Any) -> bool:
    return any(_ends(name, one) for one in getattr(config, "target_parameters", None) or ())


def has_grown(source: ModelSource) -> bool:
    """Return whether a live model's vocabulary size differs from that of its checkpoint."""
    try:
        before = AutoConfig.from_pretrained(source.config.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return False
    return bool(before.get_text_config().vocab_size != source.config.get_text_config().vocab_size)
