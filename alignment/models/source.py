"""Validate a model that the user passed, a path or a live object, before any weights are loaded."""

from __future__ import annotations

import copy
import functools
import json
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from alignment.config.dtypes import planned
from alignment.config.errors import ModelError, OptionError, first_line
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.internals.transformers import asks_for_trust
from alignment.models.kernels import liger_type, put_liger_kernels
from alignment.models.loading import load_model
from alignment.models.quantization import Quantization, prepare_quantized
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.models.tiled_mlp import find_mlp, tile_mlps
from alignment.models.vocabulary import Vocabulary
from alignment.run.retries import is_offline

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
    """Read the configuration of a local folder or Hub name, and check that a local folder's weights are complete.

    Raises:
        ModelError: the model does not exist or cannot be loaded as ``task``, or its weights are truncated.
        OptionError: an entry of ``init_kwargs`` contradicts ``task``.
    """
    for name, value in task.arguments.items():
        if (init_kwargs or {}).get(name, value) != value:
            given = (init_kwargs or {})[name]
            raise OptionError(f"{key}: {path!r} with {name}={given!r}: {name} must be {value!r}; remove {name}")
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ModelError(f"{key}: folder {path!r} does not exist; set {key} to an existing folder or a Hub name")
    try:
        # init_kwargs may override values of the configuration; the other arguments are returned unused.
        config, _ = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **(init_kwargs or {})
        )
    except Exception as error:  # every library raises its own classes for a corrupt file
        if asks_for_trust(error):
            raise ModelError(
                f"{key}: {path!r} contains custom code (Python files), which is not run by default; set "
                "trust_remote_code: true if you trust it"
            ) from error
        if (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").exists():
            if key == "model_name_or_path":
                remedy = f"set {key} to their base model and adapter_name_or_path to {path!r}"
            else:
                remedy = f"merge them into their base model (deepspeed-alignment export) and set {key} to the result"
            raise ModelError(f"{key}: {path!r} contains adapters but no model; {remedy}") from error
        why = unread(path, error, "config.json")
        raise ModelError(f"{key}: the configuration of {path!r} could not be loaded: {why}") from error
    if config.is_encoder_decoder:
        raise ModelError(f"{key}: {path!r} is an encoder-decoder model; only decoder-only models are supported")
    if not task.knows(config, trust_remote_code):
        raise ModelError(f"{key}: {path!r} is a {config.model_type} model, which is not a {task.noun}")
    task.check_config(config, f"{key}: {path!r}")
    machine = planned()
    if Path(path).is_dir() and (machine is None or machine.reads_weights):
        check_weights(Path(path) / (init_kwargs or {}).get("subfolder", ""), key)
    return config


def unread(path: str, error: Exception, *files: str) -> str:
    """Return why a folder or Hub name could not be read: ``error``, or a simpler reason that explains it.

    ``files`` are patterns of files, of which a folder has at least one; the first one is named in messages.
    """
    folder = Path(path)
    if folder.is_file():
        return "it is a file; set the folder that contains it"
    local = folder.is_dir() or path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not any(found for name in files for found in folder.glob(name)):
        return f"the folder contains no {files[0]}; check the path, or copy or download it again"
    if is_offline(error):
        return f"no such folder, and the Hub cannot be reached; check the name, or run `hf download {path}` elsewhere"
    return first_line(error)


def check_weights(folder: Path, key: str) -> None:
    """Check that every weight file of ``folder`` has the length its header states, without reading the weights.

    Raises:
        ModelError: a file is missing, truncated or empty, or the folder contains no weights.
    """
    index = folder / "model.safetensors.index.json"
    files = _indexed(index, key) if index.is_file() else sorted(file.name for file in folder.glob("*.safetensors"))
    older = sorted(folder.glob("pytorch_model*.bin"))
    if not files and not older:
        raise ModelError(f"{key}: {folder} contains no weights (*.safetensors); copy or download the model again")
    for name in files:
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise ModelError(
                f"{key}: {folder / name} is listed in {index.name} but missing; copy or download it again"
            ) from error
        except (SafetensorError, OSError) as error:
            raise _torn(key, folder / name, error) from error
    for file in older if not files else ():
        # A zip file has its directory at the end. torch's older format is not a zip file; checking it means reading
        # it.
        with file.open("rb") as opened:
            start = opened.read(2)
        if start in (b"PK", b"") and not zipfile.is_zipfile(file):
            raise _torn(key, file, "the end of the file is missing")


def _indexed(index: Path, key: str) -> list[str]:
    """Return the files listed in an index."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(os.fspath(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _torn(key, index, error) from error


def _torn(key: str, file: Path, reason: object) -> ModelError:
    if _is_pointer(file):
        return ModelError(f"{key}: {file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    return ModelError(f"{key}: {file} is truncated or corrupt ({reason}); copy or download it again")


def _is_pointer(file: Path) -> bool:
    """Return whether a file is a Git LFS pointer, as in a clone made without Git LFS."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS)) == _LFS
    except OSError:
        return False


def check_positions(config: PretrainedConfig, max_length: int | None, key: str = "max_length") -> None:
    """Check ``max_length``, the value of ``key``, against the model's ``max_position_embeddings``.

    Raises:
        OptionError: ``max_length`` is larger.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None and positions and max_length > positions:
        raise OptionError(
            f"{key}: {max_length} is too large: the model supports at most {positions} positions "
            f"(max_position_embeddings); set {key}: {positions}"
        )


@dataclass(frozen=True)
class ModelSource:
    """A model given by path or Hub name, or as a live object.

    Attributes:
        path: folder or Hub name; None for a live model.
        live: the live model, if any.
        config: its configuration, read before the weights are loaded.
        init_kwargs: arguments for ``from_pretrained``.
        task: what the model is loaded as.
        quantization: how its weights are quantized, planned once the engine is known.
        merged: whether adapters were merged into the live model, so that its name no longer identifies it.
        vocabulary: changes to its vocabulary, applied when the model is loaded; a live model already has them.
        mlp: name of the MLP in its decoder layers, if it is computed in slices.
    """

    path: str | None
    live: PreTrainedModel | None
    config: PretrainedConfig
    init_kwargs: dict[str, Any]
    task: Task = CAUSAL_LM
    quantization: Quantization | None = None
    merged: bool = False
    vocabulary: Vocabulary = Vocabulary()
    mlp: str | None = None

    @property
    def name(self) -> str:
        """The model's name in messages and default folder names."""
        return self.path or self.config.name_or_path or type(self.live).__name__

    def in_slices(self, options: AlignmentConfig) -> ModelSource:
        """Return this model with its MLPs computed in slices; raise :class:`OptionError` if they cannot be."""
        random = functools.partial(self.task.auto.from_config, trust_remote_code=options.trust_remote_code)
        return replace(self, mlp=find_mlp(self.config, random if self.live is None else type(self.live)))

    def load(
        self,
        options: AlignmentConfig,
        dtype: torch.dtype,
        ds_config: dict[str, Any],
        device: torch.device,
    ) -> PreTrainedModel:
        """Return the live object, or load the model for an engine with ``ds_config``.

        Liger kernels are applied if the options request them and Liger supports the model type. For ``device``, see
        :func:`load_model`.
        """
        model = self._loaded(options, dtype, ds_config, device)
        # Only a reward model can have a type without kernels; other models have been rejected before.
        if options.use_liger_kernel and liger_type(self.config) is not None:
            put_liger_kernels(model, keywords(options.liger_kernel_config))
        tile_mlps(model, self.mlp)
        return model

    def _loaded(
        self,
        options: AlignmentConfig,
        dtype: torch.dtype,
        ds_config: dict[str, Any],
        device: torch.device,
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
        )
        self.vocabulary.put_on(model)
        return model

    def knowing(self, vocabulary: Vocabulary) -> ModelSource:
        """Return the model with another vocabulary. A live model is changed in place, others when they are loaded."""
        if self.live is not None:
            vocabulary.put_on(self.live)
            return replace(self, vocabulary=vocabulary)
        config = copy.deepcopy(self.config)
        vocabulary.note_in(config)
        return replace(self, config=config, vocabulary=vocabulary)

    def tokenizer(self, given: Any, key: str, trust_remote_code: bool) -> Any:
        """Return the tokenizer passed as the argument ``key``, or load the model's own.

        Raises:
            ModelError: the model has no tokenizer, or ``given`` is not a working tokenizer.
        """
        if given is None:
            kwargs = {name: self.init_kwargs[name] for name in _FOR_TOKENIZERS if name in self.init_kwargs}
            try:
                given = AutoTokenizer.from_pretrained(self.name, trust_remote_code=trust_remote_code, **kwargs)
                if len(given) <= len(given.all_special_ids):  # transformers makes one without a vocabulary
                    raise ValueError("its vocabulary is empty; copy or download the files of the tokenizer again")
            except Exception as error:  # every library raises its own classes for a corrupt file
                why = unread(self.name, error, "tokenizer.json", "tokenizer*", "vocab*", "*.model", "*.tiktoken")
                raise ModelError(f"{key}: no tokenizer could be loaded from {self.name!r}: {why}") from error
        if not isinstance(given, PreTrainedTokenizerBase):
            raise ModelError(f"{key}: {type(given).__name__} is not a transformers tokenizer")
        try:
            given("a")
        except Exception as error:  # such as a setting of the wrong type that has not been read yet
            raise ModelError(f"{key}: the tokenizer of {self.name!r} does not work: {first_line(error)}") from error
        return given


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast a live model's 16-bit weights to fp32, in place, if the run computes in fp32.

    The engine handles the other direction: it casts parameters to its compute dtype and does not cast fp32 buffers.
    """
    return model.to(dtype) if dtype == torch.float32 and model.dtype != dtype else model


def model_source(
    value: str | PreTrainedModel,
    key: str,
    options: AlignmentConfig,
    init_kwargs: dict[str, Any] | None = None,
    task: Task = CAUSAL_LM,
) -> ModelSource:
    """Validate a path or a live model without loading weights.

    Raises:
        ModelError: ``value`` is neither a path nor a model, or cannot be used as ``task``.
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
        source = ModelSource(value, None, config, kwargs, task)
    elif not isinstance(value, PreTrainedModel):
        raise ModelError(f"{key}: {type(value).__name__} is neither a path nor a transformers model")
    elif value.config.is_encoder_decoder:
        raise ModelError(
            f"{key}: {type(value).__name__} is an encoder-decoder model; only decoder-only models are supported"
        )
    else:
        task.check_live(value, key)
        source = ModelSource(None, value, value.config, kwargs, task)
    return source.in_slices(options) if options.tiled_mlp is True else source
