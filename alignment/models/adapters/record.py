"""The adapters of a run, and their tensors by PEFT's names. peft is imported only if a run has adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, first_line, setting

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # covered by tests that train, save and reload them
TRAINING_BASE = "training_base.json"  # what saved adapters were trained on; PEFT records only part of it
PREFIX = "base_model.model."  # of the names in a saved adapter
_WRITTEN = {"LORA": "LoRA", "LOHA": "LoHa", "LOKR": "LoKr", "IA3": "IA³"}  # as their papers write them
_INITIALIZATIONS = ("init_lora_weights", "init_ia3_weights", "init_weights")
# LoRA settings that change the structure of a layer, or what it computes beside its weights.
_UNSUPPORTED = ("layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config", "velora_config")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
        config: the complete PEFT configuration, in which the modules to adapt are named.
        name: the adapter's name in PEFT.
        path: folder or Hub name of adapters to continue training; None for new or live adapters.
        live: the user's model that already has the adapters, if any.
        reference: the adapter of a live model that serves as the reference; None: the initial policy.
        layers: names of the adapted modules.
        trained, total: number of trainable parameters and of all parameters, including embeddings.
        notes: messages for the user.
        embeddings: whether the embeddings are saved as well, because tokens were added to the base model.
        head: whether a reward model's head that is not trained in full is saved with the adapters.
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
    head: bool = False

    @property
    def are_new(self) -> bool:
        """Whether the adapters are newly initialized."""
        return self.path is None and self.live is None

    @property
    def begin_neutral(self) -> bool:
        """Whether the adapters are new and have no effect on the model before they are trained."""
        starts = [getattr(self.config, field, True) for field in _INITIALIZATIONS]
        return self.are_new and all(start in (True, "gaussian") for start in starts)

    def describe(self) -> str:
        """Describe the adapters, with the number of trainable parameters."""
        kind = _WRITTEN.get(kind_of(self.config), kind_of(self.config))
        rank = f" r={self.config.r}" if getattr(self.config, "r", None) else ""
        source = f" from {self.path}" if self.path else ""
        return f"{kind}{rank} adapters{source}: {self.trained:,} of {self.total:,} parameters are trainable"


def kind_of(config: PeftConfig) -> str:
    """PEFT's name of the adapter type, such as ``LORA``."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def unsupported(config: PeftConfig) -> str | None:
    """Return why adapters are neither trained nor merged, or None if they are supported."""
    if kind_of(config) not in KINDS:
        return f"{kind_of(config)} adapters are not supported; use one of {', '.join(KINDS)}"
    used = next((name for name in _UNSUPPORTED if getattr(config, name, None)), None)
    return None if used is None else f"{setting(used, getattr(config, used))} is not supported; remove it"


def with_initialization(config: Any, value: bool) -> Any:
    """Return a copy of a configuration that initializes adapters by default (True) or at random (False)."""
    twin = copy.deepcopy(config)
    for field in _INITIALIZATIONS:
        if hasattr(twin, field):
            setattr(twin, field, value)
    return twin


def unwrapped(model: Any) -> tuple[Any, PeftModel | None]:
    """Return (inner transformers model, ``PeftModel``) for a live ``PeftModel``, else (``model``, None)."""
    if isinstance(model, (str, PreTrainedModel)) or not hasattr(model, "get_base_model"):
        return model, None
    return model.get_base_model(), model


def adapter_weights(path: str) -> dict[str, Tensor]:
    """Load the weights of an adapter's folder or Hub name on the CPU.

    Raises:
        ModelError: the weights are missing or cannot be read.
    """
    from peft import load_peft_weights

    try:
        state: dict[str, Tensor] = load_peft_weights(path, device="cpu")
    except Exception as error:  # every library raises its own classes for a corrupt file
        raise ModelError(f"adapter {path!r}: its weights cannot be read: {first_line(error)}") from error
    return state


def adapter_tensors(model: PreTrainedModel, name: str, state: dict[str, Any], *, embeddings: bool = False) -> Any:
    """Select an adapter's tensors from ``state`` (by the model's parameter names) and return them by PEFT's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state, name, save_embedding_layers=embeddings)
