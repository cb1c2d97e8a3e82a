"""Options for datasets, columns, the order of rows, and truncation."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from alignment.config.errors import OptionError, did_you_mean, listing, refuse, setting
from alignment.config.fields import (
    Count,
    Free,
    Late,
    ListOrKeywords,
    Natural,
    Positive,
    Shared,
    TextKeywords,
    keywords,
    option,
    validated,
)

Truncation: TypeAlias = Literal["keep_end", "keep_start"]
COLUMNS = (
    "prompt", "completion", "label", "chosen", "rejected", "margin", "tools", "chat_template_kwargs", "messages",
    "text",
)  # fmt: skip
MAPPED_COLUMNS = ("query", "system")  # read only if in `column_map`, as many datasets have unrelated such columns
_EXPECTED = (*COLUMNS, *MAPPED_COLUMNS)
_ELSEWHERE = {
    "response": "completion", "output": "completion", "instruction": "prompt", "input": "query",
    "conversations": "messages", "conversation": "messages", "kto_tag": "label",
}  # fmt: skip


@dataclass(kw_only=True)
class DataOptions:
    """Data."""

    dataset_name: Free[Shared[str | None]] = option(
        None, "Dataset: a file, a folder or a Hub name. Required on the command line."
    )
    dataset_config: Free[Shared[str | None]] = option(None, "Configuration name of a Hub dataset.")
    dataset_train_split: Free[Shared[str]] = option("train", "Split to train on.")
    dataset_test_split: Free[Shared[str | None]] = option(
        None, "Split to evaluate on. If unset, only parts of a mixture with a `test_split` are evaluated on."
    )
    dataset_mixture: Free[ListOrKeywords] = option(
        None,
        "Several datasets instead of `dataset_name`: a mapping from name to weight, or a list of mappings with "
        "`dataset_name` and optionally `dataset_config`, `split`, `test_split`, `weight` and `column_map`. As many "
        "rows as possible are sampled in the proportions of the weights, without repetition. Without weights, all "
        "rows are used.",
    )
    column_map: Free[TextKeywords] = option(
        None,
        "Mapping from the column names that a method expects to names in the data, such as `{prompt: question}`. "
        "A mapped column replaces one that has the expected name. `query` (appended to the prompt) and `system` (a "
        "system message) are read only if they are mapped. Expected names: `prompt`, `completion`, `label`, `chosen`, "
        "`rejected`, `margin`, `messages`, `text`, `tools` and `chat_template_kwargs`.",
    )
    max_train_samples: Free[Count | None] = option(
        None, "Maximum number of training rows to use, from the start. Keeps the proportions of a mixture."
    )
    max_eval_samples: Free[Count | None] = option(None, "Maximum number of evaluation rows to use, from the start.")
    dataset_num_proc: Free[Count | None] = option(None, "Number of processes for tokenization. Affects speed only.")
    dataloader_num_workers: Late[Free[Natural]] = option(0, "Number of processes that collate batches. 0: this one.")
    train_sampling_strategy: Literal["random", "sequential"] = option(
        "random", "Order of the training rows: `random` (reshuffled every epoch with `data_seed`) or `sequential`."
    )
    dataloader_drop_last: bool = option(False, "Drop the last window of an epoch if it is incomplete.")
    max_tokens_per_batch: Free[Count | None] = option(
        None,
        "Maximum number of tokens in a micro-batch, padding included, instead of `per_device_train_batch_size`. "
        "Passes without gradients may use up to twice as many tokens.",
    )
    stratify_labels: bool = option(
        False, "Give every window the dataset's share of desirable rows, to within a row. For methods with labels."
    )
    strict_data: Free[bool] = option(False, "Raise an error if a row has to be dropped.")
    dry_run: Free[bool] = option(False, "Print options, DeepSpeed JSON, counts of rows and the first ones, then exit.")


@dataclass(kw_only=True)
class SequenceOptions:
    """Lengths."""

    SHORTEN_PROMPTS: ClassVar[bool] = True  # whether the default of `max_prompt_length` cuts prompts of longer rows

    max_length: Annotated[int, Ge(2)] | None = option(
        1024,
        "Maximum length of prompt and completion together, in tokens. `null`: the positions that model and "
        "reference have.",
        older=("max_seq_length",),
    )
    max_prompt_length: Count | None = option(
        None,
        "Maximum length of the prompt, in tokens. If unset, only prompts of rows longer than `max_length` are cut, to "
        "512 tokens, or to half of `max_length` if that is 512 or less.",
    )
    max_completion_length: Count | None = option(None, "Maximum length of the completion, in tokens.")
    truncation_mode: Truncation = option("keep_end", "Part of a long prompt to keep: `keep_end` or `keep_start`.")
    generate_during_eval: Free[bool] = option(
        False, "At each evaluation, sample completions of policy and reference, and write them to `completions.jsonl`."
    )
    num_completions_to_log: Free[Count] = option(8, "Number of prompts to sample (`generate_during_eval`).")
    max_new_tokens: Free[Count] = option(256, "Maximum length of these completions, in tokens.")


@dataclass(kw_only=True)
class TokenizerOptions:
    """Tokenizer."""

    eos_token: str | None = option(None, "Token that ends texts and turns. Defaults to the tokenizer's.")
    pad_token: str | None = option(None, "Token to save as the padding token, for programs that load the model.")
    chat_template_path: str | None = option(
        None,
        "Chat template: a Jinja file, or a tokenizer's folder or Hub name, whose special tokens are used as well. "
        "Defaults to the model's.",
    )


def check_column_map(key: str, value: dict[str, str] | str | None) -> None:
    """Check a ``column_map``; ``key`` names the option in messages.

    Raises:
        OptionError: a name that no method expects (the mapping may be inverted), or a column that is mapped twice.
    """
    names: dict[str, str] = {}
    for name, column in keywords(value).items():
        text = setting(key, value)
        if name not in _EXPECTED:
            near = did_you_mean(name, _EXPECTED) or f"; expected one of {listing(_EXPECTED)}"
            near = f"; use {_ELSEWHERE[name]!r} instead" if name in _ELSEWHERE else near
            if column in _EXPECTED:
                near = f"; the mapping is from expected name to name in the data: {{{column}: {name}}}"
            raise OptionError(f"{text}: {name!r} is not an expected column name{near}")
        if column in names:
            raise OptionError(f"{text}: {column!r} is mapped to both {names[column]} and {name}; remove one of them")
        names[column] = name


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture. Unset values are taken from the options of the same name.

    ``weight`` is the part's share of the rows of the mixture, relative to the other weights; None for all its rows.
    """

    dataset_name: str
    dataset_config: str | None = None
    split: str | None = None
    test_split: str | None = None
    weight: Positive | None = None
    column_map: dict[str, str] | None = None


def mixture_parts(value: list[Any] | dict[str, Any] | str) -> list[MixturePart]:
    """Parse ``dataset_mixture``: a list of names or mappings, or a mapping from name to weight.

    Raises:
        OptionError: a part without a name, an unknown key, an invalid value, or weights for some parts only.
    """
    if isinstance(value, dict):
        value = [{"dataset_name": name, "weight": weight} for name, weight in value.items()]
    parts = [_mixture_part(f"dataset_mixture[{number}]", item) for number, item in enumerate(value)]
    if not parts:
        raise OptionError("dataset_mixture is empty; set at least one dataset")
    unweighted = [part.dataset_name for part in parts if part.weight is None]
    if unweighted and len(unweighted) < len(parts):
        raise OptionError(
            f"dataset_mixture: {unweighted[0]} has no weight, but others do; set one for every part or none"
        )
    return parts


def tested_parts(options: Any) -> list[tuple[MixturePart, str]]:
    """Return the parts of the mixture to evaluate on, each with its split: its own, or that of the options."""
    parts = mixture_parts(options.dataset_mixture) if options.dataset_mixture is not None else []
    splits = [(part, part.test_split or options.dataset_test_split) for part in parts]
    return [(part, split) for part, split in splits if split]


def check_mixture(options: Any) -> None:
    """Check ``dataset_mixture`` and ``column_map``, and reject options that they would override."""
    check_column_map("column_map", options.column_map)
    if options.dataset_mixture is None:
        return
    mixture_parts(options.dataset_mixture)
    for name in ("dataset_name", "dataset_config"):
        if getattr(options, name) is not None:
            refuse(options, name, "dataset_mixture is set as well; remove one, or add the dataset to the mixture")


def _mixture_part(where: str, item: Any) -> MixturePart:
    given = {"dataset_name": item} if isinstance(item, str) else item
    if not isinstance(given, dict):
        keys = ", ".join(field.name for field in dataclasses.fields(MixturePart))
        raise OptionError(f"{setting(where, item)}: expected a name, or a mapping with the keys {keys}")
    values = validated(MixturePart, {str(key): value for key, value in given.items()}, f"{where}.")
    if not values.get("dataset_name"):
        raise OptionError(f"{where}: dataset_name is missing; set it to a file, a folder or a Hub name")
    part = MixturePart(**values)
    check_column_map(f"{where}.column_map", part.column_map)
    return part
