"""A kind of rows is one file: no other module asks which kind it has, and a new one needs no change elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import ROOT
from datasets import Dataset
from support.data_tokenizers import char_tokenizer
from support.prepared import prepared

from alignment.data.batching import Batch, MicroBatches, collate
from alignment.data.kinds.base import Kind
from alignment.data.messages import Row, Source
from alignment.data.tokenization import Limits
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan, evaluation_plan, row_table

PACKAGES = ("data", "training", "online", "methods", "cli", "references", "planning")
KIND = r"(\w+\.)*kind(\.name)?\)?"
OBJECT = "(UNPAIRED|PAIRS|SCORED_PAIRS|COMPLETIONS|PROMPTS)"
ASKS = re.compile(
    rf"\b{KIND} (is|==|!=) [^{{]|\[{KIND}\]|match {KIND}:|isinstance\({KIND}, (?!Kind\))|(is|==|!=) {OBJECT}\b"
)


def test_no_module_asks_which_kind_of_rows_it_has() -> None:
    """``overrides.py`` and other packages have kinds of other things."""
    files = [path for package in PACKAGES for path in (ROOT / "alignment" / package).glob("*.py")]
    texts = {str(path): path.read_text(encoding="utf-8") for path in files if path.name != "overrides.py"}
    assert [path for path, text in texts.items() if ASKS.search(text)] == []
    for code in ("type(kind) is Pairs", "data.kind.name == x", "isinstance(kind, Pairs)", "x[kind]", "a is PAIRS"):
        assert ASKS.search(code), code


@dataclass(frozen=True)
class AnswerBatch(OnDevice):
    """Answers to questions."""

    rows: tuple[int, ...]
    answers: Batch


class Answers(Kind):
    """A question and its answer, with columns that no other kind has."""

    name = "answers"
    formats = (("question", "answer"),)
    optional = ()
    completions = ("answer_ids",)

    def parse(self, row: Row, where: str, others: Row) -> Source:
        return Source(f"{row['question']}?", (row["answer"],), where)

    def collate(self, dataset: Dataset, plan: WindowPlan, micro: int, rank: int) -> AnswerBatch:
        rows = plan.micro_batches[micro][rank].rows
        data = dataset[list(rows)]
        return AnswerBatch(rows, collate(list(zip(data["prompt_ids"], data["answer_ids"])), plan.longest[micro]))


def test_a_new_kind_is_prepared_planned_and_collated(tmp_path: Path) -> None:
    kind, tokenizer = Answers(), char_tokenizer()
    rows = [{"question": "ab", "answer": "c"}, {"question": "a", "answer": "cd"}, {"question": "a", "answer": "c" * 9}]
    made = prepared(rows, kind, tmp_path, tokenizer, Limits(5))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("answers-") and made.dataset.features == kind.features
    assert (made.report.rows_out, made.report.completions_cut) == (3, 1)
    table = row_table(made.dataset, kind.completions, 5)
    plan = evaluation_plan(table, world_size=1, batch_size=3, seed=0, draw_partners=False)
    (batch,) = MicroBatches(kind.collate, made.dataset, plan, 0)
    texts: Any = [tokenizer.decode(ids[mask == 1]) for ids, mask in zip(*batch.answers.inputs.values())]  # type: ignore[attr-defined]
    assert sorted(texts) == ["a?ccc", "a?cd</s>", "ab?c</s>"]
