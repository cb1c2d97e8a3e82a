"""A model as the user gave it, a path or a live object, looked at before anything is loaded."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from alignment.config.errors import ModelError, OptionError, first_line
from alignment.config.options import AlignmentConfig
from alignment.internals.transformers import asks_for_trust
from alignment.models.kernels import liger_type, put_liger_kernels
from alignment.models.loading import load_model
from alignment.models.quantization import Quantization, prepare_quantized
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.models.vocabulary import Vocabulary

_LFS = b"version https://git-lfs"
_FOR_TOKENIZERS = ("revision", "token", "cache_dir", "subfolder")


def read_config(
    path: str,
    *,
    key: str,
    trust_remote_code: bool,
    init_kwargs: dict[str, Any] | None = None,
    task: Task = CAUSAL_LM,
) -> PretrainedConfig:
    """The configuration of a local folder or hub name, with the weights of a local folder checked for completeness.

    Raises:
        ModelError: no such model, one that cannot be loaded as ``task``, or torn weights.
        OptionError: a further argument that contradicts ``task``.
    """
    for name, value in task.arguments.items():
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
                f"{key}: {path!r} comes with custom code, Python files of its own, which is not run; set "
                "trust_remote_code: true if you trust it"
            ) from error
        if (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").exists():
            raise ModelError(
                f"{key}: {path!r} holds adapters and no model; set {key} to their base model, and "
                "adapter_name_or_path to them"
            ) from error
        raise ModelError(f"{key}: {path!r} has no usable configuration: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise ModelError(f"{key}: {path!r} is an encoder-decoder model; only decoder-only ones are supported")
    if not task.knows(config, trust_remote_code):
        raise ModelError(f"{key}: {path!r} is a {config.model_type} model, which is not a {task.noun}")
    task.check_config(config, f"{key}: {path!r}")
    if Path(path).is_dir():
        check_weights(Path(path) / (init_kwargs or {}).get("subfolder", ""), key)
    return config


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
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(os.fspath(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _torn(key, index, error) from error


def _torn(key: str, file: Path, reason: object) -> ModelError:
    if _is_pointer(file):
        return ModelError(
            f"{key}: {file} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder"
        )
    return ModelError(f"{key}: {file} is torn ({reason}); copy or download the file again")


def _is_pointer(file: Path) -> bool:
    """Whether a file is what a clone without Git LFS has in its place."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS)) == _LFS
    except OSError:
        return False


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


@dataclass(frozen=True)
class ModelSource:
    """A path or hub name, or a live object. ``config`` is known before it is loaded.

    ``quantization`` is how its weights are kept; it is planned once the engine is known. ``merged``: adapters were
    merged into the live model, which is thus no longer what its name says. ``vocabulary``: what a model that is loaded
    gets of it, and a live one has got.
    """

    path: str | None
    live: PreTrainedModel | None
    config: PretrainedConfig
    init_kwargs: dict[str, Any]
    task: Task = CAUSAL_LM
    quantization: Quantization | None = None
    merged: bool = False
    vocabulary: Vocabulary = Vocabulary()

    @property
    def name(self) -> str:
        """For messages and default folder names."""
        return self.path or self.config.name_or_path or type(self.live).__name__

    def load(
        self,
        options: AlignmentConfig,
        dtype: torch.dtype,
        ds_config: dict[str, Any],
        device: torch.device,
        tell: Callable[[str], None] = lambda line: None,
    ) -> PreTrainedModel:
        """The live object, or a model loaded for an engine with ``ds_config``; ``device`` and ``tell`` as for
        :func:`load_model`. With the layer kernels that the options ask for, where there are any for its type.
        """
        model = self._loaded(options, dtype, ds_config, device, tell)
        # A reward model of a type without kernels goes without; any other model was refused.
        if options.use_liger_kernel and liger_type(self.config) is not None:
            put_liger_kernels(model, options.liger_kernel_config)
        return model

    def _loaded(
        self,
        options: AlignmentConfig,
        dtype: torch.dtype,
        ds_config: dict[str, Any],
        device: torch.device,
        tell: Callable[[str], None],
    ) -> PreTrainedModel:
        if self.live is not None:
            if self.quantization is None:
                return widened(self.live, dtype)
            prepare_quantized(self.live, self.quantization)
            return self.live
        assert self.path is not None
        model = load_model(
            self.path,
            dtype,
            ds_config=ds_config,
            task=self.task.of(self.config),
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=self.init_kwargs,
            seed=options.seed,
            quantization=self.quantization,
            device=device,
            tell=tell,
        )
        self.vocabulary.put_on(model)
        return model

    def knowing(self, vocabulary: Vocabulary) -> ModelSource:
        """The same model with another vocabulary: written into a live one, in place; others get it when loaded."""
        if self.live is not None:
            vocabulary.put_on(self.live)
            return replace(self, vocabulary=vocabulary)
        config = copy.deepcopy(self.config)
        vocabulary.note_in(config)
        return replace(self, config=config, vocabulary=vocabulary)

    def tokenizer(self, given: Any, key: str, trust_remote_code: bool) -> Any:
        """The tokenizer that was given by the argument ``key``, or the model's own.

        Raises:
            ModelError: the model's folder has none, or what was given is not one.
        """
        if given is None:
            kwargs = {name: self.init_kwargs[name] for name in _FOR_TOKENIZERS if name in self.init_kwargs}
            try:
                given = AutoTokenizer.from_pretrained(self.name, trust_remote_code=trust_remote_code, **kwargs)
            except Exception as error:  # each library has its own classes for one broken file
                raise ModelError(
                    f"{key}: no tokenizer could be loaded from {self.name!r}: {first_line(error)}"
                ) from error
        if not isinstance(given, PreTrainedTokenizerBase):
            raise ModelError(f"{key}: {type(given).__name__} is not a transformers tokenizer")
        try:
            given("a")
        except Exception as error:  # such as a setting of another type, which nothing has read so far
            raise ModelError(f"{key}: the tokenizer of {self.name!r} does not work: {first_line(error)}") from error
        return given


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A live model for a run that computes in ``dtype``: 16-bit weights become fp32 ones, in place, if need be.

    The other direction is the engine's: it casts parameters to its compute dtype and leaves fp32 buffers alone.
    """
    return model.to(dtype) if dtype == torch.float32 and model.dtype != dtype else model


def model_source(
    value: str | PreTrainedModel,
    key: str,
    options: AlignmentConfig,
    init_kwargs: dict[str, Any] | None = None,
    task: Task = CAUSAL_LM,
) -> ModelSource:
    """Look at a path or object without loading anything.

    Raises:
        ModelError: it is neither, or cannot be used as ``task``.
    """
    kwargs = init_kwargs or {}
    if isinstance(value, str):
        config = read_config(
            value,
            key=key,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=kwargs,
            task=task,
        )
        return ModelSource(value, None, config, kwargs, task)
    if not isinstance(value, PreTrainedModel):
        raise ModelError(f"{key}: {type(value).__name__} is neither a path nor a transformers model")
    if value.config.is_encoder_decoder:
        raise ModelError(
            f"{key}: {type(value).__name__} is an encoder-decoder model; only decoder-only ones are supported"
        )
    task.check_live(value, key)
    return ModelSource(None, value, value.config, kwargs, task)
