"""The options of a conversation with a trained model; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from alignment.config.errors import refuse
from alignment.config.fields import Count, Natural, NotNegative, Positive, option, validated

_OWN = "[the model's]"  # of its generation_config.json


@dataclass
class ChatOptions:
    """Options of ``deepspeed-alignment chat``, described by its ``--help``; OptionError if one is invalid."""

    system: str | None = option(None, "system message that every conversation starts with")
    max_new_tokens: Count = option(512, "maximum length of an answer, in tokens")
    temperature: NotNegative | None = option(None, f"sampling temperature; 0: always the most likely token {_OWN}")
    top_p: Annotated[float, Gt(0), Le(1)] | None = option(
        None, f"total probability of the likeliest tokens to sample; 1: all {_OWN}"
    )
    top_k: Natural | None = option(None, f"sample from this number of most likely tokens; 0: all {_OWN}")
    min_p: Annotated[float, Ge(0), Le(1)] | None = option(
        None, f"least probability of a token to sample, relative to that of the most likely token {_OWN}"
    )
    repetition_penalty: Positive | None = option(
        None, f"penalty on tokens that already occur in the conversation; 1: none {_OWN}"
    )
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = option(42, "random seed of the first answer; each further one adds 1")
    apply_chat_template: bool = option(
        True, "false: take each line as the prompt itself, for a model that was trained on prompts that are strings"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "dtype of the weights; auto: that of training, or that of the checkpoint"
    )
    base: str | None = option(None, "folder or Hub name of an adapter's base model, instead of the one it names")
    revision: str | None = option(None, "revision on the Hub, of a full model or of an adapter's base model")
    use_cpu: bool = option(False, "compute on the CPU even if there is a GPU")
    trust_remote_code: bool = option(False, "allow models and tokenizers to run their own Python code")

    def __post_init__(self) -> None:
        vars(self).update(validated(type(self), vars(self)))
        if self.system is not None and not self.apply_chat_template:
            refuse(self, "system", "only a chat template has a place for it; remove it, or apply_chat_template=false")

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of ``Sampling`` that are set."""
        if self.temperature == 0:
            return {"temperature": 1.0, "top_k": 1}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
