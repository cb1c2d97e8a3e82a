"""Compare a model's vocabulary with a tokenizer, and add tokens to it: those of another tokenizer's chat template.

New embeddings are initialized with the mean of the existing ones. Without random numbers, they are the same on every
rank, at every ZeRO stage and in every run. (``mean_resizing`` of transformers samples around the mean, with 1e-9 of
the embeddings' covariance.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AddedToken, PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.transformers import loading

MULTIPLE = 64  # the number of embeddings is rounded up to a multiple of this, as in TRL


def check_vocabulary(tokenizer: Any, vocab_size: int, model: str = "the model") -> None:
    """Check that every token ID has an embedding. ``vocab_size`` is the number of embeddings of ``model``.

    Raises:
        ModelError: the tokenizer has more tokens than the model.
    """
    size = len(tokenizer)
    if size > vocab_size:
        raise ModelError(
            f"the tokenizer has {size} tokens, but {model}'s vocab_size is {vocab_size}; "
            f"use the model's own tokenizer, or resize the embeddings to {size} and save the model"
        )


@dataclass(frozen=True)
class Vocabulary:
    """Changes to a model's vocabulary.

    Attributes:
        rows: number of rows of the embedding matrix; None: unchanged.
        new: IDs of tokens that the model has not been trained on.
        eos: ID of the end-of-sequence token to write into the configurations; None: unchanged.
    """

    rows: int | None = None
    new: tuple[int, ...] = ()
    eos: int | None = None

    def __bool__(self) -> bool:
        return self != Vocabulary()

    def note_in(self, config: PretrainedConfig) -> None:
        """Write the changes into the configuration of a model that is not loaded yet."""
        if self.rows is not None:
            config.get_text_config().vocab_size = self.rows
        if self.eos is not None:
            config.get_text_config().eos_token_id = config.eos_token_id = self.eos

    def put_on(self, model: PreTrainedModel) -> None:
        """Resize a model's embeddings in place, partitioned by ZeRO-3 or not, and update its configurations."""
        if self.rows is not None:
            resize(model, self.rows)
        self.note_in(model.config)
        generation = getattr(model, "generation_config", None)  # classifiers have none
        if self.eos is not None and generation is not None:
            ends = generation.eos_token_id
            others = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
            kept = [self.eos, *(end for end in others if end != self.eos)]
            generation.eos_token_id = kept if kept[1:] else self.eos


def take_template(tokenizer: Any, source: Any) -> list[str]:
    """Copy another tokenizer's chat template, EOS token and missing added tokens to a tokenizer, in place.

    Returns:
        The tokens that were added.
    """
    vocabulary = tokenizer.get_vocab()
    tokens = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = source.get_chat_template()
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    return [token.content for token in tokens]


def fill_up(tokenizer: Any, rows: int) -> list[str]:
    """Add unused tokens until every row of the embedding matrix has a token, and return them.

    PEFT resizes a base model to the number of tokens of the tokenizer that is stored with the adapters.
    """
    known = tokenizer.get_vocab()
    unused = (name for name in map("<extra_id_{}>".format, itertools.count()) if name not in known)
    tokens = list(itertools.islice(unused, max(0, rows - len(tokenizer))))
    tokenizer.add_tokens([AddedToken(token) for token in tokens])
    return tokens


def rounded_up(tokens: int, multiple: int | None = MULTIPLE) -> int:
    """Return the number of rows of the embedding matrix for this number of tokens."""
    return tokens if multiple is None else -(-tokens // multiple) * multiple


def resize(model: PreTrainedModel, rows: int) -> None:
    """Resize a model's embeddings and head to ``rows`` rows. New rows are initialized with the mean of the others.

    Under ZeRO-3 the new parameters are replicated on every rank until an engine partitions them.
    """
    before = int(model.get_input_embeddings().num_embeddings)  # correct under ZeRO-3 as well
    if rows == before:
        return
    divided = any(map(is_partitioned, model.parameters()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        loading({"zero_optimization": {"stage": 3}} if divided else None),
        torch.random.fork_rng(devices=devices),
    ):
        model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    ends: list[Any] = [model.get_input_embeddings(), *(() if head is None else (head,))]
    for tensor in {id(one): one for end in ends for one in end.parameters(recurse=False)}.values():
        if rows > before:
            _begin_as_mean(tensor, before)


def _begin_as_mean(parameter: nn.Parameter, before: int) -> None:
    data: Tensor = parameter.data
    data[before:] = data[:before].mean(0, dtype=torch.float32).to(data.dtype)
