"""Tokens in the loss: SFT options, tokenized rows, formatting functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from support.data_tokenizers import CHATML, PLAIN, char_tokenizer, readable_tokenizer
from support.prepared import prepared

from alignment.config.errors import DataError
from alignment.data.batching import collate
from alignment.data.kinds.completions import COMPLETIONS, Completions
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.prepare import Prepared
from alignment.data.sources import dataset_from_python
from alignment.data.targets import divided, formatted
from alignment.data.tokenization import Limits
from alignment.data.windows import evaluation_plan, row_table
from alignment.methods.sft import SFTMethod
from alignment.methods.sft_options import SFTConfig

SAID = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]


def made(
    rows: Any, folder: Path, kind: Any = COMPLETIONS, tokenizer: Any = None, limits: Limits | None = None
) -> Prepared:
    """Prepare rows, of SFT by default."""
    return prepared(rows, kind, folder, tokenizer, limits)


def learned(found: Prepared) -> list[tuple[Any, ...]]:
    """Return prompt, completion and mask of each row."""
    return [tuple(row[name] for name in ("prompt_ids", "completion_ids", "scored")) for row in found.dataset]


def test_a_sequence_is_split_before_the_first_token_in_the_loss() -> None:
    def parts(learned: list[bool]) -> tuple[Any, ...]:
        found = divided(range(4, 4 + len(learned)), learned)
        return (found.prompt, *found.completions, *found.further.values())

    assert parts([True] * 3) == ([4], [5, 6], None, True)
    assert parts([True, False, True, False]) == ([4, 5], [6, 7], [True, False], True)
    assert parts([False, False, True]) == ([4, 5], [6], None, False)
    assert parts([False, False]) == ([4, 5], [], None, False)


def test_token_ids_are_used_unchanged(tmp_path: Path) -> None:
    ids = {"input_ids": [4, 5, 6, 7], "text": "not this"}
    assert learned(made([ids], tmp_path)) == [([4], [5, 6, 7], None)]
    masks = {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert learned(made([ids | masks], tmp_path)) == [([4], [5, 6, 7], [True, False, True])]
    own = made([ids | masks], tmp_path, kind=Completions(completion_only=False))
    assert learned(own) == [([4], [5, 6, 7], [True, False, True])]
    labels = {"labels": [-100, -100, 6, -100]}  # they take precedence over masks
    assert learned(made([ids | masks | labels], tmp_path)) == [([4, 5], [6, 7], [True, False])]
    rows = made([ids | labels, ids, {"input_ids": [8, 9], "labels": [-100, 9]}], tmp_path).dataset
    assert SFTMethod(SFTConfig()).shown(rows[:])["labels"] == [[-100, -100, 6, -100], [4, 5, 6, 7], [-100, 9]]
    padded = {"input_ids": [0, 4, 5, 6], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 5, 6]}
    assert learned(made([padded], tmp_path)) == [([4], [5, 6], None)]


def test_rows_without_loss_tokens_are_dropped(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [4, 5, 6, 7, 8], "assistant_masks": [0, 0, 0, 1, 1]},
        {"input_ids": [9, 10, 11, 12], "assistant_masks": [0, 1, 0, 1]},
    ]
    found = made(rows, tmp_path, limits=Limits(3))
    assert learned(found) == [([9], [10, 11], [True, False])] and found.report.completions_cut == 1
    assert found.report.dropped == {"no space left for the completion (the prompt fills max_length)": 1}
    nothing = {"input_ids": [4, 5], "labels": [-100, -100]}
    assert made([nothing, rows[1]], tmp_path).report.dropped == {"the completion is empty": 1}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [4, 500]}, r"row 1: input_ids contains token ID 500, but the tokenizer has 7\d tokens"),
        ({"input_ids": "ab"}, "input_ids is 'ab'.*; expected a list of token IDs"),
        ({"input_ids": [4, 5], "labels": [4]}, r"labels is \[4\].*; expected one value for each of the 2 tokens"),
        ({"input_ids": [4, 5], "labels": [5, 6]}, r"labels\[0\] is 5"),
    ],
)
def test_invalid_token_ids_are_refused(row: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        made([row], tmp_path)


def test_options_that_do_not_fit_the_rows_are_refused(tmp_path: Path) -> None:
    ids = {"input_ids": [4, 5]}
    for kind, row, says in [
        (Completions(completion_only=True), ids, "requires completion_mask or labels"),
        (Completions(assistant_only=True), ids, "requires assistant_masks or labels"),
        (Completions(completion_only=True), {"text": "ab"}, "text is plain text; use the columns prompt and comp"),
        (Completions(assistant_only=True), {"text": "ab"}, "requires a conversation, but this row is plain text"),
        (Completions(text_field="said"), {"prompt": "ab"}, "missing column completion; .* or said"),
        (Completions(tokenized=True), {"text": "ab"}, "skip_prepare_dataset requires tokenized rows"),
        (SCORED_PAIRS, {"chosen_ids": [4], "rejected_ids": [5], "chosen_mask": [0]}, "chosen_mask would be ignored"),
    ]:
        with pytest.raises(DataError, match=says):
            made([row], tmp_path, kind)
    assert learned(made([ids], tmp_path, kind=Completions(tokenized=True))) == [([4], [5], None)]


def test_a_template_without_end_of_turn_does_not_mark_the_assistants_tokens(tmp_path: Path) -> None:
    kind, rows = Completions(assistant_only=True), [{"messages": SAID * 2}]
    with pytest.raises(DataError, match="does not mark the assistant's tokens"):
        made(rows, tmp_path, tokenizer=char_tokenizer(template=PLAIN), kind=kind)
    once = made([{"messages": SAID}], tmp_path, tokenizer=char_tokenizer(template=PLAIN), kind=kind)
    assert char_tokenizer().decode(once.dataset[0]["completion_ids"]) == " ba\n</s>"


def test_token_ids_of_completions(tmp_path: Path) -> None:
    pair = {"chosen_ids": [4, 5, 6], "rejected_ids": [4, 7, 6], "margin": 2.0}
    rows = made([pair], tmp_path, SCORED_PAIRS).dataset
    expected = {"prompt_ids": [4], "chosen_ids": [5, 6], "rejected_ids": [7, 6], "row": 0, "margin": 2.0}
    assert rows[0] == expected | {"prompt_cut": False, "completions_cut": 0}
    with pytest.raises(DataError, match="^data: .* read as complete sequences, but column 'prompt_ids'"):
        made([pair | {"prompt_ids": [9]}], tmp_path, SCORED_PAIRS)  # the columns of DPO: completions without prompts


def test_token_ids_of_every_method(tmp_path: Path) -> None:
    """They are limited in length; an end-of-sequence token is not added."""
    pair = {"chosen_ids": [7, 8, 9], "rejected_ids": [8, 9]}
    limits = Limits(max_length=4, max_prompt_length=2, max_completion_length=1)
    for kind, row, expected in (
        (UNPAIRED, {"prompt_ids": [4, 5, 6], "completion_ids": [7, 8], "label": True}, [[5, 6], [7]]),
        (PAIRS, {"prompt_ids": [4, 5, 6], **pair}, [[5, 6], [7], [8]]),
        (SCORED_PAIRS, pair, [[], [7], [8]]),
        (COMPLETIONS, {"input_ids": [4, 5, 6], "labels": [-100, -100, 6]}, [[4, 5], [6]]),
    ):
        data = made([row], tmp_path, kind, limits=limits).dataset
        assert [data[0][name] for name in data.column_names if name.endswith("_ids")] == expected
    same = {"prompt_ids": [4], "chosen_ids": [7, 8], "rejected_ids": [7, 8]}
    assert made([same, same | {"rejected_ids": [9]}], tmp_path, PAIRS).dataset["row"][:] == [1]
    with pytest.raises(DataError, match="^data: missing column prompt"):
        made([{"prompt_ids": [4, 5]}], tmp_path, PROMPTS)


def test_a_reward_model_uses_the_complete_template(tmp_path: Path) -> None:
    tokenizer = readable_tokenizer(template=CHATML)
    other = [SAID[0], {**SAID[-1], "content": "no"}]
    row = made([{"chosen": SAID, "rejected": other}], tmp_path, SCORED_PAIRS, tokenizer).dataset[0]
    for name, messages in (("chosen_ids", SAID), ("rejected_ids", other)):
        assert row["prompt_ids"] + row[name] == tokenizer.apply_chat_template(messages)["input_ids"]
    row = made([{"prompt": "", "chosen": "a", "rejected": "b"}], tmp_path, SCORED_PAIRS).dataset[0]
    assert row["prompt_ids"] == [] and char_tokenizer().decode(row["chosen_ids"]) == "a</s>", "no context is added"


def test_images_are_refused_but_empty_columns_are_not(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(DataError, match="column 'images' contains images"):
        made([row | {"images": []}, row | {"images": ["a.png"]}], tmp_path, UNPAIRED)
    plain = Dataset.from_list([row | {"images": []}])
    assert len(made(plain, tmp_path, UNPAIRED).dataset) == 1
    with pytest.raises(DataError, match=r"with_transform\(\) is not supported"):
        made(plain.with_transform(lambda batch: batch), tmp_path, UNPAIRED)
    # TRL allows it with this option.
    with pytest.raises(DataError, match=r"also with skip_prepare_dataset.*Dataset\.map\(\)"):
        made(plain.with_transform(lambda batch: batch), tmp_path, COMPLETIONS)


def test_means_are_over_the_tokens_in_the_loss(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, -100, 7]},
        {"input_ids": [8, 9], "labels": [8, 9]},
        {"input_ids": [4, 5, 6], "labels": [4, 5, 6]},
    ]
    data = made(rows, tmp_path).dataset
    table = row_table(data, ("completion_ids",), None)
    assert table.completions.tolist() == [[3], [1], [2]] and table.scored.tolist() == [[2], [1], [2]]
    plan = evaluation_plan(table, world_size=1, batch_size=3, seed=0, draw_partners=False)
    assert plan.counts.first_completion_tokens == 5 and plan.longest == (5,)
    batch: Any = COMPLETIONS.collate(data, plan, 0, 0)
    order = [batch.rows.index(row) for row in range(3)]
    assert batch.completions.lengths[order].tolist() == [2, 1, 2]
    assert batch.completions.targets.tolist() == [t for row in batch.rows for t in ([5, 7], [9], [5, 6])[row]]
    flat = batch.completions.inputs["input_ids"].flatten()
    assert flat[batch.completions.positions + 1].tolist() == batch.completions.targets.tolist()
    assert row_table(data.select([1, 2]), ("completion_ids",), None).scored is None
    assert collate([([1], [2, 3])], 1, [[False, True]]).targets.tolist() == [3]


def test_a_formatting_function_returns_the_text_of_a_row(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b"}]
    data = formatted(dataset_from_python(rows), lambda row: row["question"] + row["answer"], "data")
    assert data["text"] == ["ab"] and data.column_names == ["text"]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert list(formatted(stream, lambda row: row["answer"], "data")) == [{"text": "b"}]
    with pytest.raises(DataError, match=r"data, row 1: formatting_func returned \['b'\]"):
        formatted(dataset_from_python(rows), lambda row: [row["answer"]], "data")  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="data, row 1: formatting_func raised KeyError: 'none'"):
        formatted(dataset_from_python(rows), lambda row: row["none"], "data")


def test_generation_marks_of_a_template_are_used(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    tokenizer = char_tokenizer(template=template)
    kind, rows = Completions(assistant_only=True), [{"messages": [{"role": "user", "content": "ab"}]}]
    row = made(rows, tmp_path, tokenizer=tokenizer, kind=kind).dataset[0]
    assert tokenizer.decode(row["completion_ids"]) == "ab.</s>" and row["scored"] == [True, False, False]
