"""A model as the user gave it, a path or a live object, looked at before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from alignment.config.errors import ModelError
from alignment.config.options import AlignmentConfig
from alignment.models.architecture import CAUSAL_LM, Architecture
from alignment.models.inspection import first_line, read_config
from alignment.models.loading import load_model

_FOR_TOKENIZERS = ("revision", "token", "cache_dir", "subfolder")


@dataclass(frozen=True)
class ModelSource:
    """A path or hub name, or a live object. ``config`` is known before it is loaded."""

    path: str | None
    live: PreTrainedModel | None
    config: PretrainedConfig
    init_kwargs: dict[str, Any]
    architecture: Architecture = CAUSAL_LM

    @property
    def name(self) -> str:
        """For messages and default folder names."""
        return self.path or self.config.name_or_path or type(self.live).__name__

    def load(
        self,
        options: AlignmentConfig,
        dtype: torch.dtype,
        ds_config: dict[str, Any],
        tell: Callable[[str], None] = lambda line: None,
    ) -> PreTrainedModel:
        """The live object, or a model loaded for an engine with ``ds_config``; ``tell`` as for :func:`load_model`."""
        if self.live is not None:
            return widened(self.live, dtype)
        assert self.path is not None
        return load_model(
            self.path,
            dtype,
            ds_config=ds_config,
            architecture=self.architecture,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=self.init_kwargs,
            seed=options.seed,
            tell=tell,
        )

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
    architecture: Architecture = CAUSAL_LM,
) -> ModelSource:
    """Look at a path or object without loading anything.

    Raises:
        ModelError: it is neither, or cannot be used as ``architecture``.
    """
    kwargs = init_kwargs or {}
    if isinstance(value, str):
        config = read_config(
            value,
            key=key,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=kwargs,
            architecture=architecture,
        )
        return ModelSource(value, None, config, kwargs, architecture)
    if not isinstance(value, PreTrainedModel):
        raise ModelError(f"{key}: {type(value).__name__} is neither a path nor a transformers model")
    if value.config.is_encoder_decoder:
        raise ModelError(
            f"{key}: {type(value).__name__} is an encoder-decoder model; only decoder-only ones are supported"
        )
    architecture.check_live(value, key)
    return ModelSource(None, value, value.config, kwargs, architecture)
