"""Target completions, for SFT: prompt and completion, conversations, or plain text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from datasets import Dataset, List, Value

from alignment.config.errors import DataError
from alignment.data import messages
from alignment.data.batching import Batch, collate
from alignment.data.kinds.base import Kind, Record
from alignment.data.messages import Row, Source
from alignment.data.packed_rows import PackedRows
from alignment.data.targets import TokenColumns, TokenFormat, assistant_mask, divided, learned_row
from alignment.data.tokenization import Encoded, Limits, RowTokenizer
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan


@dataclass(frozen=True)
class CompletionBatch(OnDevice):
    """Completions: ``completions`` has one sequence per entry of ``rows``, in which a pack may be repeated."""

    rows: tuple[int, ...]
    completions: Batch


@dataclass(frozen=True)
class Completions(Kind):
    """A target completion.

    Attributes:
        completion_only: whether the loss covers the completion only (True) or all tokens (False). None: the completion
            of rows with prompt and completion, all tokens of a conversation or a text.
        assistant_only: restrict the loss further, to the assistant's messages.
        text_field: name of the text column.
        tokenized: whether rows must already be tokenized.
    """

    name = "prompt_completion"
    completions = ("completion_ids",)
    further = {
        "scored": List(Value("bool")),  # mask of completion tokens in the loss; null for all
        "first": Value("bool"),  # whether labels include the first token, which is never in the loss
    }
    completion_only: bool | None = None
    assistant_only: bool = False
    text_field: str = "text"
    tokenized: bool = False

    @property
    def formats(self) -> tuple[tuple[str, ...], ...]:
        return (("prompt", "completion"), *((name,) for name in self._whole_rows))

    @property
    def _whole_rows(self) -> tuple[str, ...]:
        """The columns that each contain a complete row; ShareGPT's name of a conversation is ``conversations``."""
        return ("messages", self.text_field, "conversations")

    @property
    def tokens(self) -> TokenFormat:  # type: ignore[override]
        beside = ("attention_mask", "labels", "completion_mask", "assistant_masks")
        return TokenFormat(("input_ids",), beside, demanded=self.tokenized)

    def parse(self, row: Row, where: str, others: Row) -> Source:
        """Convert a row with ``prompt, completion``, with ``messages`` or with ``text``."""
        if row.get("completion") is not None:
            completion = messages.text_of(row, "completion", where, answer=True)
            source = messages.source_of(row, where, messages.prompt_of(row, where), completion=completion)
            return replace(source, further={"all": self.completion_only is False})
        key = next((key for key in self._whole_rows if row.get(key) is not None), None)
        if key is None:
            instead = ", or ".join(self._whole_rows)
            raise DataError(f"{where}: completion is missing; every row must have prompt and completion, or {instead}")
        if self.completion_only and isinstance(row[key], str):
            raise DataError(
                f"{where}: completion_only_loss requires a separate completion, but {key} is plain text; use "
                "the columns prompt and completion"
            )
        if self.completion_only:
            return messages.conversation(row, key, where)
        text = messages.text_of(row, key, where)
        messages.refuse_mapped(row, key, where, "query", *(["system"] if isinstance(text, str) else []))
        source = messages.source_of(row, where, text)
        return replace(source, prompt=text[:0], completions=(source.prompt,), further={"all": True})

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        only = (self.completion_only, self.assistant_only)
        return learned_row(row, columns, where, len(tokenizer.tokenizer), *only)

    def _learned(self, source: Source, ids: Encoded, tokenizer: RowTokenizer) -> Encoded:
        """Divide a row before the first token in the loss."""
        everything = bool(source.further.get("all"))
        if not (everything or self.assistant_only):
            return Encoded(ids.prompt, ids.completions, {"scored": None, "first": False})
        sequence = [*ids.prompt, *ids.completions[0]]
        learned = assistant_mask(tokenizer, source, sequence) if self.assistant_only else [True] * len(sequence)
        if not everything:
            learned[: len(ids.prompt)] = [False] * len(ids.prompt)
        return divided(sequence, learned)

    def records(self, row: Encoded, limits: Limits, tokenizer: RowTokenizer) -> list[Record]:
        row = row if row.source is None else self._learned(row.source, row, tokenizer)
        (record,) = super().records(row, limits, tokenizer)
        dropped, scored = record["dropped"], record["scored"]
        return [record | {"scored": None if dropped or scored is None else scored[: len(record["completion_ids"])]}]

    def collate(self, dataset: Dataset | PackedRows, plan: WindowPlan, micro: int, rank: int) -> CompletionBatch:
        own = plan.micro_batches[micro][rank]
        data = dataset[list(own.rows)]
        sequences = list(zip(data["prompt_ids"], data["completion_ids"]))
        rows = tuple(data.get("pack", own.rows))
        return CompletionBatch(rows, collate(sequences, plan.longest[micro], data.get("scored")))


COMPLETIONS = Completions()
