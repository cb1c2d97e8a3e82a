"""Convert text to the token IDs of prompts and completions, and truncate them.

The prompt, and prompt + completion, are tokenized as complete texts; the prompt's IDs are their longest common prefix.
A token that spans the boundary between prompt and completion therefore belongs to the completion, because the model
would have to generate it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

from alignment.config.errors import DataError, did_you_mean, listing, one_line, show
from alignment.data.messages import ROLES, Message, Source, Text

logger = logging.getLogger(__name__)

EMPTY = "the completion is empty"
NO_ROOM = "no space left for the completion (the prompt fills max_length)"
NO_CONTEXT = "no context before the completion (empty prompt, and the tokenizer has no BOS or EOS token)"
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical after truncation"
PROMPT_LENGTH = 512  # tokens of the prompt that are kept in a row longer than max_length
_MARK = "alignment-marks-this-place"  # replaces a message's content to find its position in the rendered text


@dataclass(frozen=True)
class Encoded:
    """A row as token IDs, with what it has beside them: see :class:`Source`.

    The prompt is empty only if the row must be dropped because there is no context token. ``source`` is the row as
    text; None if it was already tokenized.
    """

    prompt: list[int]
    completions: list[list[int]]
    further: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None


class RowTokenizer:
    """Converts rows to prompt IDs and completion IDs with a transformers tokenizer.

    Standard text gets the tokenizer's leading special tokens and EOS exactly once. Conversations are rendered with the
    chat template, which has its own special tokens; EOS is added only if the template does not end the turn.

    Args:
        tokenizer: a transformers tokenizer, fast or slow, with or without pad, BOS and EOS tokens.
        whole: for reward models, which score the last token: use a rendered conversation unchanged up to its last
            token, and add no context to completions without a prompt.
    """

    def __init__(self, tokenizer: Any, whole: bool = False) -> None:
        self.tokenizer, self.whole = tokenizer, whole
        self.name = str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id
        self.leading: list[int] = []  # the special tokens (usually BOS, often none) that it adds before a text
        for probe in ("a", "1", "the"):
            ids, body = (list(tokenizer(probe, add_special_tokens=both)["input_ids"]) for both in (True, False))
            starts = [start for start in range(len(ids)) if body and ids[start : start + len(body)] == body]
            if starts:
                self.leading = ids[: starts[0]]
                break
        self._added = {i: (token.content, token.special) for i, token in tokenizer.added_tokens_decoder.items()}
        self._special = {i for i, (_, special) in self._added.items() if special} | set(tokenizer.all_special_ids)
        self._special.discard(getattr(tokenizer, "unk_token_id", None))  # represents text and does not end a turn
        self._known = self._special | self._added.keys()
        self._roles, self._distinguishes = set(ROLES), False
        if self.eos is None:
            logger.warning(
                "tokenizer %s has no EOS token, so completions do not end with one; set tokenizer.eos_token", self.name
            )

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        """Return the token IDs of every source, with a single call of the tokenizer.

        Raises:
            DataError: a row cannot be rendered with the chat template.
        """
        texts = [
            [source.prompt, *(source.prompt + str(completion) for completion in source.completions)]
            if isinstance(source.prompt, str)
            else self._rendered(source.prompt, source)
            for source in sources
        ]
        ids, rows = iter(self.ids([text for group in texts for text in group])), []
        for source, group in zip(sources, texts):
            prompt, *fulls = islice(ids, len(group))
            if isinstance(source.prompt, str):
                prompt, fulls = self._standard(prompt, False), [self._standard(full, True) for full in fulls]
            elif not self.whole:
                fulls = [self._end_turn(full, text) for full, text in zip(fulls, source.completions, strict=True)]
            border = len(commonprefix([prompt, *fulls]))
            row = Encoded(prompt[:border], [full[border:] for full in fulls], source.further, source)
            rows.append(self.with_context(row))
        return rows

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token IDs of rendered texts, without adding special tokens."""
        if not texts:
            return []
        batch = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in batch["input_ids"]]

    def _standard(self, ids: list[int], end: bool) -> list[int]:
        """Ensure exactly one set of leading special tokens, and one EOS at the end, also if the text has them."""
        if self.leading:
            while ids[: len(self.leading)] == self.leading:
                ids = ids[len(self.leading) :]
            while ids and ids[0] == self.bos and self.bos in self.leading:
                ids = ids[1:]
            ids = self.leading + ids
        if not end or self.eos is None:
            return ids
        while len(ids) > 1 and ids[-1] == ids[-2] == self.eos:
            ids = ids[:-1]
        return ids if ids and ids[-1] == self.eos else [*ids, self.eos]

    def _end_turn(self, ids: list[int], completion: Text) -> list[int]:
        """Ensure that the IDs end with the template's end-of-turn token, or with EOS if the template has none.

        What the template writes after an end-of-turn token is removed, because generation stops before it.
        """
        closing = self._closing
        if closing and ids[-len(closing) :] == closing:
            return ids[: len(ids) - len(closing) + 1]
        end = len(ids)
        while end and ids[end - 1] not in self._known and not self.tokenizer.decode([ids[end - 1]]).strip():
            end -= 1
        if end and self._ends_turn(ids[end - 1], completion):
            return ids[:end]
        return ids if self.eos is None else [*ids, self.eos]

    @property
    def end_of_turn(self) -> int | None:
        """The token that ends a completion of a conversation, which need not be EOS; None if it is not known."""
        return self._closing[0] if self._closing else None

    @cached_property
    def _closing(self) -> list[int]:
        """The IDs from the end-of-turn token to the end of a conversation; empty if the template does not tell.

        The token is the last one that also ends a turn before another one, unlike the EOS token with which some
        templates (Phi-3's) end a conversation.
        """
        asked: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            texts = [
                self.tokenizer.apply_chat_template(messages, tokenize=False).partition(_MARK)[2]
                for messages in (asked, [*asked, asked[0]])
            ]
        except Exception:  # a template is user code and may raise anything
            return []
        last, inner = self.ids(texts)
        shared = commonprefix([last, inner])
        ends = [place for place, token in enumerate(shared) if self._ends_turn(token, [{"content": ""}])]
        return last[ends[-1] :] if ends else []

    def _ends_turn(self, token: int, completion: Text) -> bool:
        if token == self.eos or token in self._special:
            return True
        content = "" if token == self.tokenizer.unk_token_id else self._added.get(token, ("", False))[0]
        # An added token that is not special (</tool_call>) ends the turn unless the message itself ends with it.
        said = str(completion[-1]["content"] or "")  # type: ignore[index]
        return bool(content) and not said.rstrip().endswith(content)

    def with_context(self, row: Encoded) -> Encoded:
        """Give a row with an empty prompt a context, as its first token cannot be predicted.

        It is the common first token of the completions, which then has no log-prob, or else BOS or EOS.
        """
        if row.prompt or self.whole or not all(row.completions):
            return row
        if len({completion[0] for completion in row.completions}) == 1:
            first, rest = row.completions[0][:1], [completion[1:] for completion in row.completions]
            return replace(row, prompt=first, completions=rest)
        context = self.bos if self.bos is not None else self.eos
        return row if context is None else replace(row, prompt=[context])

    def _rendered(self, prompt: list[Any], source: Source) -> list[str]:
        """Return the rendered prompt, followed by the rendered prompt + completion of every completion."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{source.place}: the row is conversational, but tokenizer {self.name} has no chat template; "
                "set tokenizer.chat_template, use an instruct model, or use strings without apply_chat_template"
            )
        for messages in (prompt, *source.completions):
            self._check_roles(messages, source.place)
        self._check_template([*prompt, *(source.completions[0] if source.completions else ())], source)
        fulls = [self.render(prompt + list(completion), source) for completion in source.completions]
        if not prompt:
            return [self.opening(source), *fulls]
        if prompt[-1]["role"] != "assistant":
            return [self.render(prompt, source, add_generation_prompt=True), *fulls]
        unfinished = prompt[-1]["content"] is not None  # after a tool call, the completion starts with another turn
        return [self.render(prompt, source, **({"continue_final_message": True} if unfinished else {})), *fulls]

    def _check_roles(self, messages: Sequence[Any], place: str) -> None:
        """Check that the roles are common ones, or that the chat template mentions them."""
        for role in {message["role"] for message in messages} - self._roles:
            template = str(self.tokenizer.chat_template)
            if f"'{role}'" not in template and f'"{role}"' not in template:
                raise DataError(
                    f"{place}: role is {show(role)}; expected one of {listing(ROLES)}, or a role that the chat "
                    f"template of tokenizer {self.name} mentions{did_you_mean(role, ROLES)}"
                )
            self._roles.add(role)

    def _check_template(self, messages: list[Any], source: Source) -> None:
        """Check once that the chat template renders other contents differently."""
        if self._distinguishes:
            return
        others = [message if message["content"] is None else {**message, "content": _MARK} for message in messages]
        if others == messages:
            return
        try:
            alike = self.render(messages, source) == self.render(others, source)
        except DataError:  # a template that refuses some contents does not ignore them
            return
        if alike:
            raise DataError(
                f"{source.place}: the chat template of tokenizer {self.name} ignores the contents of messages, so it "
                "renders every row alike; set another chat template"
            )
        self._distinguishes = True

    def opening(self, source: Source) -> str:
        """Return the text before the first message's content: the default system turn and the turn's header."""
        messages: list[Any] = list(source.completions[0]) if source.completions else [{"role": "assistant"}]
        text = self.render([{**messages[0], "content": _MARK}, *messages[1:]], source)
        return text.partition(_MARK)[0] if _MARK in text else ""

    def render(self, messages: list[Message], source: Source, **options: bool) -> str:
        """Render messages. Null content is omitted, or replaced with an empty string if the template requires it."""
        forms = [messages]
        if any(message["content"] is None for message in messages):
            without = [{key: value for key, value in message.items() if value is not None} for message in messages]
            forms = [without, [{**message, "content": message["content"] or ""} for message in messages]]
        for form in forms:
            try:
                return str(self.tokenizer.apply_chat_template(form, tokenize=False, **{**source.template, **options}))
            except Exception as error:  # a template is user code and may raise anything
                failure = error
        raise DataError(
            f"{source.place}: the chat template of tokenizer {self.name} failed: {one_line(failure)}; "
            "fix the roles and contents of the row, or the template"
        ) from failure


@dataclass(frozen=True)
class Limits:
    """Lengths of at least 1 token, None for no limit. ``truncation_mode`` selects the end of a long prompt to keep.

    Without ``max_prompt_length``, ``shorten_prompts`` cuts the prompt of a row that is longer than ``max_length``: to
    512 tokens, or to half of ``max_length`` if that is 512 or less.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_end"
    shorten_prompts: bool = False


class Fitted(NamedTuple):
    """A prompt and its completions, truncated to the limits.

    ``reasons[i]`` is None, or the reason why completion i cannot be used (it is then empty); ``cut[i]`` tells whether
    it was truncated.
    """

    prompt: list[int]
    prompt_cut: bool
    completions: list[list[int]]
    cut: list[bool]
    reasons: list[str | None]


def fit(prompt: list[int], completions: Sequence[list[int]], limits: Limits, head: int, alone: bool = False) -> Fitted:
    """Truncate a prompt, and then each completion at its end, to the limits.

    ``head`` is the number of leading prompt tokens (BOS) that ``keep_end`` preserves. ``alone`` says whether
    completions are allowed without a prompt.
    """
    limited = [completion[: limits.max_completion_length] for completion in completions]
    longest, most, whole = max(map(len, limited), default=0), limits.max_prompt_length, limits.max_length
    if most is None and limits.shorten_prompts and whole is not None and len(prompt) + longest > whole:
        most = PROMPT_LENGTH if whole > PROMPT_LENGTH else whole // 2
    kept = prompt
    if most is not None and len(prompt) > most:
        if limits.truncation_mode == "keep_start" or most <= head:
            kept = prompt[:most]
        else:
            kept = prompt[:head] + prompt[len(prompt) - (most - head) :]
    room = longest if whole is None else whole - len(kept)
    reasons = [
        EMPTY if not completion else NO_CONTEXT if not (kept or alone) else NO_ROOM if room < 1 else None
        for completion in limited
    ]
    fitted = [[] if reason else completion[:room] for completion, reason in zip(limited, reasons)]
    cut = [not reason and len(new) < len(old) for new, old, reason in zip(fitted, completions, reasons, strict=True)]
    return Fitted(kept, len(kept) < len(prompt), fitted, cut, reasons)
