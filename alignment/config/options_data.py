"""The options that say which rows are read, and how they are cut to length."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from alignment.config.fields import option

TRUNCATION_MODES = ("keep_end", "keep_start")


@dataclass(kw_only=True)
class DataOptions:
    """Rows and how they are dealt out."""

    TITLE: ClassVar[str] = "Data"

    dataset_name: str | None = option(None, "File, folder or hub name of the data (the command line needs it).")
    dataset_config: str | None = option(None, "Configuration name of a hub dataset.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str | None = option(None, "Split to evaluate on; unset: none.")
    dataset_mixture: list[Any] | dict[str, Any] | None = option(
        None,
        "Several datasets in place of `dataset_name`: a mapping from name to weight, or a list of mappings with "
        "`dataset_name` and, if need be, `dataset_config`, `split`, `test_split`, `weight`, `column_map`. Weights are "
        "shares of the mixture's rows: as many rows as possible are drawn in these shares by the seed of the order, "
        "none of them twice. Without weights: every row.",
    )
    column_map: dict[str, str] | None = option(
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

    max_length: int
    truncation_mode: Any

    @property
    def max_prompt_length(self) -> int | None: ...

    @property
    def max_completion_length(self) -> int | None: ...


@dataclass(kw_only=True)
class SequenceOptions:
    """Lengths in tokens; the same for every method that trains on given completions."""

    TITLE: ClassVar[str] = "Lengths"

    max_length: int = option(1024, "Longest prompt and completion together, in tokens.")
    max_prompt_length: int | None = option(512, "Longest prompt, in tokens; `null`: only `max_length` counts.")
    max_completion_length: int | None = option(None, "Longest completion, in tokens; unset: only `max_length` counts.")
    truncation_mode: str = option(
        "keep_end", "Which part of a prompt that is too long is kept.", choices=TRUNCATION_MODES
    )
    generate_during_eval: bool = option(False, "Log a table of prompts with answers of policy and reference.")
