"""A kind of rows is one file: no other module asks which kind it has, and a new one needs no change elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import ROOT
from datasets import Dataset
from support.data_tokenizers import char_tokenizer

from alignment.data.batching import Batch, MicroBatches, OnDevice, collate
from alignment.data.kinds.base import Kind
from alignment.data.kinds.completions import Completions
from alignment.data.kinds.pairs import Pairs
from alignment.data.kinds.prompts import Prompts
from alignment.data.kinds.scored_pairs import ScoredPairs
from alignment.data.kinds.unpaired import Unpaired
from alignment.data.messages import Row, Source
from alignment.data.prepare import load_prepared, prepare
from alignment.data.sources import dataset_from_python
from alignment.data.tokenization import Limits
from alignment.data.windows import WindowPlan, evaluation_plan, row_table

KINDS = (Unpaired, Pairs, ScoredPairs, Completions, Prompts)
NAMES = {kind.name for kind in KINDS}
OBJECTS = {"UNPAIRED", "PAIRS", "SCORED_PAIRS", "COMPLETIONS", "PROMPTS"} | {kind.__name__ for kind in KINDS}
OTHERWISE = ("overrides.py",)  # in which a kind is a class of trainers
PACKAGES = ("data", "training", "online", "methods", "cli", "references", "planning")


def is_kind(node: ast.AST | None) -> bool:
    """Whether an expression is a kind of rows, its name or its type: what is called so, or one of the objects."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("kind", *OBJECTS) or (node.attr == "name" and is_kind(node.value))
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and any(map(is_kind, node.args))
    return isinstance(node, ast.Name) and node.id in ("kind", *OBJECTS)


def switches(source: str) -> Iterator[int]:
    """Yield the lines that depend on which kind of rows there is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno
        elif isinstance(node, ast.Compare) and any(map(is_kind, (node.left, *node.comparators))):
            yield node.lineno
        elif isinstance(node, ast.Match) and is_kind(node.subject):
            yield node.lineno
        elif isinstance(node, ast.Subscript) and is_kind(node.slice):
            yield node.lineno
        elif isinstance(node, ast.Dict) and any(map(is_kind, node.keys)):
            yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            if any(isinstance(each, ast.Name) and each.id in OBJECTS for each in ast.walk(node.args[1])):
                yield node.lineno


def test_nothing_depends_on_which_kind_of_rows_there_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}, line {line}"
        for package in PACKAGES
        for path in sorted((ROOT / "alignment" / package).rglob("*.py"))
        for line in switches(path.read_text(encoding="utf-8"))
        if (path.parent.name != "kinds" or path.name == "base.py") and path.name not in OTHERWISE
    ]
    assert not found


def test_a_kind_does_not_ask_for_another_one() -> None:
    for path in (ROOT / "alignment" / "data" / "kinds").glob("*.py"):
        named = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip().startswith("name = ")]
        found = list(switches(path.read_text(encoding="utf-8")))
        assert len(found) == len(named) <= 1, f"{path.name}: lines {found}"  # only where it says its name


def test_a_switch_is_found() -> None:
    assert list(switches("if type(kind) is Pairs: ...")) and not list(switches("x = kind.collate(y)\nk = PAIRS"))


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
    folder = prepare(dataset_from_python(rows), kind, tokenizer, Limits(5), "data", tmp_path, progress=False)
    prepared = load_prepared(folder)
    assert folder.name.startswith("answers-") and prepared.dataset.features == kind.features
    assert (prepared.report.rows_out, prepared.report.completions_cut) == (3, 1)
    table = row_table(prepared.dataset, kind.completions, 5)
    plan = evaluation_plan(table, world_size=1, batch_size=3, seed=0, draw_partners=False)
    (batch,) = MicroBatches(kind.collate, prepared.dataset, plan, 0)
    texts: Any = [tokenizer.decode(ids[mask == 1]) for ids, mask in zip(*batch.answers.inputs.values())]  # type: ignore[attr-defined]
    assert sorted(texts) == ["a?ccc", "a?cd</s>", "ab?c</s>"]
