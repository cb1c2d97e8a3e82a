"""Engines whose scorer has been compared with its model's own forward."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel

from alignment.engines.scoring import FrozenEngine, ScoringEngine
from alignment.models.architecture import CAUSAL_LM, Architecture

Engine = TypeVar("Engine", bound=ScoringEngine)


def checked(engine: Engine, architecture: Architecture) -> Engine:
    """The engine, closed again where its scorer does not compute what the model itself does.

    Raises:
        ModelError: the scores differ by more than rounding.
    """
    try:
        architecture.check_scorer(engine.scorer, engine.device)
    except BaseException:
        engine.close()
        raise
    return engine


def frozen_engine(
    model: PreTrainedModel, ds_config: dict[str, Any], architecture: Architecture = CAUSAL_LM, aux_loss: bool = False
) -> FrozenEngine:
    """Wrap a model that is only asked, and check once that its scores are its own.

    Args:
        model: loaded for ``ds_config``.
        ds_config: this engine's DeepSpeed configuration.
        architecture: what the model is.
        aux_loss: compute the balancing loss of a mixture of experts.
    """
    return checked(FrozenEngine(architecture.scorer(model, aux_loss), ds_config), architecture)
