"""The tokenizer of a run, with the special tokens and the chat template that the options set."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alignment.config.errors import ModelError, OptionError, one_line, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import TokenizerOptions
from alignment.models.source import ModelSource
from alignment.models.vocabulary import Vocabulary, fill_up, rounded_up, take_template
from alignment.run.console import tell

_TEMPLATES = (".jinja", ".j2")


def load_tokenizer(given: Any, older_name: Any, policy: ModelSource, options: AlignmentConfig) -> Any:
    """Return the given tokenizer, or the one saved with the adapters to continue from, or the policy's own.

    Raises:
        OptionError: if two different ones are passed.
        ModelError: if the model's folder has no tokenizer, or it is invalid.
    """
    if given is not None and older_name is not None and given is not older_name:
        raise OptionError("tokenizer: processing_class is also passed; remove tokenizer, its older name")
    tokenizer = given if given is not None else older_name
    saved = options.adapter_name_or_path
    if tokenizer is None and saved is not None and (Path(saved) / "tokenizer_config.json").is_file():
        # It has the chat template that the adapters were trained with.
        policy = replace(policy, path=saved, live=None, init_kwargs={})
    return policy.tokenizer(tokenizer, "processing_class", options.trust_remote_code)


def with_options(
    tokenizer: Any, options: TokenizerOptions, policy: ModelSource, optimizers: tuple[Any, Any] = (None, None)
) -> tuple[Any, Vocabulary]:
    """Apply :class:`TokenizerOptions` to a copy of the tokenizer; return the tokenizer itself if none is set.

    A chat template of another tokenizer may use tokens that are missing here. In that case all added tokens of the
    other tokenizer are added, and the vocabulary is padded with unused tokens to the new size of the embeddings.

    Args:
        tokenizer: the model's tokenizer.
        options: options of the run.
        policy: the model.
        optimizers: the user's optimizer and schedule, or Nones.

    Returns:
        The tokenizer, and the changes that the model needs.

    Raises:
        OptionError: a token is not in the vocabulary, or the optimizer or adapters of a live model do not allow more.
        ModelError: a chat template cannot be read.
    """
    path = options.chat_template_path
    named = {"eos_token": options.eos_token, "pad_token": options.pad_token}
    given = {name: token for name, token in named.items() if token is not None}
    if not given and path is None:
        return tokenizer, Vocabulary()
    tokenizer, new, grows = copy.deepcopy(tokenizer), [], False
    if path is not None and path.endswith(_TEMPLATES):
        try:
            tokenizer.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{setting('chat_template_path', path)}: cannot be read: {one_line(error)}; set it to a Jinja file"
            ) from error
    elif path is not None:
        source = _source(path, options.trust_remote_code)  # type: ignore[attr-defined]
        tokens = [token.content for token in source.added_tokens_decoder.values()]
        needed = {token for token in tokens if token in source.get_chat_template()} | {source.eos_token or ""} - {""}
        if needed - set(tokenizer.get_vocab()):
            new = take_template(tokenizer, source)
        else:
            tokenizer.chat_template = source.chat_template
        grows = len(tokenizer) > policy.config.get_text_config().vocab_size
        if grows:
            new += fill_up(tokenizer, rounded_up(len(tokenizer)))
        given = ({} if source.eos_token is None else {"eos_token": source.eos_token}) | given
        _check_new(policy, grows, new, optimizers)
    vocabulary = tokenizer.get_vocab()
    for name, token in given.items():
        if token not in vocabulary:
            raise OptionError(
                f"{setting(name, token)}: not in the vocabulary of the tokenizer; set another token, or add it to "
                "tokenizer and model and save both"
            )
        setattr(tokenizer, name, token)
    rows, eos = len(tokenizer) if grows else None, tokenizer.eos_token_id if "eos_token" in given else None
    if new:
        before = policy.config.get_text_config().vocab_size
        resized = (
            f"; resized the embeddings from {before} to {rows} rows, the new ones initialized to the mean of the "
        )
        said = f"chat_template_path: added {len(new)} tokens to the tokenizer of {policy.name}"
        tell(f"{said}{f'{resized}others' if grows else ''}")
    return tokenizer, Vocabulary(rows, tuple(tokenizer.convert_tokens_to_ids(new)), eos)


def _check_new(policy: ModelSource, grows: bool, new: list[str], optimizers: tuple[Any, Any]) -> None:
    """Check that an optimizer or adapters of a live model still match it after tokens are added."""
    if grows and any(optimizers):
        raise OptionError(
            "chat_template_path: adds tokens, which resizes the embeddings and invalidates optimizers; remove it, or "
            "call clone_chat_template() before creating the optimizer"
        )
    if new and getattr(policy.live, "peft_config", None):
        raise OptionError(
            "chat_template_path: adds tokens to a model that already has adapters; call clone_chat_template() before "
            "adding them, or set a .jinja file to write these tokens as text"
        )


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
