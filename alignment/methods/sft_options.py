"""The options of supervised fine-tuning."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from alignment.compat.trl.table import SFTCompatibility
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import Count, Early, Free, Keywords, LossName, NotNegative, keywords, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, TokenizerOptions
from alignment.config.registry import Paper
from alignment.methods.losses import papers
from alignment.objectives import likelihood
from alignment.objectives.table import Loss


@dataclass(kw_only=True)
class SFTConfig(TokenizerOptions, SequenceOptions, SFTCompatibility, AlignmentConfig):
    """Options of supervised fine-tuning on completions, conversations or texts.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "SFT"
    method: ClassVar[str] = "sft"
    LOSSES: ClassVar[Mapping[str, Loss]] = likelihood.LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(LOSSES)
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {**AlignmentConfig.TRL_DEFAULTS, "truncation_mode": "keep_start"}
    SHORTEN_PROMPTS: ClassVar[bool] = False

    learning_rate: Early[NotNegative] = option(2e-5, "Peak learning rate.")
    max_prompt_length: Count | None = option(
        None, "Maximum length of the prompt, in tokens. If unset, only `max_length` applies."
    )
    loss_type: LossName | None = option(
        "nll",
        "Loss: `nll`, or `dft`, which weights the loss of each token by its probability. `chunked_nll` is an alias of "
        "`nll`, which never stores the logits of all tokens.",
    )
    completion_only_loss: bool | None = option(
        None,
        "Whether to train on completions only (for `messages`, on the last message) or also on prompts. By default, "
        "rows with prompt and completion train on the completion only, and `messages` and `text` on all tokens.",
    )
    packing: Free[bool] = option(
        False,
        "Pack several rows into sequences of at most `max_length` tokens. Batch sizes and epochs then count packs.",
    )
    packing_strategy: Free[Literal["bfd", "bfd_split", "wrapped", "bfd-requeue"]] = option(
        "bfd",
        "Packing strategy: `bfd` packs rows, truncated to `max_length`, with best-fit decreasing; `bfd_split` (alias "
        "`bfd-requeue`) first splits longer rows into several sequences. With both, rows do not attend to each other. "
        "`wrapped` concatenates the tokens of all rows and splits them every `max_length` tokens; rows attend to "
        "those before them in the pack.",
    )
    eval_packing: Free[bool | None] = option(None, "Whether to pack evaluation rows. Defaults to `packing`.")
    shuffle_dataset: Free[bool] = option(
        False,
        "Shuffle the rows with `seed` before packing. Without packing, `train_sampling_strategy` sets the order.",
    )
    assistant_only_loss: bool = option(
        False, "Train only on the assistant's messages, in all turns of a conversation."
    )
    dataset_text_field: str = option("text", "Column of rows that consist of a single text.")
    dataset_kwargs: Keywords = option(
        None,
        "`skip_prepare_dataset: true` if the rows are already tokenized. `add_special_tokens: true` is accepted, as "
        "it is the default.",
    )

    def resolve(self) -> None:
        """Replace the aliases of a loss and of a packing strategy."""
        self.loss_type = self.loss_type or "nll"  # the default of TRL 1.6 is None
        if self.packing_strategy == "bfd-requeue":
            self.packing_strategy = "bfd_split"

    def check(self) -> None:
        """Check the options of SFT."""
        checks.check_lengths(self, rows_per_unit=1)
        checks.refuse_reference(self, "SFT")
        asked = "packing" if self.packing else "eval_packing"
        if getattr(self, asked) and self.max_length is None:
            refuse(self, asked, "requires max_length, the length of a pack; set it to a number")
        if getattr(self, asked) and keywords(self.dataset_kwargs).get("skip_prepare_dataset"):
            refuse(self, f"{asked} dataset_kwargs", "tokenized rows cannot be packed; remove one of them")
        for key, value in keywords(self.dataset_kwargs).items():
            if key == "add_special_tokens" and value is not True:
                refuse(
                    self, "dataset_kwargs",
                    "special tokens are always added; remove add_special_tokens, or pass a tokenizer that adds none",
                )  # fmt: skip
            if key not in ("add_special_tokens", "skip_prepare_dataset"):
                refuse(self, "dataset_kwargs", f"unknown key {key!r}; the only supported key is skip_prepare_dataset")
