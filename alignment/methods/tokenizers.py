"""The tokenizer of a run with the end, the padding and the chat template that options name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alignment.config.errors import ModelError, OptionError, listing, one_line, setting
from alignment.config.options_data import TokenizerOptions

_TEMPLATES = (".jinja", ".j2")


def with_options(tokenizer: Any, options: Any) -> Any:
    """A copy of the tokenizer with what is set of :class:`TokenizerOptions`; itself where nothing is.

    Raises:
        OptionError: a token that the tokenizer does not have.
        ModelError: a chat template that cannot be read, or needs tokens that the tokenizer does not have.
    """
    assert isinstance(options, TokenizerOptions)
    path = options.chat_template_path
    named = {"eos_token": options.eos_token, "pad_token": options.pad_token}
    given = {name: token for name, token in named.items() if token is not None}
    if not given and path is None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    if path is not None:
        tokenizer.chat_template, end = _template(path, tokenizer, options.trust_remote_code)  # type: ignore[attr-defined]
        given = ({} if end is None else {"eos_token": end}) | given
    vocabulary = tokenizer.get_vocab()
    for name, token in given.items():
        if token not in vocabulary:
            raise OptionError(
                f"{setting(name, token)}: the tokenizer has no such token; set one of its own, or add it to tokenizer "
                "and model and save both"
            )
        setattr(tokenizer, name, token)
    return tokenizer


def _template(path: str, tokenizer: Any, trust_remote_code: bool) -> tuple[str, str | None]:
    """A chat template, and the token that ends its turns where another tokenizer says so."""
    key = setting("chat_template_path", path)
    if path.endswith(_TEMPLATES):
        try:
            return Path(path).expanduser().read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{key}: cannot be read: {one_line(error)}; set a Jinja file") from error
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # network, files and code of many kinds
        raise ModelError(
            f"{key}: no tokenizer can be loaded from it: {one_line(error)}; set a folder, a hub name or a .jinja file"
        ) from error
    if not source.chat_template:
        raise ModelError(f"{key}: its tokenizer has no chat template; set another, or a .jinja file")
    known = tokenizer.get_vocab()
    tokens = [token.content for token in source.added_tokens_decoder.values()]
    written = [token for token in tokens if token in source.chat_template]
    missing = sorted({*written, source.eos_token or ""} - {*known, ""})
    if missing:
        raise ModelError(
            f"{key}: its template writes {listing(missing)}, which the model's tokenizer does not have as tokens; add "
            "them to tokenizer and model (resize_token_embeddings) and save both, or set a .jinja file to write them "
            "as text"
        )
    return source.chat_template, source.eos_token
