"""The trained model of a run as a Hugging Face folder: what is saved under which key, and loading it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment.checkpoint.fragments import ExportedTensor
from alignment.checkpoint.tensors import TensorFile
from alignment.engines.collectives import copied_from_first_rank
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.record import Adapters, adapter_weights
from alignment.models.writing import adapter_names, no_progress_bar
from alignment.models.writing import gathered_state_dict as gathered_state_dict
from alignment.models.writing import write_adapters as write_adapters
from alignment.models.writing import write_model as write_model
from alignment.models.writing import written_folder as written_folder


def _saved_keys(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, str]:
    """The keys of parameters in saved files by name, as long as no conversion renames them."""
    if adapters is None:
        return {name: name for name, _ in model.named_parameters()}
    return {name: key for key, name in adapter_names(model, adapters).items()}


def exported_tensors(folder: Path, keys: Mapping[str, str]) -> dict[str, ExportedTensor]:
    """The parameters that a folder's model files contain in fp32, of those with these keys by name."""
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    fp32 = {key: file.path.name for file in files for key in file.keys if file.tensor(key).dtype == torch.float32}
    return {name: ExportedTensor(fp32[key], key) for name, key in keys.items() if key in fp32}


def trained_keys(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, str]:
    """The keys under which parameters that are trained in fp32 are saved, by name."""
    keys, fp32 = _saved_keys(model, adapters), torch.float32
    trained = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == fp32]
    return {name: keys[name] for name in trained if name in keys}


def load_weights(model: PreTrainedModel, adapters: Adapters | None, folder: Path, *, first_rank: bool) -> None:
    """Load what :func:`write_model` or :func:`write_adapters` wrote into a model inside an engine. Collective.

    The first rank reads everything into host memory; under ZeRO-3, one parameter at a time is gathered and
    partitioned again. The optimizer's copy of the weights is not updated, so use this only at the end of a run.
    """
    state: dict[str, Tensor] = {}
    if first_rank and adapters is not None:
        state = adapter_weights(str(folder))
    elif first_rank:
        with no_progress_bar():
            state = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    keys = _saved_keys(model, adapters)
    for name, parameter in model.named_parameters():
        if name not in keys:
            continue
        partitioned = is_partitioned(parameter)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=partitioned):
            if keys[name] in state:
                parameter.data.copy_(state[keys[name]])
        if not partitioned:
            copied_from_first_rank(parameter.data)
