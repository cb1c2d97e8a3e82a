"""Chat templates for tokenizers that come without one."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import ModelError, OptionError, setting

# Role, colon, text and an empty line for each message; "Assistant:" asks for an answer. Has no end of turn.
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
    """Give a base model the ChatML template: its tokens, and embeddings for them, which begin anew.

    Both are changed in place. As in TRL the tokens that open and close a turn become BOS and EOS, and EOS pads.

    Args:
        model: a live transformers model.
        tokenizer: its tokenizer, without a chat template.
        format: ``chatml``.
        resize_to_multiple_of: rows of the embeddings are filled up to a multiple of it.

    Raises:
        OptionError: another format.
        ModelError: the tokenizer has a template already.
    """
    from alignment.models.vocabulary import resize, rounded_up

    if tokenizer.chat_template is not None:
        raise ModelError(
            "tokenizer: it has a chat template already, and the model may know it; set tokenizer.chat_template = None "
            "to replace it"
        )
    if format != "chatml":
        raise OptionError(f"{setting('format', format)}: not a chat format here; set chatml")
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
        if config is not None:  # a classifier generates nothing
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Give a model the chat template of another tokenizer, with its EOS token and the tokens that are new.

    Both are changed in place. The tokenizer is filled up with unused tokens to the rows of the embeddings.

    Args:
        model: a live transformers model.
        tokenizer: its tokenizer.
        source_tokenizer_path: folder or hub name of the tokenizer that has the template.
        resize_to_multiple_of: rows of the embeddings are filled up to a multiple of it.

    Returns:
        Model, tokenizer, and the ids of the tokens that were added.

    Raises:
        ModelError: the other tokenizer has no template.
    """
    from transformers import AutoTokenizer

    from alignment.models.vocabulary import fill_up, resize, rounded_up, take_template

    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ModelError(f"source_tokenizer_path: {source_tokenizer_path!r} has no chat template; name one that has")
    new = take_template(tokenizer, source)
    for config in (model.config, model.generation_config):
        if config is not None:  # a classifier generates nothing
            config.eos_token_id = tokenizer.eos_token_id
    rows = rounded_up(len(tokenizer), resize_to_multiple_of)
    resize(model, rows)
    new += fill_up(tokenizer, rows)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(new)
