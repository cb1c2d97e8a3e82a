"""More tokens than a model was made with: those of another tokenizer's chat template, and embeddings for them.

New rows begin as the mean of the old ones, which needs no random numbers: they are the same on every rank, at every
ZeRO stage and in every run. transformers' ``mean_resizing`` draws them around it, with 1e-9 of the rows' covariance.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AddedToken, PretrainedConfig, PreTrainedModel

from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.transformers import loading

MULTIPLE = 64  # to which rows of embeddings are rounded up, as in TRL


@dataclass(frozen=True)
class Vocabulary:
    """What changes of a model with its tokenizer.

    Attributes:
        rows: of the embeddings; None: as many as there are.
        new: ids of tokens that the model has not been trained on.
        eos: id of the token that ends a text, for the configurations; None: theirs.
    """

    rows: int | None = None
    new: tuple[int, ...] = ()
    eos: int | None = None

    def __bool__(self) -> bool:
        return self != Vocabulary()

    def note_in(self, config: PretrainedConfig) -> None:
        """Write it into the configuration of a model that is not loaded yet."""
        if self.rows is not None:
            config.get_text_config().vocab_size = self.rows
        if self.eos is not None:
            config.get_text_config().eos_token_id = config.eos_token_id = self.eos

    def put_on(self, model: PreTrainedModel) -> None:
        """Resize a model's embeddings in place, whole or partitioned by ZeRO-3, and write its configurations."""
        if self.rows is not None:
            resize(model, self.rows)
        self.note_in(model.config)
        generation = getattr(model, "generation_config", None)  # a classifier generates nothing
        if self.eos is not None and generation is not None:
            ends = generation.eos_token_id
            others = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
            kept = [self.eos, *(end for end in others if end != self.eos)]
            generation.eos_token_id = kept if kept[1:] else self.eos


def take_template(tokenizer: Any, source: Any) -> list[str]:
    """Give a tokenizer the chat template of another one, with its EOS token and the tokens that are new, in place.

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
    """Add unused tokens until there is one for every row of the embeddings; return them.

    PEFT resizes a base to the number of tokens of the tokenizer that lies beside adapters.
    """
    known = tokenizer.get_vocab()
    unused = (name for name in map("<extra_id_{}>".format, itertools.count()) if name not in known)
    tokens = list(itertools.islice(unused, max(0, rows - len(tokenizer))))
    tokenizer.add_tokens([AddedToken(token) for token in tokens])
    return tokens


def rounded_up(tokens: int, multiple: int | None = MULTIPLE) -> int:
    """The rows of embeddings for so many tokens."""
    return tokens if multiple is None else -(-tokens // multiple) * multiple


def resize(model: PreTrainedModel, rows: int) -> None:
    """Give a model's embeddings, and its head, so many rows; those that are new begin as the mean of the others.

    Under ZeRO-3 the new parameters are whole on every rank, until an engine divides them.
    """
    before = int(model.get_input_embeddings().num_embeddings)  # true also where ZeRO-3 has divided the rows
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
