"""The tasks for which a checkpoint is loaded: causal language modeling, and sequence classification with one label.

A task determines which transformers class loads the checkpoint, which configurations and live models are accepted,
which weights may be missing, and which scorer wraps the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from alignment.config.errors import ModelError
from alignment.models.architectures import refusal
from alignment.models.checking import check_scorer
from alignment.models.classifier import (
    HEAD,
    RewardScorer,
    check_reward_scorer,
    linear_head,
    reads_last_token,
    reward_scorer,
)
from alignment.models.scorer import CompletionScorer, Scorer

SCORED_LABELS = 2  # largest number of labels for scoring; the score is the logit of the first label
Check = Callable[[PretrainedConfig, str], None]
LiveCheck = Callable[[PreTrainedModel, str], None]


@dataclass(frozen=True)
class Task:
    """How a model is loaded and scored.

    Attributes:
        noun: name of the task's models in messages.
        auto: transformers class that loads them.
        mapping: configuration classes supported by ``auto``.
        scorer: (model, whether to compute a load-balancing loss) -> the module that an engine wraps.
        check_scorer: compares the scorer on its device with the model's own forward pass.
        check_config: rejects an unsupported configuration and completes a supported one; the second argument names
            the model in messages.
        check_live: rejects an unsupported live model.
        arguments: arguments for ``from_pretrained``.
        new: prefix of the parameters that are newly initialized if the checkpoint does not have them.
        lacks: message for any other missing parameter.
    """

    noun: str
    auto: Any
    mapping: Any
    scorer: Callable[[PreTrainedModel, bool], Scorer]
    check_scorer: Callable[[Any, torch.device], None]
    check_config: Check = lambda config, named: None
    check_live: LiveCheck = lambda model, named: None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    new: str | None = None
    lacks: str = "copy or download the folder again"

    def knows(self, config: PretrainedConfig, trust_remote_code: bool) -> bool:
        """Return whether a model with this configuration can be loaded for this task."""
        remote = self.auto.__name__ in (getattr(config, "auto_map", None) or {})
        return type(config) in self.mapping or (trust_remote_code and remote)

    def of(self, config: PretrainedConfig) -> Task:
        """Return the task for a checkpoint, with the number of labels in its configuration."""
        labels = {"num_labels": config.num_labels} if "num_labels" in self.arguments else {}
        return replace(self, arguments={**self.arguments, **labels})

    def is_new(self, parameter: str) -> bool:
        """Return whether this parameter may be missing from a checkpoint."""
        return self.new is not None and parameter.startswith(f"{self.new}.")


def _check_language_model(config: PretrainedConfig, named: str) -> None:
    reason = refusal(config)
    if reason is not None:
        raise ModelError(f"{named} is a {config.model_type} model, which is not supported: {reason}")


CAUSAL_LM = Task(
    noun="causal language model",
    auto=AutoModelForCausalLM,
    mapping=MODEL_FOR_CAUSAL_LM_MAPPING,
    scorer=CompletionScorer,
    check_scorer=check_scorer,
    check_config=_check_language_model,
    check_live=lambda model, named: _check_language_model(model.config, f"{named}: {type(model).__name__}"),
)


def _check_labels(labels: int, named: str, most: int = 1) -> None:
    if not 1 <= labels <= most:
        raise ModelError(
            f"{named} has num_labels={labels}, but a reward model must have 1; train one from a causal language model "
            "with method reward"
        )


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a checkpoint was saved as a sequence classifier."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def _completed(config: PretrainedConfig, named: str) -> None:
    """Validate a classifier's number of labels, or set it to 1 for a checkpoint of another kind."""
    if is_classifier(config):
        _check_labels(config.num_labels, named)
    else:
        config.num_labels = 1


def _check_scored(config: PretrainedConfig, named: str) -> None:
    """Validate the configuration of a model that is used for scoring."""
    if is_classifier(config):
        _check_labels(config.num_labels, named, most=SCORED_LABELS)
        return
    if config.architectures:
        raise ModelError(
            f"{named} is a {config.architectures[0]} without {HEAD}.weight, the head of a reward model; train a "
            "reward model with method reward"
        )
    config.num_labels = 1


def _check_trained(config: PretrainedConfig, named: str) -> None:
    """Validate the configuration of a model to train.

    Its classifier is built on the meta device; no remote code runs.
    """
    _completed(config, named)
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            _check_decoder(AutoModelForSequenceClassification.from_config(config), named)


def _check_decoder(model: PreTrainedModel, named: str) -> None:
    if not reads_last_token(model):
        raise ModelError(
            f"{named} is a {model.config.model_type} model: {type(model).__name__} does not score the last token of a "
            "decoder, so it can be used for scoring but not trained; use a decoder such as Llama or Qwen"
        )


def _check_live_scored(model: PreTrainedModel, named: str) -> None:
    if linear_head(model) is None and "SequenceClassification" not in type(model).__name__:
        raise ModelError(
            f"{named}: {type(model).__name__} is not a sequence classifier; pass its path, or load it with "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)"
        )
    _check_labels(model.config.num_labels, f"{named}: {type(model).__name__}", most=SCORED_LABELS)


def _check_live_trained(model: PreTrainedModel, named: str) -> None:
    _check_live_scored(model, named)
    _check_decoder(model, named)


# For scoring: no weight may be missing.
CLASSIFIER = Task(
    noun="sequence classifier",
    auto=AutoModelForSequenceClassification,
    mapping=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    scorer=reward_scorer,
    check_scorer=check_reward_scorer,
    check_config=_check_scored,
    check_live=_check_live_scored,
    arguments={"num_labels": 1},
    lacks="train a reward model with method reward",
)


def _trained_scorer(model: PreTrainedModel, router_aux_loss: bool) -> RewardScorer:
    _check_decoder(model, f"model {model.name_or_path!r}")
    return RewardScorer(model, router_aux_loss)


# For training: a causal language model or a classifier; the head may be missing.
REWARD_MODEL = replace(
    CLASSIFIER,
    scorer=_trained_scorer,
    check_config=_check_trained,
    check_live=_check_live_trained,
    new=HEAD,
    lacks=CAUSAL_LM.lacks,
)
