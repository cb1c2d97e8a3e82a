"""The adapters of a run, and their tensors by PEFT's names. peft is imported only if a run has adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_WRITTEN = {"LORA": "LoRA", "LOHA": "LoHa", "LOKR": "LoKr", "IA3": "IA³"}  # as their papers write them
TRAINING_BASE = "training_base.json"  # what saved adapters were trained on; PEFT records only part of it


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
        head: whether the reward model's head is saved unchanged, because it is neither in a checkpoint nor trained.
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
    def kind(self) -> str:
        """PEFT's name of the adapter type, such as ``LORA``."""
        return str(self.config.peft_type.value)

    @property
    def are_new(self) -> bool:
        """Whether the adapters are newly initialized."""
        return self.path is None and self.live is None

    def describe(self) -> str:
        """Describe the adapters, with the number of trainable parameters."""
        kind = _WRITTEN.get(self.kind, self.kind)
        rank = f" r={self.config.r}" if getattr(self.config, "r", None) else ""
        source = f" from {self.path}" if self.path else ""
        return f"{kind}{rank} adapters{source}: {self.trained:,} of {self.total:,} parameters are trainable"


def is_adapter_config(value: Any) -> bool:
    """Return whether a value is a PEFT configuration."""
    return hasattr(value, "peft_type") and hasattr(value, "to_dict")


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
        raise ModelError(f"adapter {path!r}: its weights cannot be read: {error}") from error
    return state


def adapter_shapes(model: PreTrainedModel, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, by their names in a saved adapter."""
    return {key: tuple(value.shape) for key, value in adapter_tensors(model, name, dict(model.state_dict())).items()}


def adapter_tensors(model: PreTrainedModel, name: str, state: dict[str, Tensor], *, embeddings: bool = False) -> Any:
    """Select an adapter's tensors from ``state`` (by the model's parameter names) and return them by PEFT's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state, name, save_embedding_layers=embeddings)
