"""The options that say which rows are read, from which columns and datasets, and how they are cut to length."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import ListOrKeywords, Shared, TextKeywords, convert, hints, option, sharing

TRUNCATION_MODES = ("keep_end", "keep_start")
COLUMNS = (
    "prompt", "completion", "label", "chosen", "rejected", "margin", "tools", "chat_template_kwargs", "messages",
    "text",
)  # fmt: skip
PROMPT_LENGTH = 512
MAPPED_COLUMNS = ("query", "system")  # taken only where `column_map` names them: many datasets have such columns
_ELSEWHERE = {
    "response": "completion",
    "output": "completion",
    "instruction": "prompt",
    "input": "query",
    "conversations": "messages",
    "conversation": "messages",
    "kto_tag": "label",
}


@sharing
@dataclass(kw_only=True)
class DataOptions:
    """Rows and how they are dealt out."""

    TITLE: ClassVar[str] = "Data"

    dataset_name: Shared[str | None] = option(
        None, "File, folder or hub name of the data (the command line needs it)."
    )
    dataset_config: Shared[str | None] = option(None, "Configuration name of a hub dataset.")
    dataset_train_split: Shared[str] = option("train", "Split to train on.")
    dataset_test_split: Shared[str | None] = option(None, "Split to evaluate on; unset: none.")
    dataset_mixture: ListOrKeywords = option(
        None,
        "Several datasets in place of `dataset_name`: a mapping from name to weight, or a list of mappings with "
        "`dataset_name` and, if need be, `dataset_config`, `split`, `test_split`, `weight`, `column_map`. Weights are "
        "shares of the mixture's rows: as many rows as possible are drawn in these shares by the seed of the order, "
        "none of them twice. Without weights: every row.",
    )
    column_map: TextKeywords = option(
        None,
        "Expected name: name in the data, as in `{prompt: instruction, query: input, completion: output, label: "
        "kto_tag}`; a column that is named takes the place of one that has the expected name already. Expected are "
        "`prompt`, `completion`, `label`, `chosen`, `rejected`, `messages` (a conversation that ends with the "
        "answer), `text`, `tools`, `chat_template_kwargs`; and, only by this map, `query` (a text to put below the "
        "prompt) and `system` (a system turn to put before the prompt's messages).",
    )
    max_train_samples: int | None = option(
        None, "Use only the first so many training rows; of a mixture, so many in the shares of its parts."
    )
    max_eval_samples: int | None = option(None, "Use only the first so many evaluation rows.")
    dataset_num_proc: int | None = option(None, "Processes that tokenise; changes the speed, not the result.")
    dataloader_num_workers: int = option(0, "Worker processes that collate batches; 0: the training process does.")
    train_sampling_strategy: str = option(
        "random",
        "Order of the rows in an epoch: `random`, another one in each by the seed, or `sequential`, as they are read.",
        choices=("random", "sequential"),
    )
    dataloader_drop_last: bool = option(False, "Drop the last window of an epoch when it is not full.")
    max_tokens_per_batch: int | None = option(
        None,
        "Cut windows into micro-batches of at most so many padded tokens; unset: by the batch size. Passes without "
        "gradients may hold twice as many.",
    )
    stratify_labels: bool = option(
        False, "Rows with labels: give each window the data's share of desirable ones, to one row."
    )
    strict_data: bool = option(False, "Make it an error when a row has to be dropped.")
    dry_run: bool = option(
        False, "Print the resolved options, DeepSpeed JSON, rows kept and dropped, lengths and first rows, then stop."
    )


@runtime_checkable
class HasLengths(Protocol):
    """The lengths in tokens that rows are cut to, whether options of their own or made of others."""

    truncation_mode: Any

    @property
    def max_length(self) -> int | None: ...

    @property
    def max_prompt_length(self) -> int | None: ...

    @property
    def max_completion_length(self) -> int | None: ...


@dataclass(kw_only=True)
class SequenceOptions:
    """Lengths in tokens; the same for every method that trains on given completions."""

    TITLE: ClassVar[str] = "Lengths"

    max_length: int | None = option(
        1024,
        "Longest prompt and completion together, in tokens; `null`: the model's limit.",
        older=("max_seq_length",),
    )
    max_prompt_length: int | None = option(
        PROMPT_LENGTH,
        "Longest prompt, in tokens; `null`: only `max_length` counts. With a `max_length` of 512 or less, half of it "
        "takes the place of 512.",
    )
    max_completion_length: int | None = option(None, "Longest completion, in tokens; unset: only `max_length` counts.")
    truncation_mode: str = option(
        "keep_end", "Which part of a prompt that is too long is kept.", choices=TRUNCATION_MODES
    )
    generate_during_eval: bool = option(
        False,
        "At each evaluation, sample answers of policy and reference to the first different prompts of each set: a "
        "table in `completions.jsonl`, on the terminal, and in the reporting integrations.",
    )
    num_completions_to_log: int = option(8, "Prompts of one such table.")
    max_new_tokens: int = option(256, "Longest of these answers, in tokens.")


@dataclass(kw_only=True)
class TokenizerOptions:
    """Changes of the tokenizer that a model is trained with, and saved with."""

    TITLE: ClassVar[str] = "Tokenizer"

    eos_token: str | None = option(None, "A token of the tokenizer that ends texts and turns; unset: the tokenizer's.")
    pad_token: str | None = option(None, "A token of the tokenizer that pads where others read the saved model.")
    chat_template_path: str | None = option(
        None,
        "A Jinja file, or a folder or hub name whose tokenizer has the chat template to use, with its end token and "
        "the tokens that the model lacks; unset: the model's.",
    )


def check_column_map(key: str, value: dict[str, str] | None) -> None:
    """Check a ``column_map``; ``key`` names the option in messages.

    Raises:
        OptionError: a name that no method expects (the map may be the wrong way round), or a column taken twice.
    """
    names: dict[str, str] = {}
    for name, column in (value or {}).items():
        if name not in (*COLUMNS, *MAPPED_COLUMNS):
            raise OptionError(
                f"{setting(key, value)}: {name!r} is no column that is expected{_column_hint(name, column)}"
            )
        if column in names:
            raise OptionError(f"{setting(key, value)}: {column!r} is given for {names[column]} and {name}; keep one")
        names[column] = name


def _column_hint(name: str, column: Any) -> str:
    known = (*COLUMNS, *MAPPED_COLUMNS)
    if column in known:
        return f"; write expected name: name in the data, as in {{{column}: {name}}}"
    if name in _ELSEWHERE:
        return f"; it is called {_ELSEWHERE[name]} here"
    return did_you_mean(name, known) or f"; set names among {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture; what is unset is taken from the options of the same name.

    ``weight`` is the part's share of the mixture's rows, relative to the other weights; None for all of its rows.
    """

    dataset_name: str
    dataset_config: str | None = None
    split: str | None = None
    test_split: str | None = None
    weight: float | None = None
    column_map: dict[str, str] | None = None


_MIXTURE_KEYS = tuple(field.name for field in dataclasses.fields(MixturePart))


def mixture_parts(value: list[Any] | dict[str, Any]) -> list[MixturePart]:
    """The parts of ``dataset_mixture``: a list of names or mappings, or a mapping from name to weight.

    Raises:
        OptionError: a part without a name, an unknown key, a wrong value, or weights for some parts only.
    """
    if isinstance(value, dict):
        value = [{"dataset_name": name, "weight": weight} for name, weight in value.items()]
    parts = [_mixture_part(f"dataset_mixture[{number}]", item) for number, item in enumerate(value)]
    if not parts:
        raise OptionError("dataset_mixture: it is empty; name at least one dataset")
    unweighted = [part.dataset_name for part in parts if part.weight is None]
    if unweighted and len(unweighted) < len(parts):
        raise OptionError(
            f"dataset_mixture: {unweighted[0]} has no weight, but others have one; give every part a weight, or none"
        )
    return parts


def tested_parts(options: Any) -> list[tuple[MixturePart, str]]:
    """The parts of the mixture to evaluate on, each with its split: its own, or that of the options."""
    parts = mixture_parts(options.dataset_mixture) if options.dataset_mixture is not None else []
    splits = [(part, part.test_split or options.dataset_test_split) for part in parts]
    return [(part, split) for part, split in splits if split]


def check_mixture(options: Any) -> None:
    """Check ``dataset_mixture`` and ``column_map``, and that nothing beside them would be ignored."""
    check_column_map("column_map", options.column_map)
    if options.dataset_mixture is None:
        return
    mixture_parts(options.dataset_mixture)
    for name in ("dataset_name", "dataset_config"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: dataset_mixture is set as well; "
                f"leave one out, or make it a part: {{dataset_name: …}}"
            )


def _mixture_part(where: str, item: Any) -> MixturePart:
    given = {"dataset_name": item} if isinstance(item, str) else item
    if not isinstance(given, dict):
        raise OptionError(
            f"{setting(where, item)}: give a name, or a mapping with keys among {', '.join(_MIXTURE_KEYS)}"
        )
    for key in given:
        if key not in _MIXTURE_KEYS:
            raise OptionError(f"{where}.{setting(str(key), given[key])}: no such key{_key_hint(str(key))}")
    if not given.get("dataset_name"):
        raise OptionError(f"{where}: has no dataset_name; set it to a file, a folder or a hub name")
    declared = hints(MixturePart)
    values = {key: convert(f"{where}.{key}", value, declared[key]) for key, value in given.items()}
    part = MixturePart(**values)
    if part.weight is not None and not (part.weight > 0 and math.isfinite(part.weight)):
        raise OptionError(
            f"{where}.{setting('weight', part.weight)}: must be greater than 0; set a positive number, or leave the "
            "part out"
        )
    check_column_map(f"{where}.column_map", part.column_map)
    return part


def _key_hint(key: str) -> str:
    return did_you_mean(key, _MIXTURE_KEYS) or f"; set keys among {', '.join(_MIXTURE_KEYS)}"
