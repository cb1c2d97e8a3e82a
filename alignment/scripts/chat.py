"""Chat templates for tokenizers without one."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import ModelError, OptionError, setting

# Role, colon, text and an empty line for each message; "Assistant:" is the generation prompt. Turns have no end token.
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_START, _END = "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}{{ '" + _START + "' + message['role'] + '\n' + message['content'] + '" + _END + "' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '" + _START + "assistant\n' }}{% endif %}"
)


def setup_chat_format(
    model: Any, tokenizer: Any, format: str | None = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Set up the ChatML template for a base model: add its tokens, with newly initialized embeddings.

    Model and tokenizer are modified in place. As in TRL, the tokens that start and end a turn become the BOS and EOS
    tokens, and the EOS token is also the padding token.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer, without a chat template.
        format: must be ``chatml``.
        resize_to_multiple_of: pad the rows of the embeddings to a multiple of this number.

    Raises:
        OptionError: an unknown format.
        ModelError: the tokenizer already has a chat template.
    """
    from alignment.models.vocabulary import resize, rounded_up

    if tokenizer.chat_template is not None:
        raise ModelError(
            "tokenizer: already has a chat template, which the model may have been trained with; set "
            "tokenizer.chat_template = None to replace it"
        )
    if format != "chatml":
        raise OptionError(f"{setting('format', format)}: unknown chat format; set chatml")
    tokenizer.add_special_tokens(
        {
            "bos_token": _START,
            "eos_token": _END,
            "pad_token": _END,
            "additional_special_tokens": [_START, _END],
        }
    )
    tokenizer.chat_template = _CHATML
    resize(model, rounded_up(len(tokenizer), resize_to_multiple_of))
    for config in (model.config, model.generation_config):
        if config is not None:  # classifiers have no generation config
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Copy the chat template of another tokenizer, with its EOS token and its additional tokens.

    Model and tokenizer are modified in place. The vocabulary is padded with unused tokens to the size of the
    embeddings.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        source_tokenizer_path: folder or Hub name of the tokenizer with the chat template.
        resize_to_multiple_of: pad the rows of the embeddings to a multiple of this number.

    Returns:
        Model, tokenizer, and the ids of the added tokens.

    Raises:
        ModelError: the other tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    from alignment.models.vocabulary import fill_up, resize, rounded_up, take_template

    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ModelError(
            f"{setting('source_tokenizer_path', source_tokenizer_path)}: the tokenizer has no chat template; set "
            "another one"
        )
    new = take_template(tokenizer, source)
    for config in (model.config, model.generation_config):
        if config is not None:  # classifiers have no generation config
            config.eos_token_id = tokenizer.eos_token_id
    rows = rounded_up(len(tokenizer), resize_to_multiple_of)
    resize(model, rows)
    new += fill_up(tokenizer, rows)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(new)
