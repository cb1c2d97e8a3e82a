"""What the user gave as policy and reference (a path or a live model), looked at before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError, OptionError
from alignment.config.options import AlignmentConfig
from alignment.models.inspection import check_positions, read_config
from alignment.models.loading import load_causal_lm
from alignment.trainers.data_setup import limits_of


@dataclass(frozen=True)
class ModelSource:
    """A model as the user gave it: a path or hub name, or a live object. ``config`` is known before it is loaded."""

    path: str | None
    live: PreTrainedModel | None
    config: PretrainedConfig
    init_kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """For messages and default folder names."""
        return self.path or self.config.name_or_path or type(self.live).__name__

    def load(self, options: AlignmentConfig, dtype: torch.dtype, ds_config: dict[str, Any]) -> PreTrainedModel:
        """The live object, or a model loaded for an engine with ``ds_config``."""
        if self.live is not None:
            return widened(self.live, dtype)
        assert self.path is not None
        return load_causal_lm(
            self.path,
            dtype,
            ds_config=ds_config,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=self.init_kwargs,
        )


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A live model for a run that computes in ``dtype``: 16-bit weights become fp32 ones, in place, if need be.

    The other direction is the engine's: it casts parameters to its compute dtype and leaves fp32 buffers alone.
    """
    return model.to(dtype) if dtype == torch.float32 and model.dtype != dtype else model


def model_source(
    value: str | PreTrainedModel, key: str, options: AlignmentConfig, init_kwargs: dict[str, Any] | None
) -> ModelSource:
    """Look at a path or object without loading anything.

    Raises:
        ModelError: it is neither, or cannot be used.
    """
    kwargs = init_kwargs or {}
    if isinstance(value, str):
        config = read_config(value, key=key, trust_remote_code=options.trust_remote_code, init_kwargs=kwargs)
        return ModelSource(value, None, config, kwargs)
    if not isinstance(value, PreTrainedModel):
        raise ModelError(f"{key}: {type(value).__name__} is neither a path nor a transformers model")
    if value.config.is_encoder_decoder:
        raise ModelError(
            f"{key}: {type(value).__name__} is an encoder-decoder model; only decoder-only ones are supported"
        )
    return ModelSource(None, value, value.config, kwargs)


def balancing_coefficient(options: AlignmentConfig, config: PretrainedConfig) -> float | None:
    """The weight of the balancing loss, or None for a model without one or a weight of 0.

    Raises:
        OptionError: the option is set, but the model does not output router logits.
    """
    text = config.get_text_config()
    asked = options.router_aux_loss_coef
    if not getattr(text, "output_router_logits", False):
        if asked:
            raise OptionError(
                f"router_aux_loss_coef={asked}: the model's configuration has output_router_logits off; "
                'set model_init_kwargs: {"output_router_logits": true}, or leave router_aux_loss_coef unset'
            )
        return None
    coefficient = asked if asked is not None else getattr(text, "router_aux_loss_coef", None)
    return coefficient or None


def model_sources(
    model: str | PreTrainedModel,
    ref_model: str | PreTrainedModel | None,
    options: AlignmentConfig,
    needs_reference: bool,
) -> tuple[ModelSource, ModelSource]:
    """Policy and reference as they were given; the same one twice where no reference was.

    Raises:
        OptionError: a reference that the method does not need, or that is the very policy.
        ModelError: one of them cannot be used.
    """
    ref_model = ref_model if ref_model is not None else options.ref_model_name_or_path
    if ref_model is not None and not needs_reference:
        raise OptionError(f"ref_model: {options.method} has no reference model; leave it out, and name args=")
    if ref_model is not None and ref_model is model and not isinstance(model, str):
        raise OptionError(
            "ref_model: is the very object given as model, so it would be trained too; leave ref_model out "
            "(a copy is taken) or pass a copy"
        )
    policy = reference = model_source(model, "model_name_or_path", options, options.model_init_kwargs)
    if ref_model is not None:
        kwargs = options.ref_model_init_kwargs or options.model_init_kwargs
        reference = model_source(ref_model, "ref_model_name_or_path", options, kwargs)
    for source in (policy, reference):
        check_positions(source.config, limits_of(options).max_length)
    return policy, reference
