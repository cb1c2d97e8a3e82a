"""The adapters of a run, and their tensors by PEFT's names. peft is imported only where a run has adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

TRAINING_BASE = "training_base.json"  # beside saved adapters: what they were trained on, of which PEFT records a part


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
        head: the head of a reward model is in no checkpoint and not trained whole, so it is saved as it is.
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
        """PEFT's name of their type, such as ``LORA``."""
        return str(self.config.peft_type.value)

    @property
    def are_new(self) -> bool:
        """Whether they begin with this run."""
        return self.path is None and self.live is None

    def describe(self) -> str:
        """What trains, and how much of the whole that is."""
        kind = self.kind
        rank = f" r={self.config.r}" if getattr(self.config, "r", None) else ""
        source = f" from {self.path}" if self.path else ""
        return f"{kind}{rank} adapters{source}: {self.trained:,} of {self.total:,} parameters train"


def is_adapter_config(value: Any) -> bool:
    """Whether a value is a configuration of PEFT."""
    return hasattr(value, "peft_type") and hasattr(value, "to_dict")


def unwrapped(model: Any) -> tuple[Any, PeftModel | None]:
    """A live ``PeftModel`` as the transformers model inside it and itself; anything else as it is and None."""
    if isinstance(model, (str, PreTrainedModel)) or not hasattr(model, "get_base_model"):
        return model, None
    return model.get_base_model(), model


def adapter_weights(path: str) -> dict[str, Tensor]:
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


def adapter_shapes(model: PreTrainedModel, name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter, as a saved one names them, and their shapes."""
    return {key: tuple(value.shape) for key, value in adapter_tensors(model, name, dict(model.state_dict())).items()}


def adapter_tensors(model: PreTrainedModel, name: str, state: dict[str, Tensor], *, embeddings: bool = False) -> Any:
    """Those of ``state``, by the names of the model's parameters, that belong to an adapter, by PEFT's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state, name, save_embedding_layers=embeddings)
