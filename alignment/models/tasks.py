"""What a checkpoint is loaded as: a causal language model, or a sequence classifier with one label.

Everything that differs between the two before and while weights are loaded is here: which transformers class loads
them, which configurations and live models can be one, which weights may be missing, and what scores it.
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

SCORED_LABELS = 2  # of a classifier that scores: its score is the logit of the first label
Check = Callable[[PretrainedConfig, str], None]
LiveCheck = Callable[[PreTrainedModel, str], None]


@dataclass(frozen=True)
class Task:
    """What a model is loaded as and how it is scored.

    Attributes:
        noun: for messages.
        auto: transformers' class that loads it.
        mapping: the configurations that ``auto`` knows.
        scorer: (model, whether to compute a balancing loss) -> the module that an engine wraps.
        check_scorer: compares the scorer on its device with the model's own forward.
        check_config: refuses a configuration that cannot be it, and completes one that can; named by the second
            argument.
        check_live: refuses a live model that is not it.
        arguments: for ``from_pretrained``.
        new: the first part of the names of parameters that begin anew where a checkpoint lacks them.
        lacks: what to do about any other parameter that is missing.
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
    lacks: str = "which would start at random; copy or download the folder again"

    def knows(self, config: PretrainedConfig, trust_remote_code: bool) -> bool:
        """Whether a model with this configuration can be loaded as this."""
        remote = self.auto.__name__ in (getattr(config, "auto_map", None) or {})
        return type(config) in self.mapping or (trust_remote_code and remote)

    def of(self, config: PretrainedConfig) -> Task:
        """The task of one checkpoint, which has as many labels as it was saved with."""
        labels = {"num_labels": config.num_labels} if "num_labels" in self.arguments else {}
        return replace(self, arguments={**self.arguments, **labels})

    def is_new(self, parameter: str) -> bool:
        """Whether this parameter may be missing from a checkpoint."""
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
            f"{named} has num_labels={labels}, and a reward model has 1; train one with method reward from a causal "
            "language model"
        )


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was saved as a sequence classifier."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def _completed(config: PretrainedConfig, named: str) -> None:
    """A checkpoint that is no classifier yet will be one with one label; its own number of them is a default."""
    if is_classifier(config):
        _check_labels(config.num_labels, named)
    else:
        config.num_labels = 1


def _check_scored(config: PretrainedConfig, named: str) -> None:
    """A configuration to score with."""
    if is_classifier(config):
        _check_labels(config.num_labels, named, most=SCORED_LABELS)
        return
    if config.architectures:
        raise ModelError(
            f"{named} is a {config.architectures[0]}: its weights lack {HEAD}.weight, the head of a reward model; "
            "train one with method reward"
        )
    _completed(config, named)


def _check_trained(config: PretrainedConfig, named: str) -> None:
    """A configuration to train from. Its classifier is built without memory; code from elsewhere is not run for it."""
    _completed(config, named)
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            _check_decoder(AutoModelForSequenceClassification.from_config(config), named)


def _check_decoder(model: PreTrainedModel, named: str) -> None:
    if not reads_last_token(model):
        raise ModelError(
            f"{named} is a {model.config.model_type} model, whose {type(model).__name__} does not score the last "
            "token of a decoder: it can be scored with, but not trained; start from a decoder such as Llama or Qwen"
        )


def _check_live_scored(model: PreTrainedModel, named: str) -> None:
    if linear_head(model) is None and "SequenceClassification" not in type(model).__name__:
        raise ModelError(
            f"{named}: {type(model).__name__} is no sequence classifier; pass its path, or load it with "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)"
        )
    _check_labels(model.config.num_labels, f"{named}: {type(model).__name__}", most=SCORED_LABELS)


def _check_live_trained(model: PreTrainedModel, named: str) -> None:
    _check_live_scored(model, named)
    _check_decoder(model, named)


# To score with: every weight is there.
CLASSIFIER = Task(
    noun="sequence classifier",
    auto=AutoModelForSequenceClassification,
    mapping=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    scorer=reward_scorer,
    check_scorer=check_reward_scorer,
    check_config=_check_scored,
    check_live=_check_live_scored,
    arguments={"num_labels": 1},
    lacks="which would start at random; train a reward model with method reward",
)


def _trained_scorer(model: PreTrainedModel, router_aux_loss: bool) -> RewardScorer:
    _check_decoder(model, f"model {model.name_or_path!r}")
    return RewardScorer(model, router_aux_loss)


# To train: a causal language model or a classifier, whose head may be new.
REWARD_MODEL = replace(
    CLASSIFIER,
    scorer=_trained_scorer,
    check_config=_check_trained,
    check_live=_check_live_trained,
    new=HEAD,
    lacks=CAUSAL_LM.lacks,
)
