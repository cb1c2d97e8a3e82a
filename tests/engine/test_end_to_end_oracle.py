"""From raw rows to the loss and the metrics of the first window: the package beside ``oracle``, in many combinations.

Both sides take raw rows, a tokenizer and options. The package's side is a real trainer up to its window pass; only the
engines are shared between combinations. The oracle's side is written from the documentation.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.end_to_end import POSITIONS, allowed, factors, options_of, parts_of, tokenizer_of
from support.helpers import STAGES, tiny_config
from support.oracle.first_window import Key, Part, check_partners, check_taken, online, usable, window_of
from support.oracle.pairs import Candidate, Prompt
from support.oracle.rows import Example, Refused, Setting
from support.oracle.wide import widen
from support.pairwise import Combination, covering
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import alignment
from alignment.config.errors import DataError
from alignment.data.batching import MicroBatches
from alignment.reporting.metrics import means
from alignment.rollout.backend import Completion
from alignment.training.data import training_data
from alignment.training.method import Models

# Combinations of each method: by default, in test-ci, and in test-slow. In the first 91, every pair of choices occurs.
PARTS = {
    "most-pairs": slice(0, 30),
    "all-pairs": slice(30, 91),
    "more": slice(91, 300),
}
NAMES = {"kto": "KTO", "cpo": "CPO", "dpo": "DPO", "reward": "Reward", "sft": "SFT", "online_dpo": "OnlineDPO"}


def answers(prompt: Sequence[int], count: int, eos: int | None) -> list[tuple[int, ...]]:
    """Return completions as a function of the prompt; those of some prompts are all the same."""
    rng = random.Random(repr(list(prompt)))
    same = rng.random() < 0.2
    made = [[rng.randrange(3, 29) for _ in range(rng.randint(1, 11))] for _ in range(count)]
    ends = [[] if eos is None or rng.random() < 0.4 else [eos] for _ in range(count)]
    return [(*(made[0] if same else ids), *end) for ids, end in zip(made, ends)]


def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
    """The reward function: some completions have the same score, some none."""
    totals = [sum(token for token in ids if token > 2) for ids in completion_ids]
    return [None if total % 9 == 0 else float(total % 5) for total in totals]


class Bench:
    """Models, and one trainer per combination on shared engines."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        self.live = {name: model(seed, name == "classifier") for seed, name in enumerate(("policy", "reference"))}
        self.live["classifier"] = model(5, True)
        self.wide = {name: widened(live) for name, live in self.live.items()}
        self.engines: dict[str, Models] = {}

    def trainer(self, method: str, options: dict[str, Any], parts: Sequence[Part], tokenizer: Any) -> Any:
        """Return a trainer that has prepared its data."""
        number = next(self.numbers)
        given: dict[str, Any] = {"train_dataset": list(parts[0].rows)}
        data: dict[str, Any] = {"column_map": dict(parts[0].column_map)}
        if len(parts) > 1:
            data = {"dataset_mixture": [self.written(part, number, at) for at, part in enumerate(parts)]}
        args = getattr(alignment, f"{NAMES[method]}Config")(
            output_dir=str(self.folder / f"out{number}"),
            deepspeed=STAGES["stage0"],
            gradient_checkpointing=False,
            disable_tqdm=True,
            save_strategy="no",
            **options,
            **data,
        )
        if len(parts) > 1:
            given = {"train_dataset": training_data(args)}
        if method in ("kto", "dpo", "online_dpo"):
            given["ref_model"] = self.live["reference"]
        if method == "online_dpo":
            given["reward_funcs"] = [reward]
        policy = self.live["classifier" if method == "reward" else "policy"]
        cls = getattr(alignment, f"{NAMES[method]}Trainer")
        return cls(model=policy, args=args, processing_class=tokenizer, **given)

    def written(self, part: Part, number: int, at: int) -> dict[str, Any]:
        """Write a dataset of a mixture to a file."""
        file = self.folder / f"rows{number}-{at}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part.rows))
        weight = {} if part.weight is None else {"weight": part.weight}
        return {"dataset_name": str(file), "column_map": dict(part.column_map), **weight}

    def models(self, method: str, trainer: Any) -> Models:
        """Return the engines, which are built once; a precomputed reference is the trainer's own."""
        kind = "classifier" if method == "reward" else "causal"
        if kind not in self.engines:
            first = self.trainer("reward" if kind == "classifier" else "kto", {"max_length": 90}, *self.usual(kind))
            first.engines.build(None)
            self.engines[kind] = first.engines.models
        found = self.engines[kind]
        stores = trainer.engines.stores
        return found if stores is None else Models(found.policy, stores.reference())

    def usual(self, kind: str) -> tuple[list[Part], Any]:
        """Return rows and a tokenizer for building engines."""
        case = {"format": "strings", "odd": "nothing", "max_length": "free", "mixture": "none"}
        tokenizer = tokenizer_of({"tokenizer": "bos", "template": "chatml"})
        return parts_of("reward" if kind == "classifier" else "kto", case), tokenizer

    def window(self, method: str, trainer: Any) -> dict[str, float]:
        """Return loss and metrics of the first window."""
        models, data, eos = self.models(method, trainer), trainer.data.train, trainer.processing_class.eos_token_id
        window_pass = trainer.resources.window_pass(trainer.context, models, None)
        if method == "online_dpo":
            window_pass.rollout.generate = lambda request: [
                [Completion(ids, ids[-1] == eos) for ids in answers(prompt, request.num_generations, eos)]
                for prompt in request.prompts
            ]
        plan = trainer.data.sampler.plan(0, 0)
        batches = MicroBatches(trainer.method.kind.collate, data.batched, plan, 0)
        return means(window_pass(plan, batches, data, train=False).items, trainer.method.logs_sums)


def model(seed: int, classifies: bool) -> Any:
    """Return a random model."""
    torch.manual_seed(seed)
    config = tiny_config("untied")
    config.max_position_embeddings, config.num_labels = POSITIONS, 1
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    made = auto.from_config(config, dtype=torch.float32)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return made


def widened(live: Any) -> Any:
    """Return a float64 copy; a classifier creates its inner model with the dtype of the configuration."""
    twin = copy.deepcopy(live)
    twin.config.dtype = torch.float64
    return widen(twin)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def keys_of(trainer: Any) -> list[Key]:
    """Return dataset, row and label of every tokenized row."""
    data = trainer.data.train
    rows = data.dataset.remove_columns([n for n in data.dataset.column_names if n not in ("row", "label")])[:]
    parts = [number for number, part in enumerate(data.parts) for _ in range(part.report.rows_out)]
    return list(zip(parts, rows["row"], rows.get("label", [None] * len(parts)), strict=True))


def assert_same_tokens(dataset: Any, keys: Sequence[Key], found: dict[Key, Example]) -> None:
    """Compare all rows, which shows a difference more clearly than a loss."""
    for row, key in zip(dataset, keys, strict=True):
        completions = [row[name] for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in row]
        assert (row["prompt_ids"], completions) == (found[key].prompt, list(found[key].completions)), key
        if row.get("scored") is not None:
            assert row["scored"] == found[key].learned, key


def check(bench: Bench, method: str, case: Combination) -> bool:
    """Compare both sides; return whether the case trains on any row."""
    tokenizer = tokenizer_of(case)
    parts = parts_of(method, case)
    options = options_of(method, case, parts, tokenizer)
    setting = Setting(method, options, tokenizer, POSITIONS)
    try:
        found = usable(parts, setting)
    except Refused as refused:
        try:
            bench.trainer(method, options, parts, tokenizer)
        except DataError:
            return False
        raise AssertionError(f"not refused: {refused}") from None
    trainer = bench.trainer(method, options, parts, tokenizer)
    keys, dataset = keys_of(trainer), trainer.data.train.dataset
    check_taken(keys, found, parts, options["max_train_samples"])
    assert_same_tokens(dataset, keys, found)
    plan = trainer.data.sampler.plan(0, 0)
    order = trainer.data.sampler.order(0)
    size = len(order[: trainer.data.sampler.window])
    planned = [pair for micro in plan.micro_batches for own in micro for pair in zip(own.rows, own.partners)]
    assert sorted(order) == list(range(len(keys))), "a permutation"
    assert sorted(row for row, _ in planned) == sorted(order[:size])
    if case["order"] == "sequential" and not case.get("stratify_labels"):
        assert list(order) == sorted(order)
    if case.get("stratify_labels"):
        share = sum(found[key].label for key in keys) / len(keys)
        assert abs(sum(keys[row][2] for row in order[:size]) - share * size) <= 1
    if len(parts) == 1:
        report = trainer.data.train.report
        assert report.prompts_cut == sum(one.prompt_cut for one in found.values())
        assert report.completions_cut == sum(one.completions_cut for one in found.values())
    rows = [found[keys[row]] for row, _ in planned]
    policy, reference = bench.wide["classifier" if method == "reward" else "policy"], bench.wide["reference"]
    if method == "online_dpo":
        expected = online([asked(row, setting) for row in rows], policy, reference, setting)
    else:
        partners = [None if other < 0 else found[keys[other]] for _, other in planned]
        if method == "kto" and options.get("loss_type", "kto") == "kto":
            drawn = [(row, other) for row, other in planned]
            if options["ref_placement"] == "precomputed":
                drawn = list(enumerate(trainer.data.sampler.partners))
            check_partners([(keys[row], None if other < 0 else keys[other]) for row, other in drawn], found)
        expected = window_of(rows, partners, policy, reference, setting)
    measured = bench.window(method, trainer)
    assert not measured.keys() ^ expected.keys()
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=2e-4, abs=2e-4), name
    return True


def asked(row: Example, setting: Setting) -> Prompt:
    """Return a prompt with its completions."""
    tokenizer, count = setting.tokenizer, setting["num_generations"]
    made = answers(row.prompt, count, tokenizer.eos_token_id)
    return Prompt(
        row.prompt,
        [
            Candidate(ids, tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == tokenizer.eos_token_id, value)
            for ids, value in zip(made, reward(made))
        ],
    )


def check_all(bench: Bench, method: str, cases: list[Combination]) -> None:
    failed, trained = [], 0
    for number, case in enumerate(cases):
        try:
            trained += check(bench, method, case)
        except Exception as error:
            failed.append(f"{number} {case}\n  {type(error).__name__}: {str(error)[:600]}")
    assert not failed, f"{len(failed)} of {len(cases)}:\n" + "\n".join(failed)
    assert trained > len(cases) // 2


@pytest.mark.parametrize(
    "part",
    ["most-pairs", pytest.param("all-pairs", marks=pytest.mark.ci), pytest.param("more", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "method", [pytest.param(n, marks=pytest.mark.ci if n in ("dpo", "sft", "reward") else ()) for n in NAMES]
)
def test_the_first_window(bench: Bench, method: str, part: str) -> None:
    """In 300 combinations, which start with those that cover the most pairs of choices."""
    check_all(bench, method, covering(factors(method), allowed, count=PARTS[part].stop)[PARTS[part]])
