"""Find the model that a command is given, and load it as in training, by one process and without engines."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig, PreTrainedModel

from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import CheckpointError, ModelError
from alignment.config.fields import keywords
from alignment.models.adapters.folder import AdapterFolder, read_adapter
from alignment.models.adapters.merging import base_config, check_match, inject, load_extended, trained_dtype
from alignment.models.source import ModelSource, read_config
from alignment.models.tasks import CAUSAL_LM, is_classifier
from alignment.reporting.run_view import read_object

_ADAPTER, _MODEL = "adapter_config.json", "config.json"
_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "adapter_model.safetensors"]  # of an adapter on the Hub


@dataclass(frozen=True)
class TrainedModel:
    """A causal language model, found but not loaded."""

    found: str  #: the folder or Hub name with its weights: a full model, or an adapter
    path: str  #: folder or Hub name of the full model, or of the adapter's base model
    revision: str | None  #: revision of ``path`` on the Hub; None for the latest
    config: PretrainedConfig  #: configuration of ``path``, with the adapter's vocabulary size
    adapter: AdapterFolder | None  #: the adapter on ``path``; None for a full model
    quantization: Mapping[str, Any] | None  #: arguments of ``BitsAndBytesConfig``, to quantize weights on loading
    options: Mapping[str, Any]  #: options of the run that trained it; empty if its folder does not have them
    trust_remote_code: bool  #: run code that comes with the model

    def start(self) -> TrainedModel | None:
        """Return the model that the run started from, or None if this is not known. ModelError if it is gone."""
        base = self.options.get("model_name_or_path") if self.adapter is None else self.path
        if (named := self.options.get("adapter_name_or_path") or base) is None:
            return None
        revision = self.revision or keywords(self.options.get("model_init_kwargs")).get("revision")
        key = f"start of {self.found} (name it if the run was started in another folder)"
        found = find_model(named, key, revision=revision, trust=self.trust_remote_code)
        return replace(found, quantization=found.quantization or self.quantization)

    def tokenizer(self) -> Any:
        """Load the tokenizer of the model or adapter, or else of the adapter's base. ModelError if it is broken."""
        own = self.adapter is not None and (self.adapter.path / "tokenizer_config.json").is_file()
        name, arguments = (self.found, {}) if own else (self.path, {"revision": self.revision})
        return ModelSource(name, None, self.config, arguments).tokenizer(None, self.found, self.trust_remote_code)

    def load(self, device: torch.device) -> PreTrainedModel:
        """Load the model for generation, with its adapter activated, not merged.

        Weights that are not quantized have the dtype of training, or else that of the checkpoint.

        Raises:
            ModelError: the model cannot be loaded, or the adapter does not fit it.
        """
        adapter, source = self.adapter, (self.path, self.revision, self.config, self.quantization)
        dtype = (adapter and trained_dtype(adapter)) or self.config.dtype or torch.float32
        model = load_extended(*source, dtype, self.trust_remote_code, device, adapter)
        return model if adapter is None else inject(model, adapter, dtype).get_base_model()


def find_model(
    named: str, key: str, *, base: str | None = None, revision: str | None = None, trust: bool = False
) -> TrainedModel:
    """Find a causal language model without loading weights: a folder of a model, an adapter or a run, or a Hub name.

    ``key`` is the argument that names it, in messages. ``base`` replaces the base model that an adapter names;
    ``revision`` is that of a full model on the Hub, or of an adapter's base; ``trust`` allows their own code to run.

    Raises:
        ModelError: there is no such model, its files are incomplete, or it is a reward model.
    """
    folder = _folder(named, key)
    found = path = str(folder or named)
    adapter = read_adapter(folder, base, revision) if folder and (folder / _ADAPTER).is_file() else None
    if adapter is None:
        config = read_config(found, key=key, trust_remote_code=trust, init_kwargs={"revision": revision or "main"})
    else:
        path, revision, config = adapter.base, adapter.revision, base_config(adapter, trust)
        check_match(adapter, config, trust)
    if is_classifier(config) if adapter is None else adapter.task.auto is not CAUSAL_LM.auto:
        raise ModelError(f"{key}: {found} is a reward model, which generates no text; pass a causal language model")
    quantized = None if adapter is None or getattr(config, "quantization_config", None) else adapter.quantization
    folders = [] if folder is None else [folder, folder.absolute().parent]  # a checkpoint is in an output folder
    options = next(filter(None, (read_object(each / "options.json") for each in folders)), {})
    return TrainedModel(found, path, revision, config, adapter, quantized, options, trust)


def _folder(named: str, key: str) -> Path | None:
    """Return the folder with the weights; None for a full model on the Hub, which transformers downloads."""
    given, problems = Path(named).expanduser(), []
    if not given.is_dir():
        with contextlib.suppress(Exception):  # reading the configuration of a model says what is wrong
            given = Path(snapshot_download(named, allow_patterns=_FILES))
        return given if (given / _ADAPTER).is_file() else None
    has_model = (given / _ADAPTER).is_file() or (given / _MODEL).is_file()
    for folder in [given] if has_model else reversed(checkpoints(given)):
        try:
            if (folder / MANIFEST).is_file():
                Manifest.read(folder).check_files(folder)
            return folder
        except CheckpointError as error:
            problems.append(str(error))
    why = "; ".join(problems) or f"it has neither {_MODEL} nor {_ADAPTER}, and no checkpoints"
    raise ModelError(f"{key}: {named} contains no model: {why}")
