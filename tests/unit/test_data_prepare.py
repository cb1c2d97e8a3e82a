"""Prepared datasets: columns, counts, cache, and independence of the number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.data_tokenizers import CHATML, PLAIN, byte_tokenizer, char_tokenizer
from support.prepared import prepared

from alignment import CPOConfig, DPOConfig, KTOConfig, RewardConfig, SFTConfig
from alignment.config.errors import DataError, OutputError
from alignment.data import prepare as module
from alignment.data.kinds.completions import COMPLETIONS, Completions
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.prepare import Prepared, data_key, load_prepared, prepare
from alignment.data.report import DataReport
from alignment.data.sources import dataset_from_python
from alignment.data.tokenization import Encoded, Limits, RowTokenizer
from alignment.training.data import limits_of

KTO = [
    {"prompt": "xy", "completion": "cd", "label": True},
    {"prompt": "x" * 9, "completion": "cdefg", "label": False},
    {"prompt": "xy", "completion": "e", "label": False},
]
PAIRED = [
    {"prompt": "xy", "chosen": "cd", "rejected": "e"},
    {"prompt": None, "chosen": "same", "rejected": "same"},
    {"prompt": "x" * 9, "chosen": "c", "rejected": "defgh"},
]


def run(rows: list[Any], kind: Any, folder: Path, limits: Limits | None = None, **options: Any) -> Prepared:
    tokenizer = options.pop("tokenizer", None) or char_tokenizer(before=("<s>",), template=PLAIN)
    return prepared(rows, kind, folder, tokenizer, limits, **options)


def test_unpaired_columns_and_report(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(before=("<s>",))
    made = run(KTO, UNPAIRED, tmp_path, Limits(max_length=8, max_prompt_length=5), tokenizer=tokenizer)
    assert made.dataset.features == UNPAIRED.features
    decoded = [(tokenizer.decode(r["prompt_ids"]), tokenizer.decode(r["completion_ids"])) for r in made.dataset]
    assert decoded == [("<s>xy", "cd</s>"), ("<s>xxxx", "cde"), ("<s>xy", "e</s>")]
    assert made.dataset["label"][:] == [True, False, False] and made.dataset["row"][:] == [0, 1, 2]
    keys = made.dataset["prompt_key"][:]
    assert keys[0] == keys[2] != keys[1]
    assert made.report == DataReport(3, 3, {}, 1, 1, 1, 2)
    said = "3 of 3 rows kept (1 desirable, 2 undesirable), 1 prompts and 1 completions truncated"
    assert made.report.summary() == said


def test_the_key_of_a_prompt_is_the_same_everywhere() -> None:
    row = Encoded([1, 2, 3], [[4]], {"label": [True]})
    (record,) = UNPAIRED.records(row, Limits(), RowTokenizer(char_tokenizer()))
    assert record["prompt_key"] == -7044357283931317034


def test_pairs_and_drops(tmp_path: Path) -> None:
    made = run(PAIRED, PAIRS, tmp_path, Limits(max_length=10))
    assert made.dataset.features == PAIRS.features and made.dataset["row"][:] == [0]
    reasons = "chosen and rejected are identical", "no space left for the completion (the prompt fills max_length)"
    assert made.report == DataReport(3, 1, dict.fromkeys(reasons, 1))
    assert "2 dropped: 1 × chosen and rejected are identical; 1 × no space" in made.report.summary()
    cut = run(PAIRED, PAIRS, tmp_path, Limits(max_length=12)).report
    assert (cut.rows_out, cut.completions_cut) == (2, 1)


def test_pairs_for_kto_become_two_rows_with_one_prompt(tmp_path: Path) -> None:
    made = run(PAIRED, UNPAIRED, tmp_path)
    assert made.dataset["row"][:] == [0, 0, 2, 2] and made.dataset["label"][:] == [True, False, True, False]
    keys, report = made.dataset["prompt_key"][:], made.report
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert (report.rows_in, report.rows_out, report.dropped) == (6, 4, {"chosen and rejected are identical": 2})
    assert (report.desirable, report.undesirable) == (2, 2)


def test_a_single_completion_of_a_pair_may_be_dropped_only_for_kto(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "chosen": "c", "rejected": ""}, {"prompt": "xy", "chosen": "c", "rejected": "d"}]
    tokenizer = char_tokenizer(before=("<s>",), eos=None)
    assert run(rows, UNPAIRED, tmp_path, tokenizer=tokenizer).dataset["label"][:] == [True, True, False]
    paired = run(rows, PAIRS, tmp_path, tokenizer=tokenizer)
    assert paired.report.dropped == {"the completion is empty": 1}
    assert paired.dataset["row"][:] == [1]


def lengths(folder: Path, method: type[Any], prompt: int, sizes: list[int], **options: Any) -> list[tuple[int, ...]]:
    """Return (prompt, completions) of the records of one row, in tokens; the row's lengths include EOS."""
    texts = [letter * (size - 1) for letter, size in zip("cd", sizes)]
    kinds: dict[Any, Any] = {KTOConfig: UNPAIRED, SFTConfig: COMPLETIONS, RewardConfig: SCORED_PAIRS}
    row: dict[str, Any] = {"prompt": "x" * prompt}
    row |= dict(zip(("chosen", "rejected"), texts)) if len(sizes) == 2 else {"completion": texts[0], "label": True}
    limits = limits_of(method("out", **options))
    made = run([row], kinds.get(method, PAIRS), folder, limits, tokenizer=char_tokenizer()).dataset
    names = [name for name in made.column_names if name.endswith("_ids")]
    return [tuple(len(record[name]) for name in names) for record in made]


@pytest.mark.parametrize(
    ("options", "prompt", "completion", "expected"),
    [
        ({}, 900, 124, (900, 124)),  # the row has max_length tokens
        ({}, 900, 125, (512, 125)),
        ({}, 900, 600, (512, 512)),
        ({}, 512, 600, (512, 512)),
        ({}, 100, 1000, (100, 924)),
        ({}, 1024, 2, (512, 2)),
        ({"max_length": 513}, 600, 9, (512, 1)),
        ({"max_length": 512}, 504, 8, (504, 8)),
        ({"max_length": 512}, 504, 9, (256, 9)),
        ({"max_length": 7}, 9, 9, (3, 4)),
        ({"max_length": None}, 9000, 9000, (9000, 9000)),
        ({"max_prompt_length": 512}, 900, 9, (512, 9)),  # an explicit limit always applies
        ({"max_prompt_length": 200, "max_length": 256}, 240, 9, (200, 9)),
        ({"max_prompt_length": 600}, 900, 600, (600, 424)),
        ({"max_completion_length": 50}, 974, 90, (974, 50)),  # completions are cut first
        ({"max_completion_length": 50}, 975, 90, (512, 50)),
        ({"max_completion_length": 50, "max_prompt_length": 30}, 90, 90, (30, 50)),
    ],
)
def test_prompts_are_cut_in_rows_that_are_too_long(
    tmp_path: Path, options: dict[str, Any], prompt: int, completion: int, expected: tuple[int, int]
) -> None:
    assert lengths(tmp_path, KTOConfig, prompt, [completion], **options) == [expected]
    longest, shorter = expected[1], min(expected[1], completion - completion // 2)
    pair = lengths(tmp_path, CPOConfig, prompt, [completion - completion // 2, completion], **options)
    assert pair == [(expected[0], shorter, longest)]


def test_the_rows_of_a_pair_are_cut_separately_for_kto(tmp_path: Path) -> None:
    assert lengths(tmp_path, KTOConfig, 900, [124, 125]) == [(900, 124), (512, 125)]
    row = {"prompt": "x" * 900, "chosen": "c" * 123, "rejected": "d" * 124}
    keys = run([row], UNPAIRED, tmp_path, limits_of(KTOConfig("out"))).dataset["prompt_key"][:]
    assert keys[0] == keys[1]  # still the same prompt, of which the other row cannot be the partner


def test_other_methods_cut_prompts_by_an_explicit_limit_only(tmp_path: Path) -> None:
    for method, sizes in ((DPOConfig, [600, 20]), (RewardConfig, [600, 20]), (SFTConfig, [600])):
        cut = [min(size, 124) for size in sizes]
        assert lengths(tmp_path, method, 900, sizes) == [(900, *cut)]
        assert lengths(tmp_path, method, 900, sizes, max_prompt_length=512) == [(512, *[min(s, 512) for s in sizes])]
        with pytest.raises(DataError, match="no space left"):
            lengths(tmp_path, method, 1024, sizes)


@pytest.mark.parametrize("kind", [UNPAIRED, PAIRS])
def test_the_number_of_processes_does_not_matter(tmp_path: Path, kind: Any) -> None:
    rows = [
        {"prompt": f"question {i % 7}", "chosen": "the answer " * (i % 5), "rejected": f"mat {i}"} for i in range(41)
    ]
    given: Any = {"limits": Limits(max_length=24), "tokenizer": byte_tokenizer()}
    first, *others = [run(rows, kind, tmp_path / str(count), num_proc=count, **given) for count in (None, 1, 2)]
    assert first.report.dropped == {}
    for other in others:
        assert other.dataset.to_list() == first.dataset.to_list() and other.report == first.report


@pytest.mark.parametrize("processes", [None, 2])
def test_errors_in_workers_are_the_same(tmp_path: Path, processes: int | None) -> None:
    rows = [*KTO * 4, {"prompt": "x", "completion": "c", "label": None}]
    with pytest.raises(DataError, match="^data, row 13: label is null; expected true or false; remove rows"):
        run(rows, UNPAIRED, tmp_path, num_proc=processes)
    assert list(tmp_path.iterdir()) == []


def test_second_run_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = char_tokenizer(before=("<s>",))
    data = dataset_from_python(KTO)
    path = prepare(data, UNPAIRED, tokenizer, Limits(), "data", tmp_path, progress=False)
    assert path.stem == data_key(data, UNPAIRED, tokenizer, Limits())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]
    assert sorted(entry.name for entry in path.iterdir()) == ["data", "report.json"]
    monkeypatch.setattr(module, "RowMapper", lambda *args: pytest.fail("built again"))
    tokenizer(["other", "texts"], padding=False, truncation=True, max_length=2)  # leaves settings in the tokenizer
    again = dataset_from_python(json.loads(json.dumps(KTO)))
    assert prepare(again, UNPAIRED, tokenizer, Limits(), "data", tmp_path) == path


def test_the_key_of_the_data_depends_on_all_inputs(tmp_path: Path) -> None:
    def name(rows: list[Any] = KTO, kind: Any = UNPAIRED, tokenizer: Any = None, **limits: Any) -> str:
        return data_key(dataset_from_python(rows), kind, tokenizer or char_tokenizer(), Limits(**limits))

    names = [
        name(),
        name(KTO[::-1]),
        name(kind=PAIRS),
        name(max_length=5),
        name(max_prompt_length=5),
        name(truncation_mode="keep_start"),
        name(shorten_prompts=True),
        name(tokenizer=char_tokenizer(before=("<s>",))),
        name(tokenizer=char_tokenizer(eos=None)),
        name(tokenizer=char_tokenizer(merges=(("b", "c"),))),
        name(tokenizer=char_tokenizer(template=CHATML)),
        *(name(kind=kind) for kind in (COMPLETIONS, Completions(True), Completions(False))),
        name(kind=Completions(assistant_only=True)),
    ]
    assert len(set(names)) == len(names)
    paths = {
        prepare(dataset_from_python(rows), UNPAIRED, char_tokenizer(), Limits(), "data", tmp_path, progress=False)
        for rows in (KTO, [{**row, "unused": 3} for row in KTO])
    }
    assert len(paths) == 1
    many = [{"prompt": str(number), "completion": "c", "label": True} for number in range(1500)]
    others = many[:1400], [*many[:-1], {**many[-1], "label": False}]  # rows are hashed a thousand at a time
    assert len({name(many), *map(name, others)}) == 3


def test_the_key_of_the_data_depends_on_the_code_of_a_users_kind() -> None:
    class Own(type(PAIRS)):  # type: ignore[misc]
        def parse(self, row: Any, where: str, others: Any) -> Any:
            return super().parse(row, where, others)

    first = Own
    usual = data_key(dataset_from_python(PAIRED), PAIRS, char_tokenizer(), Limits())

    class Own(type(PAIRS)):  # type: ignore[misc,no-redef]
        def parse(self, row: Any, where: str, others: Any) -> Any:
            return super().parse({**row, "chosen": row["rejected"]}, where, others)

    keys = {data_key(dataset_from_python(PAIRED), kind(), char_tokenizer(), Limits()) for kind in (first, Own, Own)}
    assert len(keys) == 2 and usual not in keys


def test_strict_data_and_no_rows_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data: 1 of 3 rows would be dropped \(1 × chosen and .*strict_data: false"):
        run(PAIRED, PAIRS, tmp_path, strict=True)
    assert list(tmp_path.iterdir()) == []
    run(PAIRED, PAIRS, tmp_path)
    with pytest.raises(DataError, match="would be dropped"):  # also from the cache
        run(PAIRED, PAIRS, tmp_path, strict=True)
    with pytest.raises(DataError, match=r"^data: all 3 rows were dropped \(2 × no space .*; 1 × chosen"):
        run(PAIRED, PAIRS, tmp_path, Limits(max_length=2))


def test_a_folder_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OutputError, match="file: the tokenized data cannot be written"):
        run(KTO, UNPAIRED, file)
    with pytest.raises(DataError, match="delete the folder"):
        load_prepared(tmp_path / "missing")
    data = dataset_from_python(KTO)
    path = prepare(data, UNPAIRED, char_tokenizer(), Limits(), "data", tmp_path / "cache", progress=False)
    (path / "report.json").write_text("{")
    with pytest.raises(DataError, match="report.json cannot be read: .*; delete the folder"):
        prepare(data, UNPAIRED, char_tokenizer(), Limits(), "data", tmp_path / "cache", progress=False)


def test_a_finished_folder_of_another_process_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = prepare(dataset_from_python(KTO), UNPAIRED, char_tokenizer(), Limits(), "data", tmp_path, progress=False)
    cache, counts = tmp_path / "cache", module.counts
    target = cache / usual.name

    def overtaken(rows: Dataset) -> dict[str, int]:
        (target / "theirs").mkdir(parents=True)
        return counts(rows)

    monkeypatch.setattr(module, "counts", overtaken)
    path = prepare(dataset_from_python(KTO), UNPAIRED, char_tokenizer(), Limits(), "data", cache, progress=False)
    assert [entry.name for entry in cache.iterdir()] == [path.name] and (path / "theirs").is_dir()
