"""Options for datasets, columns, the order of rows, and truncation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from alignment.config.errors import DataError, OptionError, did_you_mean, listing, setting
from alignment.config.fields import (
    Choice,
    Count,
    Early,
    Free,
    Late,
    ListOrKeywords,
    Meanings,
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
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # of data files
_EXPECTED = (*COLUMNS, *MAPPED_COLUMNS)


@dataclass(kw_only=True)
class DataOptions:
    """Data."""

    dataset_name: Free[Shared[str | None]] = option(None, "Dataset: file, folder or Hub name. Required by commands.")
    dataset_config: Free[Shared[str | None]] = option(None, "Configuration name of a Hub dataset.")
    dataset_train_split: Free[Shared[str]] = option("train", "Split to train on.")
    dataset_test_split: Free[Shared[str | None]] = option(None, "Split to evaluate on; see `dataset_mixture`.")
    dataset_mixture: Free[ListOrKeywords] = option(
        None,
        "Several datasets: a mapping from name to weight, or a list of mappings with `dataset_name`, "
        "`dataset_config`, `split`, `test_split`, `weight`, `column_map` and `label_map`. As many rows as possible "
        "are sampled in the proportions of the weights, without repetition. Without weights, all rows are used.",
    )
    column_map: Free[TextKeywords] = option(
        None,
        "Mapping from the columns that a method expects to those of the data, such as `{prompt: question}` or "
        "`prompt=question`. `query` (appended to the prompt) and `system` are read only if they are mapped.",
    )
    label_map: Free[Meanings] = option(
        None,
        "Mapping from the labels of the data to true and false, such as `{up: true, down: false}` or "
        "`up=true,down=false`. Case is ignored.",
    )
    apply_chat_template: Free[bool] = option(
        False,
        "Render rows of strings with the chat template: the prompt as one user turn, the completion as one assistant "
        "turn. If false, strings are tokenized as they are.",
    )
    max_train_samples: Free[Count | None] = option(None, "Maximum number of training rows to use, from the start.")
    max_eval_samples: Free[Count | None] = option(None, "Maximum number of evaluation rows to use, from the start.")
    dataset_num_proc: Free[Count | None] = option(None, "Number of processes for tokenization. Affects speed only.")
    dataloader_num_workers: Late[Free[Natural]] = option(0, "Number of processes that collate batches. 0: this one.")
    train_sampling_strategy: Literal["random", "sequential"] = option(
        "random", "Order of the training rows: `random` (reshuffled every epoch with `data_seed`) or `sequential`."
    )
    dataloader_drop_last: bool = option(False, "Drop the last window of an epoch if it is incomplete.")
    max_tokens_per_batch: Free[Count | None] = option(
        None, "Maximum number of tokens in a micro-batch, instead of rows; twice as many without gradients."
    )
    pack: Early[Free[Choice]] = option(
        "auto",
        "Compute the sequences of a micro-batch as one row without padding, and the prompt of a pair once: `true`, "
        "`false`, or `auto`, if the model computes the same scores.",
    )
    padding_free: Free[bool] = option(False, "Alias of `pack: true`.")
    stratify_labels: bool = option(False, "Give every window the dataset's share of desirable rows, to within a row.")
    strict_data: Free[bool] = option(False, "Raise an error if a row has to be dropped.")
    dry_run: Free[bool] = option(False, "Print options, DeepSpeed JSON, counts of rows and the first ones, then exit.")


@dataclass(kw_only=True)
class SequenceOptions:
    """Lengths."""

    SHORTEN_PROMPTS: ClassVar[bool] = True  # whether the default of `max_prompt_length` cuts prompts of longer rows

    max_length: Annotated[int, Ge(2)] | None = option(
        1024, "Maximum length of prompt and completion. `null`: as the models support.", older=("max_seq_length",)
    )
    max_prompt_length: Count | None = option(
        None, "Maximum length of the prompt. If unset, only rows longer than `max_length` are cut."
    )
    max_completion_length: Count | None = option(None, "Maximum length of the completion, in tokens.")
    truncation_mode: Truncation = option("keep_end", "Part of a long prompt to keep: `keep_end` or `keep_start`.")
    generate_during_eval: Free[bool] = option(False, "At each evaluation, sample completions to `completions.jsonl`.")
    num_completions_to_log: Free[Count] = option(8, "Number of prompts to sample (`generate_during_eval`).")
    max_new_tokens: Free[Count] = option(256, "Maximum length of these completions, in tokens.")


@dataclass(kw_only=True)
class TokenizerOptions:
    """Tokenizer."""

    eos_token: str | None = option(None, "Token that ends texts and turns. Defaults to the tokenizer's.")
    pad_token: str | None = option(None, "Token to save as the padding token, for programs that load the model.")
    chat_template_path: str | None = option(None, "Jinja file, or tokenizer, whose special tokens are used as well.")


def check_column_map(key: str, value: dict[str, str] | str | None) -> None:
    """Check a ``column_map``; ``key`` names the option in messages.

    Raises:
        OptionError: a name that no method expects, or a column that is mapped twice.
    """
    names: dict[str, str] = {}
    for name, column in keywords(value).items():
        if name not in _EXPECTED:
            near = did_you_mean(name, _EXPECTED) or f"; expected one of {listing(_EXPECTED)}"
            raise OptionError(f"{setting(key, value)}: {name!r} is not an expected column name{near}")
        if column in names:
            both = f"{names[column]} and {name}"
            raise OptionError(f"{setting(key, value)}: {column!r} is mapped to both {both}; remove one of them")
        names[column] = name


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture. Unset values are taken from the options of the same name."""

    dataset_name: str
    dataset_config: str | None = None
    split: str | None = None
    test_split: str | None = None
    weight: Positive | None = None  # share of the rows of the mixture, relative to other weights; None: all its rows
    column_map: TextKeywords = None
    label_map: Meanings = None


def mixture_parts(value: list[Any] | dict[str, Any] | str) -> list[MixturePart]:
    """Parse ``dataset_mixture``: a list of names or mappings, or a mapping from name to weight.

    Raises:
        OptionError: a part without a name, an unknown key, an invalid value, or weights for some parts only.
    """
    if isinstance(value, dict):
        value = [{"dataset_name": name, "weight": weight} for name, weight in value.items()]
    parts: list[MixturePart] = []
    for number, item in enumerate(value):
        where = f"dataset_mixture[{number}]"
        given = item if isinstance(item, dict) else {"dataset_name": item}
        part = MixturePart(**{"dataset_name": "", **validated(MixturePart, given, f"{where}.")})
        if not part.dataset_name:
            raise OptionError(f"{where}: dataset_name is missing; set it to a file, a folder or a Hub name")
        check_column_map(f"{where}.column_map", part.column_map)
        parts.append(part)
    if len({part.weight is None for part in parts}) != 1:
        raise OptionError("dataset_mixture: set at least one dataset, and a weight for every part or for none")
    return parts


def check_exists(name: str) -> None:
    """Raise :class:`DataError` if a dataset's name is that of a file or folder that does not exist."""
    path = Path(name).expanduser()
    if not (path.is_dir() or path.is_file()) and (name.startswith((".", "/", "~")) or path.suffix.lower() in SUFFIXES):
        raise DataError(f"{name}: file or folder does not exist; set dataset_name to an existing one")


def tested_parts(options: Any) -> list[tuple[MixturePart, str]]:
    """Return the parts of the mixture to evaluate on, each with its split: its own, or that of the options."""
    parts = mixture_parts(options.dataset_mixture) if options.dataset_mixture is not None else []
    splits = [(part, part.test_split or options.dataset_test_split) for part in parts]
    return [(part, split) for part, split in splits if split]
