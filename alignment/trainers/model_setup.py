"""Policy and reference as the user gave them, looked at before anything is loaded."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.models.architecture import CAUSAL_LM, Architecture
from alignment.models.inspection import check_positions
from alignment.models.source import ModelSource, model_source
from alignment.trainers.data_setup import limits_of


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
    architecture: Architecture = CAUSAL_LM,
) -> tuple[ModelSource, ModelSource]:
    """Policy and reference as they were given, each an ``architecture``; the same one twice where no reference was.

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
    policy = reference = model_source(model, "model_name_or_path", options, options.model_init_kwargs, architecture)
    if ref_model is not None:
        kwargs = options.ref_model_init_kwargs or options.model_init_kwargs
        reference = model_source(ref_model, "ref_model_name_or_path", options, kwargs, architecture)
    for source in (policy, reference):
        check_positions(source.config, limits_of(options).max_length)
    return policy, reference
