"""The tokenizer of a run, with the special tokens and the chat template that the options set."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alignment.config.errors import ModelError, OptionError, one_line, setting
from alignment.config.options_data import TokenizerOptions
from alignment.models.vocabulary import Vocabulary, fill_up, rounded_up, take_template

_TEMPLATES = (".jinja", ".j2")


def with_options(tokenizer: Any, options: Any, rows: int) -> tuple[Any, Vocabulary]:
    """Apply :class:`TokenizerOptions` to a copy of the tokenizer; return the tokenizer itself if none is set.

    A chat template of another tokenizer may use tokens that are missing here. In that case all added tokens of the
    other tokenizer are added, and the vocabulary is padded with unused tokens to the new size of the embeddings.

    Args:
        tokenizer: the model's tokenizer.
        options: options of the run.
        rows: number of rows of the model's embeddings.

    Returns:
        The tokenizer, and the changes that the model needs.

    Raises:
        OptionError: a token is not in the vocabulary.
        ModelError: a chat template cannot be read.
    """
    assert isinstance(options, TokenizerOptions)
    path = options.chat_template_path
    named = {"eos_token": options.eos_token, "pad_token": options.pad_token}
    given = {name: token for name, token in named.items() if token is not None}
    if not given and path is None:
        return tokenizer, Vocabulary()
    tokenizer = copy.deepcopy(tokenizer)
    end, new, grows = None, [], False
    if path is not None and path.endswith(_TEMPLATES):
        tokenizer.chat_template = _written(path)
    elif path is not None:
        source = _source(path, options.trust_remote_code)  # type: ignore[attr-defined]
        end = source.eos_token
        if _lacks(tokenizer, source):
            new = take_template(tokenizer, source)
        else:
            tokenizer.chat_template = source.chat_template
        grows = len(tokenizer) > rows
        if grows:
            new += fill_up(tokenizer, rounded_up(len(tokenizer)))
    given = ({} if end is None else {"eos_token": end}) | given
    vocabulary = tokenizer.get_vocab()
    for name, token in given.items():
        if token not in vocabulary:
            raise OptionError(
                f"{setting(name, token)}: not in the vocabulary of the tokenizer; set another token, or add it to "
                "tokenizer and model and save both"
            )
        setattr(tokenizer, name, token)
    return tokenizer, Vocabulary(
        len(tokenizer) if grows else None,
        tuple(tokenizer.convert_tokens_to_ids(new)),
        tokenizer.eos_token_id if "eos_token" in given else None,
    )


def _written(path: str) -> str:
    """Read a chat template from a Jinja file."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{setting('chat_template_path', path)}: cannot be read: {one_line(error)}; set it to a Jinja file"
        ) from error


def _source(path: str, trust_remote_code: bool) -> Any:
    """Load a tokenizer that has a chat template."""
    key = setting("chat_template_path", path)
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # network, files and code of many kinds
        raise ModelError(
            f"{key}: cannot load a tokenizer: {one_line(error)}; set it to a folder, a Hub name or a .jinja file"
        ) from error
    if not source.chat_template:
        raise ModelError(f"{key}: the tokenizer has no chat template; set another one, or a .jinja file")
    return source


def _lacks(tokenizer: Any, source: Any) -> bool:
    """Whether the tokenizer lacks tokens that the chat template of another one uses, or its end-of-sequence token."""
    tokens = [token.content for token in source.added_tokens_decoder.values()]
    needed = {token for token in tokens if token in source.get_chat_template()} | {source.eos_token or ""} - {""}
    return bool(needed - set(tokenizer.get_vocab()))
