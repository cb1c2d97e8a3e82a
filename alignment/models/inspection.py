"""What can be known of a checkpoint before a byte of its weights is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from alignment.config.errors import ModelError, OptionError


def read_config(
    path: str, *, key: str, trust_remote_code: bool, init_kwargs: dict[str, Any] | None = None
) -> PretrainedConfig:
    """The configuration of a local folder or hub name, with the weights of a local folder checked for completeness.

    Raises:
        ModelError: no such model, an architecture that is not a decoder-only language model, or torn weights.
    """
    kwargs = {k: v for k, v in (init_kwargs or {}).items() if k in ("revision", "token", "cache_dir", "subfolder")}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"{key}: {path!r} has no usable configuration: {first}") from error
    if config.is_encoder_decoder:
        raise ModelError(f"{key}: {path!r} is an encoder-decoder model; only decoder-only ones are supported")
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise ModelError(f"{key}: {path!r} is a {config.model_type} model, which is not a causal language model")
    if Path(path).is_dir():
        check_weights(Path(path), key)
    return config


def check_weights(folder: Path, key: str) -> None:
    """Open every safetensors file of ``folder`` and let its header be compared with its length; read no weights.

    Raises:
        ModelError: a file is missing, torn or empty, or the folder holds no weights at all.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
    if not files and not list(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{key}: {folder} holds no weights (*.safetensors)")
    for name in files:
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise ModelError(f"{key}: {folder / name} is named in {index.name} but missing") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{key}: {folder / name} is torn ({error}); copy or download the file again") from error


def check_positions(config: PretrainedConfig, max_length: int | None) -> None:
    """Refuse sequences longer than the model's positions.

    Raises:
        OptionError: with the number to set.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None and positions and max_length > positions:
        raise OptionError(
            f"max_length: {max_length} is more than the model's {positions} positions; set max_length: {positions}"
        )
