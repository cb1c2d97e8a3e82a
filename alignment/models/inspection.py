"""What can be known of a checkpoint before a byte of its weights is loaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from alignment.config.errors import ModelError, OptionError
from alignment.internals.transformers import asks_for_trust
from alignment.models.architecture import CAUSAL_LM, Architecture


def read_config(
    path: str,
    *,
    key: str,
    trust_remote_code: bool,
    init_kwargs: dict[str, Any] | None = None,
    architecture: Architecture = CAUSAL_LM,
) -> PretrainedConfig:
    """The configuration of a local folder or hub name, with the weights of a local folder checked for completeness.

    Raises:
        ModelError: no such model, one that cannot be loaded as ``architecture``, or torn weights.
        OptionError: a further argument that contradicts ``architecture``.
    """
    for name, value in architecture.arguments.items():
        if (init_kwargs or {}).get(name, value) != value:
            given = (init_kwargs or {})[name]
            raise OptionError(f"{key}: {path!r} with {name}={given!r}: must be {value!r} here; leave {name} out")
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ModelError(f"{key}: {path!r}: no such folder; set {key} to one that exists, or to a hub name")
    try:
        # The further arguments may set values of the configuration; those that are the model's own come back.
        config, _ = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **(init_kwargs or {})
        )
    except Exception as error:  # each library has its own classes for one broken file
        if asks_for_trust(error):
            raise ModelError(
                f"{key}: {path!r} comes with Python code of its own, which is not run; set trust_remote_code: true if "
                "you trust it"
            ) from error
        raise ModelError(f"{key}: {path!r} has no usable configuration: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise ModelError(f"{key}: {path!r} is an encoder-decoder model; only decoder-only ones are supported")
    if not architecture.knows(config, trust_remote_code):
        raise ModelError(f"{key}: {path!r} is a {config.model_type} model, which is not a {architecture.noun}")
    architecture.check_config(config, f"{key}: {path!r}")
    if Path(path).is_dir():
        check_weights(Path(path) / (init_kwargs or {}).get("subfolder", ""), key)
    return config


def first_line(error: BaseException) -> str:
    """The head of a library's message on one line, with the next line where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def check_weights(folder: Path, key: str) -> None:
    """Open every weight file of ``folder`` and let its header be compared with its length; read no weights.

    Raises:
        ModelError: a file is missing, torn or empty, or the folder holds no weights at all.
    """
    index = folder / "model.safetensors.index.json"
    files = _indexed(index, key) if index.is_file() else sorted(file.name for file in folder.glob("*.safetensors"))
    older = sorted(folder.glob("pytorch_model*.bin"))
    if not files and not older:
        raise ModelError(f"{key}: {folder} holds no weights (*.safetensors)")
    for name in files:
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise ModelError(f"{key}: {folder / name} is named in {index.name} but missing") from error
        except (SafetensorError, OSError) as error:
            raise _torn(key, folder / name, error) from error
    for file in older if not files else ():
        # A zip's directory lies at its end; torch's format before that was no zip, and cannot be checked unread.
        with file.open("rb") as opened:
            start = opened.read(2)
        if start in (b"PK", b"") and not zipfile.is_zipfile(file):
            raise _torn(key, file, "its end is missing")


def _indexed(index: Path, key: str) -> list[str]:
    """The files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _torn(key, index, error) from error


def _torn(key: str, file: Path, reason: object) -> ModelError:
    return ModelError(f"{key}: {file} is torn ({reason}); copy or download the file again")


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
