"""Find the assistant's tokens in a rendered conversation.

If the template marks them with ``{% generation %}``, these marks are used. Otherwise an assistant turn starts at the
end of the generation prompt before it, and ends with the first end-of-turn token.
"""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import Any

from alignment.config.errors import DataError, one_line
from alignment.data.messages import Source
from alignment.data.tokenization import RowTokenizer


def assistant_mask(tokenizer: RowTokenizer, source: Source, ids: list[int]) -> list[bool]:
    """Return a (T,) mask of the assistant's tokens among the (T,) ``ids`` of a conversation, with end-of-turn tokens.

    Raises:
        DataError: the template does not mark the turns and they cannot be found, or the row is not a conversation.
    """
    if isinstance(source.prompt, str) or isinstance(source.completions[0], str):
        raise DataError(
            f"{source.place}: assistant_only_loss requires a conversation, but this row is plain text; use messages, "
            "or remove assistant_only_loss"
        )
    is_marked = re.search(r"{%[-+]?\s*generation", str(tokenizer.tokenizer.chat_template))
    return (_marked if is_marked else _found)(tokenizer, source, [*source.prompt, *source.completions[0]], ids)


def _marked(tokenizer: RowTokenizer, source: Source, messages: list[Any], ids: list[int]) -> list[bool]:
    try:
        rendered = tokenizer.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **source.template
        )
    except Exception as error:  # a template is user code; slow tokenizers have no character offsets
        raise DataError(
            f"{source.place}: the chat template of {tokenizer.name} could not mark the assistant's tokens: "
            f"{one_line(error)}; use a fast tokenizer, or remove assistant_only_loss"
        ) from error
    mask = [bool(value) for value in rendered["assistant_masks"]]
    shared = len(commonprefix([list(rendered["input_ids"]), ids]))
    # Tokens beyond the template's are EOS tokens that were added because the template does not end the turn.
    return [*mask[:shared], *[bool(shared and mask[shared - 1])] * (len(ids) - shared)]


def _found(tokenizer: RowTokenizer, source: Source, messages: list[Any], ids: list[int]) -> list[bool]:
    mask, end = [False] * len(ids), ids[-1]
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:number]
        text = tokenizer.render(before, source, add_generation_prompt=True) if before else tokenizer.opening(source)
        (head,) = tokenizer.ids([text])
        start = len(commonprefix([head, ids]))
        # A token that spans the boundary belongs to the completion: a few tokens may differ, but not a whole turn.
        stop = next((place for place in range(start, len(ids)) if ids[place] == end), None)
        following = any(other["role"] != "assistant" for other in messages[number + 1 :])
        if start < len(head) - 1 or stop is None or (following and stop == len(ids) - 1):
            raise DataError(
                f"{source.place}: the chat template of {tokenizer.name} does not mark the assistant's tokens, and "
                f"renders message {number} differently if others follow; use one with {{% generation %}}"
            )
        mask[start : stop + 1] = [True] * (stop + 1 - start)
    return mask
