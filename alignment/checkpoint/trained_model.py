"""Find and load the model that a command is given: an output folder, a checkpoint, an adapter, a model or a Hub name.

Nothing is trained with it: it is loaded by one process, without engines, as it was in training. The base of an adapter
is quantized as it was then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from alignment.checkpoint.folder import checkpoint_step, checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import CheckpointError, ModelError
from alignment.config.fields import keywords
from alignment.models.adapters.folder import AdapterFolder, read_adapter
from alignment.models.adapters.merging import base_config, check_match, inject, trained_dtype
from alignment.models.loading import load_whole
from alignment.models.quantization import Quantization, prepare_quantized
from alignment.models.source import ModelSource, read_config
from alignment.models.tasks import CAUSAL_LM, is_classifier
from alignment.reporting.run_view import read_object

_ADAPTER, _MODEL, _TOKENIZER = "adapter_config.json", "config.json", "tokenizer_config.json"
_OF_AN_ADAPTER = ("*.json", "*.jinja", "*.model", "*.txt", "adapter_model.safetensors")  # files to download


@dataclass(frozen=True)
class TrainedModel:
    """A causal language model, found but not loaded.

    Attributes:
        key: the argument that named it, in messages.
        found: the folder or Hub name with its weights: a full model, or an adapter.
        path: folder or Hub name of the full model, or of the adapter's base model.
        revision: revision of ``path`` on the Hub; None for the latest.
        config: configuration of ``path``.
        adapter: the adapter on ``path``; None for a full model.
        quantization: ``BitsAndBytesConfig.to_dict()`` of weights that are quantized while they are loaded, or None.
        options: options of the run that trained it, by name; empty if its folder does not have them.
        step: number of optimizer steps after which it was saved; None if its folder does not have it.
        trust_remote_code: run code that comes with the model.
    """

    key: str
    found: str
    path: str
    revision: str | None
    config: PretrainedConfig
    adapter: AdapterFolder | None = None
    quantization: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    trust_remote_code: bool = False

    def start(self) -> TrainedModel | None:
        """Return the model that the run started from, or None if this is not known.

        Raises:
            ModelError: it does not exist anymore.
        """
        trust, first = self.trust_remote_code, self.options.get("adapter_name_or_path")
        if self.adapter is not None:
            base = self.path if first else None
            found = find_model(first or self.path, self.key, base=base, revision=self.revision, trust=trust)
            return replace(found, quantization=self.quantization)
        if (named := self.options.get("model_name_or_path")) is None:
            return None
        revision = keywords(self.options.get("model_init_kwargs")).get("revision")
        return find_model(named, self.key, revision=revision, trust=trust)

    def is_base_of(self, other: TrainedModel) -> bool:
        """Whether it is ``other`` without its adapter, which need not be loaded twice."""
        alike = (self.path, self.revision, self.quantization) == (other.path, other.revision, other.quantization)
        sizes = [one.config.get_text_config().vocab_size for one in (self, other)]
        return alike and self.adapter is None and other.adapter is not None and sizes[0] == sizes[1]

    def tokenizer(self) -> Any:
        """Load the tokenizer that was saved with the model or the adapter, or else that of the adapter's base.

        Raises:
            ModelError: there is none, or it does not work.
        """
        own = self.adapter is None or (self.adapter.path / _TOKENIZER).is_file()
        revision = {"revision": self.revision} if self.revision and self.found == self.path else {}
        source = ModelSource(self.found if own else self.path, None, self.config, revision)
        return source.tokenizer(None, self.key, self.trust_remote_code)

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Load the model onto a device for generation, with its adapter activated, not merged.

        Args:
            device: the device.
            dtype: dtype of the weights that are not quantized; None for that of training, or else of the checkpoint.

        Raises:
            ModelError: the model cannot be loaded, or the adapter does not fit it.
        """
        adapter, arguments = self.adapter, dict[str, Any](device_map={"": device})
        dtype = dtype or (None if adapter is None else trained_dtype(adapter)) or self.config.dtype or torch.float32
        if self.revision:
            arguments["revision"] = self.revision
        if self.quantization is not None:
            arguments["quantization_config"] = BitsAndBytesConfig.from_dict(dict(self.quantization))
        # These may be missing from the checkpoint.
        own = [] if adapter is None else [key.replace(".base_layer.", ".") for key in adapter.shapes]
        model = load_whole(self.path, CAUSAL_LM, dtype, self.trust_remote_code, own, **arguments)
        if isinstance(quantized := getattr(model.config, "quantization_config", None), BitsAndBytesConfig):
            prepare_quantized(model, Quantization(quantized))
        if adapter is None:
            return model
        rows = self.config.get_text_config().vocab_size
        if model.config.get_text_config().vocab_size != rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        before = {id(parameter): parameter.dtype for parameter in model.parameters()}
        injected = inject(model, adapter)  # the adapter's own tensors are now in fp32
        for parameter in injected.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(before.get(id(parameter), dtype))
        adapted: PreTrainedModel = injected.get_base_model()
        return adapted


def find_model(
    named: str, key: str, *, base: str | None = None, revision: str | None = None, trust: bool = False
) -> TrainedModel:
    """Find a causal language model without loading weights.

    Args:
        named: an output folder, of whose checkpoints the newest complete one is used if the run has not saved a model
            at its end; a checkpoint; any other folder of a full model or an adapter; or a Hub name of either.
        key: the argument that names it, in messages.
        base: folder or Hub name of an adapter's base model, instead of the one it names.
        revision: revision on the Hub of a full model, or of an adapter's base model.
        trust: run code that comes with the model.

    Raises:
        ModelError: there is no such model, its files are incomplete, or it is a reward model.
        CheckpointError: it is a damaged checkpoint.
    """
    folder = _folder(named, key)
    found = named if folder is None else str(folder)
    if folder is not None and (folder / _ADAPTER).is_file():
        if any(folder.glob("model*.safetensors")):
            raise ModelError(f"{key}: {folder} contains an adapter and a full model; move one of them elsewhere")
        adapter = read_adapter(folder, base, revision)
        config = base_config(adapter, trust)
        check_match(adapter, config, trust)
        stored = getattr(config, "quantization_config", None) is not None  # by the checkpoint
        quantization = None if stored else adapter.quantization
        scores, path, revision = adapter.task.auto is not CAUSAL_LM.auto, adapter.base, adapter.revision
    else:
        arguments = {"revision": revision} if revision else {}
        config = read_config(found, key=key, trust_remote_code=trust, init_kwargs=arguments)
        adapter, quantization, scores, path = None, None, is_classifier(config), found
    if scores:
        raise ModelError(f"{key}: {found} is a reward model, which generates no text; pass a causal language model")
    options, step = ({}, None) if folder is None else _run_of(folder)
    return TrainedModel(key, found, path, revision, config, adapter, quantization, options, step, trust)


def _folder(named: str, key: str) -> Path | None:
    """Return the folder with the weights; None for a full model on the Hub, which transformers downloads."""
    given = Path(named).expanduser()
    if not given.is_dir():
        return _adapter_on_hub(named)
    if (given / MANIFEST).is_file():
        Manifest.read(given).check_files(given)
    if (given / _ADAPTER).is_file() or (given / _MODEL).is_file():
        return given
    problems = []
    for folder in reversed(checkpoints(given)):
        try:
            Manifest.read(folder).check_files(folder)
            return folder
        except CheckpointError as error:
            problems.append(str(error))
    why = "; ".join(problems) or f"it has neither {_MODEL} nor {_ADAPTER}, and no checkpoints"
    raise ModelError(f"{key}: {named} contains no model: {why}")


def _adapter_on_hub(named: str) -> Path | None:
    """Download an adapter. If there is none of this name, reading the configuration of a model says why."""
    with contextlib.suppress(Exception):
        folder = Path(snapshot_download(named, allow_patterns=[_ADAPTER]))
        if (folder / _ADAPTER).is_file():
            return Path(snapshot_download(named, allow_patterns=[*_OF_AN_ADAPTER]))
    return None


def _run_of(folder: Path) -> tuple[dict[str, Any], int | None]:
    """Return options and step of the run that wrote a folder."""
    absolute = folder.absolute()
    root = absolute if checkpoint_step(absolute) is None else absolute.parent
    options = read_object(root / "options.json") or read_object(folder / MANIFEST).get("options", {})
    state = read_object(folder / "trainer_state.json")
    is_best = options.get("load_best_model_at_end") and absolute == root
    return options, state.get("best_global_step" if is_best else "global_step")
