"""The options of supervised fine-tuning, the usual start of an alignment."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import SFTCompatibility
from alignment.config.errors import OptionError, setting
from alignment.config.fields import Keywords, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, TokenizerOptions
from alignment.config.registry import Paper

SFT_LOSS_TYPES = ("nll", "chunked_nll", "dft")


@dataclass(kw_only=True)
class SFTConfig(TokenizerOptions, SequenceOptions, SFTCompatibility, AlignmentConfig):
    """Supervised fine-tuning: the likelihood of given answers, conversations or texts.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
    """

    TITLE: ClassVar[str] = "SFT"
    method: ClassVar[str] = "sft"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "dft": Paper(
            "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
            "https://arxiv.org/abs/2508.05629",
        ),
    }
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {**AlignmentConfig.TRL_DEFAULTS, "truncation_mode": "keep_start"}

    learning_rate: float = option(2e-5, "Peak learning rate.")
    max_prompt_length: int | None = option(None, "Longest prompt, in tokens; unset: only `max_length` counts.")
    loss_type: str | None = option(
        "nll",
        "Loss: `nll`, or `dft`, where each token's is weighted by its probability. `chunked_nll` is another name of "
        "`nll`, which never holds the logits of all tokens.",
        choices=SFT_LOSS_TYPES,
    )
    completion_only_loss: bool | None = option(
        None,
        "Learn the answers alone (of `messages` the last one), or with `false` prompts as well; unset: the answers of "
        "rows with prompt and completion, every token of `messages` and `text`.",
    )
    packing: bool = option(
        False,
        "Put several rows into one, a pack of at most `max_length` tokens, of which batches and epochs are then made.",
    )
    packing_strategy: str = option(
        "bfd",
        "With packing: `bfd` packs whole rows, cut to `max_length`, by best fit; `bfd_split` first cuts longer rows "
        "into several sequences (its older name: `bfd-requeue`). No sequence sees another one. `wrapped` cuts the "
        "tokens of all rows, one after another, at every `max_length`: a row sees those before it in its pack.",
        choices=("bfd", "bfd_split", "wrapped", "bfd-requeue"),
    )
    eval_packing: bool | None = option(None, "Pack the rows to evaluate on; unset: as `packing`.")
    shuffle_dataset: bool = option(
        False, "Shuffle rows by `seed` before they are packed. Without packing, `train_sampling_strategy` orders them."
    )
    assistant_only_loss: bool = option(
        False, "Learn what the assistant says in any of its turns, and nothing else of a conversation."
    )
    dataset_text_field: str = option("text", "The column of rows that are one text.")
    dataset_kwargs: Keywords = option(
        None, "`skip_prepare_dataset: true` says that rows are token ids already; `add_special_tokens: true` is usual."
    )

    def resolve(self) -> None:
        """Check the lengths; there is no reference model."""
        self.loss_type = self.loss_type or "nll"  # TRL 1.6 has none as its default
        checks.check_lengths(self, rows_per_unit=1)
        self._check_packing()
        checks.refuse_reference(self, "SFT")
        for key, value in (self.dataset_kwargs or {}).items():
            if key == "add_special_tokens" and value is not True:
                raise OptionError(
                    f"{setting('dataset_kwargs', self.dataset_kwargs)}: texts begin with what the tokenizer puts "
                    "before them; pass a tokenizer that puts none, or leave add_special_tokens out"
                )
            if key not in ("add_special_tokens", "skip_prepare_dataset"):
                raise OptionError(
                    f"{setting('dataset_kwargs', self.dataset_kwargs)}: no such key {key!r}; set skip_prepare_dataset"
                )

    def _check_packing(self) -> None:
        if self.packing_strategy == "bfd-requeue":
            self.packing_strategy = "bfd_split"
        asked = "packing" if self.packing else "eval_packing"
        if not getattr(self, asked):
            return
        if self.max_length is None:
            raise OptionError(f"{setting(asked, True)}: max_length is the length of a pack; set it to a number")
        if (self.dataset_kwargs or {}).get("skip_prepare_dataset"):
            raise OptionError(
                f"{setting(asked, True)}: dataset_kwargs has skip_prepare_dataset, which takes rows as they are; "
                "leave one of them out"
            )
