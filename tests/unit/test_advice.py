"""Advice on both sides of each threshold, and suggested weights that restore the balance."""

from __future__ import annotations

from typing import Any

import pytest
from support.data_tokenizers import PLAIN, char_tokenizer

from alignment.config.registry import METHODS
from alignment.data.report import NOT_DRAWN, DataReport
from alignment.data.tokenization import NO_ROOM
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.kto_options import KTOConfig
from alignment.training.advice import about_learning_rate, about_rows, about_strings


def said(report: tuple[int, int] = (50, 50), window: int = 16, cls: Any = KTOConfig, **options: Any) -> str:
    """Return all advice for these numbers of desirable and undesirable rows, one sentence per line."""
    desirable, undesirable = report
    rows = DataReport(sum(report), sum(report), desirable=desirable, undesirable=undesirable)
    given = cls("out", **options)
    return "\n".join(METHODS.trainer(given).method_class(given).advice(rows, window))


def test_strings_for_a_chat_model() -> None:
    """The advice shows the row with and without the template; rows that contain a token of it are rendered already."""
    tokenizer, row = char_tokenizer(template=PLAIN), {"prompt": "ab", "completion": "c", "label": True}
    (line,) = about_strings(row, tokenizer)
    assert "such as 'abc'; " in line and line.endswith("apply_chat_template: true for 'user: ab\\nassistant: c\\n'")
    (line,) = about_strings({"prompt": "ab" * 200}, tokenizer)
    assert "..." in line and len(line) < 500
    messages = [{"role": "user", "content": "a"}]
    for other in ({"prompt": messages}, {"prompt": "<s>ab", "completion": "c"}, {"chosen": "a", "rejected": "b"}):
        assert about_strings(other, tokenizer) == []
    assert about_strings(row, char_tokenizer()) == []


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        ((50, 50), (1, 1), None),
        ((400, 300), (1, 1), None),
        ((100, 100), (1.33, 1), None),
        ((100, 100), (4 / 3, 1), None),
        ((10, 100), (10, 1), None),
        ((10, 100), (13.3, 1), None),
        ((100, 10), (0.1, 1), None),
        ((100, 10), (1, 10), None),
        ((100, 10), (1, 7.5), None),
        ((7, 3), (3, 7), None),
        ((99, 100), (1, 1), "(99:100) is 0.99:1"),
        ((401, 300), (1, 1), "(401:300) is 1.34:1"),
        ((100, 100), (1.34, 1), "is 1.34:1"),
        ((100, 100), (1, 1.01), "is 0.99:1"),
        ((10, 100), (1, 1), "is 0.1:1"),
        ((10, 100), (1, 1), "set desirable_weight to 10 to 13.3 or undesirable_weight to 0.075 to 0.1"),
        ((1000, 100), (1, 1), "set desirable_weight to 0.1 to 0.133 or undesirable_weight to 7.5 to 10"),
        ((50, 50), (1, 0), "is 1:0, outside 1:1 to 4:3; set undesirable_weight to 0.75 to 1"),
        ((50, 50), (0, 1), "is 0:1, outside 1:1 to 4:3; set desirable_weight to 1 to 1.33"),
    ],
)
def test_the_range_of_weights(rows: tuple[int, int], weights: tuple[float, float], expected: str | None) -> None:
    found = said(rows, desirable_weight=weights[0], undesirable_weight=weights[1])
    assert found == "" if expected is None else expected in found


def test_only_one_label() -> None:
    assert "all 100 rows are desirable, " in said((100, 0))
    assert "set learning_rate below the usual value (it is 1e-06)" in said((0, 7))
    assert "all 7 rows are undesirable, " in said((0, 7))
    assert "weighted ratio" not in said((100, 0))
    assert said((99, 1), undesirable_weight=99) == ""


@pytest.mark.parametrize("cls", [KTOConfig, CPOConfig])
def test_learning_rate(cls: Any) -> None:
    for rate in (5e-7, 1e-6, 5e-6):
        assert said(cls=cls, learning_rate=rate) == ""
    high = said(cls=cls, learning_rate=5.1e-6, beta=0.05)
    assert high.startswith("learning_rate=5.1e-06 at beta=0.05 is outside 5e-07 to 5e-06")
    assert "diverge" in high and ("smaller beta" in high) == (cls is KTOConfig)
    assert "barely change" in said(cls=cls, learning_rate=4.9e-7)
    for rate, inside in ((4.9e-6, False), (5e-6, True), (5e-5, True), (5.1e-5, False)):
        of_adapters = about_learning_rate(cls("out", learning_rate=rate), 0.1, adapters=True)
        assert (of_adapters == []) == inside and (inside or "5e-06 to 5e-05" in of_adapters[0])


def test_window(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(window=16) == said(window=17) == ""
    assert "a step uses 15 rows, fewer than 16: KTO estimates the KL from these rows only" in said(window=15)
    assert said(window=8).endswith("set gradient_accumulation_steps=2")
    assert said(window=2, per_device_train_batch_size=2).endswith("set gradient_accumulation_steps=8")
    assert said(window=3, per_device_train_batch_size=3).endswith("set gradient_accumulation_steps=6")
    for other in (said(window=8, loss_type="apo_zero_unpaired"), said(window=8, cls=CPOConfig)):
        assert "KL" not in other and "gradients are noisy" in other
    monkeypatch.setenv("WORLD_SIZE", "4")  # ranks count
    assert said(window=4, per_device_train_batch_size=1).endswith("set gradient_accumulation_steps=4")


def test_many_lost_rows() -> None:
    assert about_rows(DataReport(100, 95, {NO_ROOM: 5}, completions_cut=4)) == []
    assert about_rows(DataReport(100, 10, {NOT_DRAWN: 90})) == []
    dropped, cut = about_rows(DataReport(300, 100, {NO_ROOM: 167, NOT_DRAWN: 33}, completions_cut=6))
    assert dropped == f"167 of 300 rows were dropped (167 × {NO_ROOM}); raise max_length, or lower max_prompt_length"
    assert cut.startswith("6 of 100 completions are truncated, so the model does not learn how they end; raise")
    (pairs,) = about_rows(DataReport(60, 60, completions_cut=102), completions=2)
    assert pairs.startswith("102 of 120 completions are truncated, ")
    assert about_rows(DataReport(60, 60, completions_cut=6), completions=2) == []  # 5 %, not 10 %
    (empty,) = about_rows(DataReport(10, 9, {"the completion is empty": 1}))
    (prompts,) = about_rows(DataReport(200, 100, prompts_cut=6))
    assert prompts.startswith("6 of 100 prompts are truncated")
    assert about_rows(DataReport(200, 100, prompts_cut=5)) == []
    assert empty == "1 of 10 rows were dropped (1 × the completion is empty); check these rows"
