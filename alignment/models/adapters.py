"""Adapters (PEFT): which ones a run trains, known before weights are loaded, and how they are put into the model.

They are injected into the transformers model itself, after its scorer has installed its head, so that the copies that
PEFT makes of a head (``modules_to_save``) are copies of ours. peft is imported only where a run has adapters.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, OptionError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.peft import computing_with, train_adapter
from alignment.internals.transformers import loading

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

REFERENCE = "reference"  # the frozen copy of adapters that training began with
_PROBE_ROWS = 3
# Relative to the largest output: what rounding alone does to one layer, such as DoRA's division by the norm it has.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
        config: PEFT's, complete: the modules to adapt are named.
        name: what PEFT knows them by.
        path: folder or hub name of those to go on with; None for new or live ones.
        live: the user's model that has them already; None for any other.
        reference: the adapter of a live model that is the reference; None: the policy as given.
        layers: names of the modules that get one.
        trained, total: parameters that require a gradient, and all of them, embeddings included.
        notes: sentences for the user.
        embeddings: the model knows more tokens than its base, so its embeddings are saved as well.
    """

    config: PeftConfig
    name: str = "default"
    path: str | None = None
    live: PeftModel | None = None
    reference: str | None = None
    layers: tuple[str, ...] = ()
    trained: int = 0
    total: int = 0
    notes: tuple[str, ...] = ()
    embeddings: bool = False

    @property
    def are_new(self) -> bool:
        """Whether they begin with this run."""
        return self.path is None and self.live is None

    def describe(self) -> str:
        """What trains, and how much of the whole that is."""
        kind = str(self.config.peft_type.value)
        rank = f" r={self.config.r}" if getattr(self.config, "r", None) else ""
        source = f" from {self.path}" if self.path else ""
        return f"{kind}{rank} adapters{source}: {self.trained:,} of {self.total:,} parameters train"


class Given(NamedTuple):
    """How the policy as it was given is computed with the policy's own weights.

    Attributes:
        adapter: the name of the adapter to compute with; None: without any.
    """

    adapter: str | None


def is_adapter_config(value: Any) -> bool:
    """Whether a value is a configuration of PEFT."""
    return hasattr(value, "peft_type") and hasattr(value, "to_dict")


def unwrapped(model: Any) -> tuple[Any, PeftModel | None]:
    """A live ``PeftModel`` as the transformers model inside it and itself; anything else as it is and None."""
    if isinstance(model, (str, PreTrainedModel)) or not hasattr(model, "get_base_model"):
        return model, None
    return model.get_base_model(), model


def equip(
    model: PreTrainedModel,
    adapters: Adapters,
    *,
    ds_config: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    keep: bool,
) -> Given | None:
    """Put adapters into a model that has its scorer's head, and let nothing else train.

    Args:
        model: loaded for an engine with ``ds_config``.
        adapters: which.
        ds_config: of the engine.
        dtype: of the adapters' weights, and of modules that are trained whole.
        seed: of their initial weights: the same on every rank, at every ZeRO stage.
        keep: whether the policy as given has to be computable ever after.

    Returns:
        How it is, or None where it was not asked for: without adapters where they change nothing yet and new ones have
        left the base as it was, which is measured layer by layer; otherwise with a frozen copy of them.

    Raises:
        OptionError: weights of the base are trained with the adapters, so that both ways would follow the training.
    """
    new = adapters.are_new
    before = _answers(model, adapters.layers, dtype) if keep and new else {}
    inject(model, adapters, ds_config=ds_config, dtype=dtype, seed=seed)
    if not keep:
        return None
    if adapters.reference is not None:
        return Given(adapters.reference)
    _check_base_frozen(model, adapters)
    if _changes_nothing(model, adapters, before, _ROUNDING.get(dtype, 1e-5) if new else 0.0, dtype):
        return Given(None)
    return Given(keep_given(model, adapters, ds_config=ds_config, dtype=dtype))


def _check_base_frozen(model: PreTrainedModel, adapters: Adapters) -> None:
    own = adapter_tensors(model, adapters.name, {name: name for name, _ in model.named_parameters()})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name not in own.values() or f".{adapters.name}." not in f"{name}."):
            shown, bias = name.replace(".base_layer", ""), getattr(adapters.config, "bias", None)
            raise OptionError(
                f"ref_placement: adapter: {shown} of the base is trained as well (bias={bias!r}), so that the policy "
                "without its adapters is not the policy as given; set ref_placement to offload, sharded or replica"
            )


def _answers(model: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """What layers that take one tensor make of a few fixed rows; weights are gathered for one layer at a time."""
    found = {}
    training = model.training
    model.eval()
    try:
        for name in names:
            layer = cast("Any", model.get_submodule(name))
            divided = [parameter for parameter in layer.parameters() if is_partitioned(parameter)]
            rows = _rows_for(layer, dtype)
            if rows is not None:
                with torch.no_grad(), deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
                    found[name] = layer(rows).cpu()
    finally:
        model.train(training)
    return found


def _rows_for(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Rows that a layer can take; None where it takes something else."""
    where = next(layer.parameters()).device
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    if isinstance(base, nn.Embedding):
        return torch.arange(_PROBE_ROWS, device=where) % base.num_embeddings
    width = getattr(base, "in_features", None) or getattr(base, "nx", None)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_ROWS, width, generator=generator).to(where, dtype)


def _changes_nothing(
    model: nn.Module, adapters: Adapters, before: dict[str, Tensor], rounding: float, dtype: torch.dtype
) -> bool:
    """Whether every layer answers the same with its adapter as without it, and without it as ``before``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = tuple(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    with computing_with(model, None):
        without = _answers(model, layers, dtype)
    if set(without) != set(layers) or any(not torch.equal(without[name], before[name]) for name in before):
        return False
    for name, answer in _answers(model, layers, dtype).items():
        plain = without[name].float()
        if not torch.allclose(answer.float(), plain, rtol=0, atol=rounding * float(plain.abs().max())):
            return False
    return all(_is_copy(module, adapters.name) for module in model.modules())


def _is_copy(module: Any, name: str) -> bool:
    """Whether a module that is trained whole is as the base's; true of any other module."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or name not in copies:
        return True
    pairs = zip(module.original_module.parameters(), copies[name].parameters())
    for original, copied in pairs:
        with deepspeed.zero.GatheredParameters(original, enabled=is_partitioned(original)):
            if not torch.equal(original.to(copied.dtype), copied):
                return False
    return True


def inject(
    model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    """As :func:`equip`, without a thought for a reference; a model that has the adapters already keeps theirs."""
    if adapters.name not in getattr(model, "peft_config", {}):
        with _initial(ds_config, seed):
            model.add_adapter(copy.deepcopy(adapters.config), adapters.name)
        if adapters.path is not None:
            _load(model, adapters)
    else:
        train_adapter(model, adapters.name)
    _settle(model, adapters.name, dtype)


@contextlib.contextmanager
def _initial(ds_config: dict[str, Any] | None, seed: int) -> Iterator[None]:
    """Random numbers of their own, and transformers' DeepSpeed flag, by which PEFT gathers what it reads (DoRA)."""
    with loading(ds_config), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _load(model: PreTrainedModel, adapters: Adapters) -> None:
    """Fill injected adapters from their folder."""
    from peft import set_peft_model_state_dict

    assert adapters.path is not None
    state = {name.removeprefix("base_model.model."): value for name, value in read_adapter(adapters.path).items()}
    set_peft_model_state_dict(model, state, adapters.name)


def read_adapter(path: str) -> dict[str, Tensor]:
    """The weights of an adapter's folder or hub name, on the CPU.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    from peft import load_peft_weights

    try:
        state: dict[str, Tensor] = load_peft_weights(path, device="cpu")
    except Exception as error:  # each library has its own classes for one broken file
        raise ModelError(f"adapter {path!r}: its weights cannot be read: {error}") from error
    return state


def _settle(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    """Adapters in their dtype; gradients for those called ``name``, and for biases that PEFT trains, alone."""
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." not in f"{parameter_name}." and not parameter.requires_grad:
            continue
        if parameter.is_floating_point() and not is_partitioned(parameter) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def plain_start(config: PeftConfig) -> PeftConfig:
    """The same, starting without a change of the base weights, which other starts read or rewrite."""
    config = copy.deepcopy(config)
    for field in ("init_lora_weights", "init_ia3_weights", "init_weights"):
        if hasattr(config, field):
            setattr(config, field, True)
    return config


def keep_given(model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype) -> str:
    """Add a frozen copy of the adapters as they are now; return the name to compute with for the policy as given."""
    if REFERENCE not in model.peft_config:
        with _initial(ds_config, 0), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are meant
            model.add_adapter(plain_start(adapters.config), REFERENCE)
    train_adapter(model, adapters.name)
    for module in model.modules():
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) and {adapters.name, REFERENCE} <= set(module.keys()):
            copied: Any = module[REFERENCE]
            source: Any = module[adapters.name]
            if isinstance(copied, nn.Module):
                copied.load_state_dict(source.state_dict())
            else:
                copied.data = source.detach().clone()
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)
    _settle(model, REFERENCE, dtype)
    return REFERENCE


def adapter_shapes(model: PreTrainedModel, name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter, as a saved one names them, and their shapes."""
    return {key: tuple(value.shape) for key, value in adapter_tensors(model, name, dict(model.state_dict())).items()}


def adapter_tensors(model: PreTrainedModel, name: str, state: dict[str, Tensor], *, embeddings: bool = False) -> Any:
    """Those of ``state``, by the names of the model's parameters, that belong to an adapter, by PEFT's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state, name, save_embedding_layers=embeddings)
