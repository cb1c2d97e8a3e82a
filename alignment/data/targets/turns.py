"""Which tokens of a rendered conversation the assistant wrote.

A template that marks them by ``{% generation %}`` is taken at its word. Of any other one they are found: a turn of the
assistant begins where the generation prompt before it ends, and ends with the first token that ends turns.
"""

from __future__ import annotations

from typing import Any

from alignment.config.errors import DataError, one_line
from alignment.data.tokenization import RowTokenizer, Source, common_length

_REMEDY = "set a chat template that marks the assistant's turns by {% generation %}, or leave assistant_only_loss out"


def assistant_mask(tokenizer: RowTokenizer, source: Source, ids: list[int]) -> list[bool]:
    """(T,) whether each token of a conversation is one that the assistant wrote, its end of turn included.

    Args:
        tokenizer: made ``ids``.
        source: the conversation: its prompt's messages and those of its only completion.
        ids: (T,) its token ids, as :meth:`RowTokenizer.encode` gives prompt and completion.

    Raises:
        DataError: the template neither marks the turns nor lets them be found, or the row is no conversation.
    """
    if isinstance(source.prompt, str) or isinstance(source.completions[0], str):
        raise DataError(
            f"{source.place}: assistant_only_loss needs a conversation, and this row holds text; give messages, or "
            "leave assistant_only_loss out"
        )
    messages = [*source.prompt, *source.completions[0]]
    if "{% generation" in _plain(tokenizer.tokenizer.chat_template):
        return _marked(tokenizer, source, messages, ids)
    return _found(tokenizer, source, messages, ids)


def _plain(template: Any) -> str:
    """A template (or several by name) with one spelling of block tags."""
    return str(template).replace("{%-", "{%").replace("{%+", "{%").replace("{%generation", "{% generation")


def _marked(tokenizer: RowTokenizer, source: Source, messages: list[Any], ids: list[int]) -> list[bool]:
    try:
        rendered = tokenizer.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **source.template
        )
    except Exception as error:  # a template is a user's program, and slow tokenizers know no places of tokens
        raise DataError(
            f"{source.place}: the assistant's tokens cannot be marked by the chat template of {tokenizer.name}: "
            f"{one_line(error)}; use a fast tokenizer, or leave assistant_only_loss out"
        ) from error
    mask = [bool(value) for value in rendered["assistant_masks"]]
    shared = common_length(list(rendered["input_ids"]), [ids])
    # What is not the template's is an end-of-sequence token, put behind an answer that the template does not end.
    return [*mask[:shared], *[bool(shared and mask[shared - 1])] * (len(ids) - shared)]


def _found(tokenizer: RowTokenizer, source: Source, messages: list[Any], ids: list[int]) -> list[bool]:
    mask, end = [False] * len(ids), ids[-1]
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:number]
        text = tokenizer.render(before, source, add_generation_prompt=True) if before else tokenizer.opening(source)
        (head,) = tokenizer.ids([text])
        start = common_length(head, [ids])
        # A token of the head that merges with the answer belongs to the answer: a few may differ, not a turn.
        stop = next((place for place in range(start, len(ids)) if ids[place] == end), None)
        following = any(other["role"] != "assistant" for other in messages[number + 1 :])
        if start < len(head) - 1 or stop is None or (following and stop == len(ids) - 1):
            raise DataError(
                f"{source.place}: the chat template of {tokenizer.name} does not say which tokens are the "
                f"assistant's, and writes message {number} in another way where others follow it; {_REMEDY}"
            )
        mask[start : stop + 1] = [True] * (stop + 1 - start)
    return mask
