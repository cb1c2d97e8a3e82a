"""The tokenizer of a run with the end, the padding and the chat template that options name."""

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
    """A copy of the tokenizer with what is set of :class:`TokenizerOptions`; itself where nothing is.

    A chat template of another tokenizer whose tokens it lacks comes with all tokens that were added to that one, and
    with unused ones up to the rows that the embeddings will have.

    Args:
        tokenizer: the model's.
        options: the run's.
        rows: of the model's embeddings.

    Returns:
        The tokenizer, and what changes of the model.

    Raises:
        OptionError: a token that the tokenizer does not have.
        ModelError: a chat template that cannot be read.
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
                f"{setting(name, token)}: the tokenizer has no such token; set one of its own, or add it to tokenizer "
                "and model and save both"
            )
        setattr(tokenizer, name, token)
    return tokenizer, Vocabulary(
        len(tokenizer) if grows else None,
        tuple(tokenizer.convert_tokens_to_ids(new)),
        tokenizer.eos_token_id if "eos_token" in given else None,
    )


def _written(path: str) -> str:
    """The chat template of a Jinja file."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{setting('chat_template_path', path)}: cannot be read: {one_line(error)}; set a Jinja file"
        ) from error


def _source(path: str, trust_remote_code: bool) -> Any:
    """A tokenizer that has a chat template."""
    key = setting("chat_template_path", path)
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # network, files and code of many kinds
        raise ModelError(
            f"{key}: no tokenizer can be loaded from it: {one_line(error)}; set a folder, a hub name or a .jinja file"
        ) from error
    if not source.chat_template:
        raise ModelError(f"{key}: its tokenizer has no chat template; set another, or a .jinja file")
    return source


def _lacks(tokenizer: Any, source: Any) -> bool:
    """Whether the tokenizer has not all tokens that the template of another one writes, or that end its turns."""
    tokens = [token.content for token in source.added_tokens_decoder.values()]
    needed = {token for token in tokens if token in source.get_chat_template()} | {source.eos_token or ""} - {""}
    return bool(needed - set(tokenizer.get_vocab()))
