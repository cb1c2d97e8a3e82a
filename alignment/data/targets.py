"""Which tokens of a row are in the loss: columns of tokenized rows, turns of the assistant, and formatted rows.

Rows that are already tokenized are used unchanged; no tokens are added.

The assistant's tokens in a rendered conversation are those that the template marks with ``{% generation %}``. If it
marks none, an assistant turn starts at the end of the generation prompt before it, and ends with the first end-of-turn
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value

from alignment.config.errors import DataError, listing, one_line, show
from alignment.config.lookup import FAILURES, raised
from alignment.data.messages import Source
from alignment.data.tokenization import Encoded, RowTokenizer

IGNORED = -100  # the label of a token that is not in the loss
_PACKED = "seq_lengths"  # the lengths of the sequences of a pack


@dataclass(frozen=True)
class TokenColumns:
    """Columns of tokenized rows.

    Attributes:
        ids: the columns with token IDs, in the order in which rows use them.
        beside: further columns that are used.
    """

    ids: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are used."""
        return (*self.ids, *self.beside)


@dataclass(frozen=True)
class TokenFormat(TokenColumns):
    """The columns of tokenized rows of one kind, of which those in ``beside`` may be missing.

    Attributes:
        required: columns among ``beside`` without which rows do not count as tokenized.
        whole: whether completions are complete sequences, with the prompt.
        demanded: whether rows must already be tokenized (``skip_prepare_dataset``).
    """

    required: tuple[str, ...] = ()
    whole: bool = False
    demanded: bool = False

    def find(self, there: Collection[str]) -> TokenColumns | None:
        """Return the columns to use, or None if the rows are not tokenized."""
        if not self.ids or not all(name in there for name in (*self.ids, *self.required)):
            return None
        return TokenColumns(self.ids, tuple(name for name in self.beside if name in there))

    def check(self, there: Collection[str], where: str) -> None:
        """Check for what no single row shows.

        Raises:
            DataError: rows must be tokenized but are not, columns would be ignored, complete sequences are beside
                prompts, or rows are packs.
        """
        found = self.find(there) is not None
        if self.demanded and not found:
            raise DataError(f"{where}: skip_prepare_dataset requires tokenized rows (input_ids), not {listing(there)}")
        stems, ends = [name.removesuffix("_ids") for name in self.ids], ("_attention_mask", "_mask", "_labels")
        ignored = [name for name in there if name in {stem + end for stem in stems for end in ends}]
        if found and ignored:
            raise DataError(
                f"{where}: {listing(ignored)} would be ignored; pass token IDs without padding, and remove the columns"
            )
        if found and self.whole and "prompt_ids" in there:
            raise DataError(
                f"{where}: {listing(self.ids)} are read as complete sequences, but column 'prompt_ids' suggests that "
                "they are completions only; remove 'prompt_ids' if they contain the prompt, or pass the rows as text"
            )
        if found and not self.ids[1:] and _PACKED in there:
            raise DataError(
                f"{where}: the rows are already packed ({_PACKED!r}), so their sequences would attend to one another; "
                "pass the original rows and set packing: true"
            )


def divided(ids: Sequence[int], learned: Sequence[bool]) -> Encoded:
    """Divide (T,) token IDs before the first one in the loss mask into a prompt, of at least one, and a completion.

    The result's ``further`` has ``scored``, the loss mask of the completion (None if all its tokens are in the loss;
    the completion is empty if no token is), and ``first``: whether the sequence's first token has a label, although
    it cannot be predicted; only for display.
    """
    border = next((place for place in range(1, len(ids)) if learned[place]), len(ids))
    scored = [bool(value) for value in learned[border:]]
    further = {"scored": None if all(scored) else scored, "first": bool(learned) and bool(learned[0])}
    return Encoded(list(ids[:border]), [list(ids[border:])], further)


def read_ids(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> list[list[int]]:
    """Return the token IDs of the columns of a row, which ``where`` names in messages.

    Raises:
        DataError: a value is not a list of token IDs less than ``vocabulary``.
    """
    for name in columns.ids:
        ids = row.get(name)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise DataError(f"{where}: {name} is {show(ids)}; expected a list of token IDs")
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            instead = f"the tokenizer has {vocabulary} tokens; tokenize the rows with the model's own tokenizer"
            raise DataError(f"{where}: {name} contains token ID {wrong[0]}, but {instead}")
    return [row[name] for name in columns.ids]


def read_completions(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> Encoded:
    """Read a prompt and its completions."""
    prompt, *completions = read_ids(row, columns, where, vocabulary)
    return Encoded(prompt, completions)


def read_whole(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> Encoded:
    """Read complete sequences. What they have in common is the prompt; each completion keeps at least one token."""
    sequences = read_ids(row, columns, where, vocabulary)
    shared = len(commonprefix([sequences[0][: max(0, min(map(len, sequences)) - 1)], *sequences]))
    return Encoded(sequences[0][:shared], [ids[shared:] for ids in sequences])


def learned_row(
    row: Mapping[str, Any],
    columns: TokenColumns,
    where: str,
    vocabulary: int,
    completion_only: bool | None,
    assistant_only: bool,
) -> Encoded:
    """Read a tokenized sequence. Its labels, or else its masks, select the tokens in the loss.

    Tokens that ``attention_mask`` masks are removed.

    Raises:
        DataError: see :func:`read_ids`; labels differ from the row's tokens; or a required mask is missing.
    """
    (ids,) = read_ids(row, columns, where, vocabulary)
    beside = {name: row[name] for name in columns.beside if row.get(name) is not None}
    for name, values in beside.items():
        if not isinstance(values, list) or len(values) != len(ids):
            raise DataError(f"{where}: {name} is {show(values)}; expected one value for each of the {len(ids)} tokens")
    seen = beside.pop("attention_mask", [1] * len(ids))
    if "labels" in beside:
        for place, (label, token) in enumerate(zip(beside["labels"], ids)):
            if label not in (IGNORED, token):
                raise DataError(
                    f"{where}: labels[{place}] is {show(label)}, but the row's token is {token}; expected the same "
                    f"token ID, or {IGNORED} to exclude the token from the loss"
                )
        beside = {"labels": [label != IGNORED for label in beside["labels"]]}
    else:
        for name, option in (("completion_mask", "completion_only_loss"), ("assistant_masks", "assistant_only_loss")):
            asked = completion_only if name == "completion_mask" else assistant_only
            if asked and name not in beside:
                raise DataError(f"{where}: {option} requires {name} or labels for tokenized rows; add one")
        if completion_only is False:
            beside.pop("completion_mask", None)
    learned = [all(bits) for bits in zip([True] * len(ids), *beside.values())]
    kept = [place for place, value in enumerate(seen) if value]
    return divided([ids[place] for place in kept], [learned[place] for place in kept])


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


Format = Callable[[Mapping[str, Any]], str]


def formatted(
    data: Dataset | IterableDataset, function: Format, where: str, column: str = "text"
) -> Dataset | IterableDataset:
    """Replace the columns of ``data`` by one, ``column``, with the text that ``function`` returns for each row.

    Raises:
        DataError: the function raised an error or did not return a string; for a stream, raised when it is read.
            ``where`` names the data.
    """

    def made(row: Mapping[str, Any], number: int) -> dict[str, str]:
        place = f"{where}, row {number + 1}: formatting_func"
        try:
            text = function(row)
        except FAILURES as error:
            raise DataError(f"{place} raised {raised(error)}; fix the function, or remove the row") from error
        if not isinstance(text, str):
            raise DataError(f"{place} returned {show(text)}; expected a string")
        return {column: text}

    if isinstance(data, IterableDataset):
        return data.map(made, with_indices=True).select_columns([column])
    # In memory, because no fingerprint covers everything that the function depends on.
    return data.map(
        made,
        with_indices=True,
        remove_columns=data.column_names,
        features=Features({column: Value("string")}),
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint="formatted",
        desc="Formatting",
    )
