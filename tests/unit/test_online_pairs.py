"""Rankings, pairs, micro-batches and win rates from scored completions in Online DPO, and the seeds of its windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.judge_server import Answer, serving
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from alignment.data.kinds.prompts import PromptRow
from alignment.data.report import DataReport
from alignment.data.windows import RowTable, WindowCounts, WindowPlan
from alignment.objectives.dpo import dpo_loss
from alignment.online.completions import Generated, described, samples_of
from alignment.online.pairs import Pair, pair_of, plan_pairs, ranked_batches
from alignment.online.ranking import FirstAnswer, JudgeRanker, Ranking, RewardRanker, best_and_worst
from alignment.online.window import Seeds, window_seeds
from alignment.reporting.metrics import MetricSums, means
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward
from alignment.rewards.judges import Judge
from alignment.rewards.llm_judge import LLMJudge
from alignment.rollout.backend import Completion
from alignment.training.data import PreparedData, PreparedPart

WINDOW = WindowPlan(3, 7, (), (), (), WindowCounts(0, 0, 0, 0, 0))
EOS = 1


def group(row: int, *texts: str, ended: Sequence[bool] = (), prompt: str | None = None) -> Generated:
    """Return a prompt with these texts as completions; token ids are letter codes."""
    ends = [*ended, *[False] * len(texts)]
    completions = [
        Completion((*map(ord, text), EOS) if end else tuple(map(ord, text)), end) for text, end in zip(texts, ends)
    ]
    source = PromptRow(row, prompt or f"prompt {row}", {}, {})
    return Generated(row, source, f"row {row}", (50 + row,) * (row + 1), tuple(completions), texts)


@pytest.mark.parametrize(
    ("scores", "texts", "outcome"),
    [
        ((0.5, -1.0, 3.0, 1.0), "abcd", (2, 1)),
        ((3.0, 1.0, 3.0, 1.0), "abcd", (0, 1)),  # the first of the best, the first of the worst
        ((None, 1.0, 2.0), "abc", (2, 1)),
        ((-1e-12, 0.0), "ab", (1, 0)),
        ((2.0, 2.0, 2.0), "aab", "tied"),
        ((2.0, 2.0), "aa", "identical"),
        ((2.0, 1.0), "aa", "identical"),  # different only by the penalty for a missing end
        ((2.0, 1.5, 1.0), "aba", (0, 1)),
        ((2.0, 1.0, 1.5, 0.0), "aaba", (2, 3)),  # the largest difference between two distinct texts
        ((2.0, None, 2.0), "aba", "identical"),
        ((1.0, None), "ab", "unscored"),
    ],
)
def test_best_and_worst(scores: tuple[float | None, ...], texts: str, outcome: Any) -> None:
    assert best_and_worst(scores, list(texts)) == Ranking(outcome, scores)


def test_a_pair_has_the_generated_ids_better_side_first() -> None:
    one = group(2, "ab", "c", "de", ended=(True, False, True))
    pair = pair_of(one, Ranking((2, 0), (1.0, None, 2.5)))
    assert pair == Pair(2, (52, 52, 52), (ord("d"), ord("e"), EOS), (ord("a"), ord("b"), EOS), (2.5, 1.0))
    judged = pair_of(one, Ranking((1, 0)))
    assert judged == Pair(2, (52, 52, 52), (ord("c"),), (ord("a"), ord("b"), EOS), None)
    for reason in ("tied", "identical", "unscored", "failed"):
        assert pair_of(one, Ranking(reason, (1.0, 1.0, 1.0))) is None


def pairs(count: int, scored: bool = True) -> list[Pair]:
    """Return pairs of rows 10, 11 …, in order of decreasing length."""
    return [
        Pair(
            row=10 + number,
            prompt=tuple(range(2 * (count - number))),
            chosen=tuple(range(100, 101 + number % 3)),
            rejected=(7,) * (1 + number % 2),
            scores=(number + 0.5, -float(number)) if scored else None,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("max_tokens", [None, 24])
@pytest.mark.parametrize(("world", "size"), [(1, 2), (2, 3), (3, 1)])
def test_each_pair_is_assigned_once(world: int, size: int, max_tokens: int | None) -> None:
    given = pairs(5)
    plan = plan_pairs(given, WINDOW, world_size=world, batch_size=size, max_tokens=max_tokens, packs=False)
    assert (plan.epoch, plan.step, plan.counts.rows) == (3, 7, 5)
    assert plan.counts.sequence_tokens == sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in given)
    shares = [ranked_batches(given, plan, rank, 0.25) for rank in range(world)]
    assert {len(share) for share in shares} == {len(plan.micro_batches)}
    assert sorted(row for share in shares for batch in share for row in batch.rows) == [10, 11, 12, 13, 14]
    for micro, batches in enumerate(zip(*shares)):
        assert plan.longest[micro] == max(int(batch.pairs.lengths.sum()) for batch in batches)
        for batch in batches:
            own, chosen = [given[row - 10] for row in batch.rows], len(batch.rows)
            assert batch.beta == 0.25 and batch.pairs.longest == plan.longest[micro]
            scores = [] if batch.scores is None else batch.scores.tolist()
            assert scores == [p.scores[side] for side in (0, 1) for p in own if p.scores]
            targets = batch.pairs.targets.split(batch.pairs.lengths.tolist())
            assert [tuple(part.tolist()) for part in targets] == [p.chosen for p in own] + [p.rejected for p in own]
            if max_tokens is not None and chosen > 1:
                assert batch.pairs.inputs["input_ids"].numel() <= max_tokens
            elif max_tokens is None:
                assert chosen <= size


def test_judged_batches_have_no_scores_and_empty_shares_are_empty() -> None:
    given = pairs(1, scored=False)
    plan = plan_pairs(given, WINDOW, world_size=2, batch_size=2, max_tokens=None, packs=True)
    (own,), (empty,) = (ranked_batches(given, plan, rank, 0.1) for rank in (0, 1))
    assert own.rows == (10,) and own.scores is None
    assert empty.scores is None, "a judge's run must not count missing scores"
    assert empty.rows == () and empty.pairs.tokens == 0 and empty.pairs.longest == plan.longest[0] == 2
    result = dpo_loss(*[torch.zeros(0)] * 4, beta=empty.beta)
    assert result.losses.shape == (0,)
    none = plan_pairs([], WINDOW, world_size=2, batch_size=2, max_tokens=None, packs=True)
    assert (none.counts.rows, none.micro_batches, ranked_batches([], none, 0, 0.1)) == (0, (), [])


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that marks spaces before words, and drops the first one when decoding."""
    words = ["<s>", "</s>", *(f"\u2581{word}" for word in "Lily went to the park".split()), ".", ",", "\u2581,"]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def described_data(prompts: Sequence[Any], columns: Sequence[dict[str, Any]]) -> PreparedData:
    """Return a mixture whose parts have one row each: a prompt and further columns."""
    stored = {"prompt": [*map(json.dumps, prompts)], "template": ["{}"] * len(prompts)}
    dataset = Dataset.from_dict({**stored, "columns": [*map(json.dumps, columns)], "row": [0] * len(prompts)})
    lengths = np.ones(len(prompts), dtype=np.int64)
    parts = tuple(PreparedPart(f"part {number}", DataReport(1, 1)) for number in range(len(prompts)))
    return PreparedData(
        "data", "key", dataset, RowTable(lengths, lengths[:, None]), DataReport(len(prompts), 1), parts
    )


def test_a_text_continues_its_prompt_and_a_message_is_separate() -> None:
    tokenizer = spaced_tokenizer()
    lily, went, to, the, park = range(2, 7)
    data = described_data(["Lily went to", [{"role": "user", "content": "Lily went to"}]], [{}, {}])
    made = [[Completion((the, park, EOS), True)]] * 2
    groups = described([0, 1], [[0, lily, went, to]] * 2, made, data, tokenizer)
    assert [group.texts for group in groups] == [(" the park",), ("the park",)]
    assert [group.place for group in groups] == ["part 0, row 1", "part 1, row 1"]
    assert samples_of(groups, []).completions == [" the park", [{"role": "assistant", "content": "the park"}]]


def test_a_completion_that_continues_a_message_keeps_its_leading_space() -> None:
    lily, went, to, the, park = range(2, 7)
    prompt = [{"role": "user", "content": "Lily"}, {"role": "assistant", "content": "went to"}]
    data = described_data([prompt], [{}])
    made = [[Completion((the, park, EOS), True), Completion((park,), False)]]
    groups = described([0], [[0, lily, went, to]], made, data, spaced_tokenizer())
    given = samples_of(groups, [])  # what reward functions receive
    assert given.prompts == [prompt] * 2
    assert given.completions[0] == [{"role": "assistant", "content": " the park"}]
    shown: list[Any] = []
    judge = Judge(lambda prompts, pairs: [shown.append((prompts, sorted(pairs[0], key=str))), 0][1:])
    JudgeRanker(judge).rank(groups, [], 0, None)
    turns = [[{"role": "assistant", "content": f"went to {text}"}] for text in ("park", "the park")]
    assert shown == [([prompt[:1]], turns)]


def length(completions: list[str]) -> list[float | None]:
    """Score by length; no score for texts that begin with n."""
    return [None if text.startswith("n") else float(len(text)) for text in completions]


def test_rewards_rank_every_prompt_by_its_own_completions() -> None:
    ranker = RewardRanker(Rewards([FunctionReward(length)], [0.5], missing_eos_penalty=2.0))
    texts = [("ab", "abcd"), ("abcd", "abcd"), ("n", "abc"), ("ab", "xy"), ("abc", "abcdef")]
    ends = [(True, True), (True, False), (), (True, True), (True, False)]
    groups = [group(row, *both, ended=end) for row, (both, end) in enumerate(zip(texts, ends))]
    sums = MetricSums(ranker.metrics, torch.device("cpu"), first_rank=True)
    rankings = ranker.rank(groups, [], 0, sums)
    assert rankings == [
        Ranking((1, 0), (1.0, 2.0)),
        Ranking("identical", (2.0, 0.0)),
        Ranking("unscored", (None, -0.5)),
        Ranking("tied", (1.0, 1.0)),
        Ranking((0, 1), (1.5, 1.0)),
    ]
    assert means(sums.items()) == pytest.approx(
        {"objective/scores": 9.0 / 9, "rewards/length/mean": 30 / 9, "rewards/ignored": 0.1}
    )
    assert ranker.rank([], [], 0, sums) == []


def test_wins_compare_first_completions_and_ties_count_half() -> None:
    ranker = RewardRanker(Rewards([FunctionReward(length)]))
    ours = [group(0, "abc", ""), group(1, "ab", "abcd"), group(2, "ab", "a"), group(3, "n", "a"), group(4, "a", "b")]
    theirs = [group(0, "ab"), group(1, "abc"), group(2, "xy"), group(3, "a"), group(4, "n")]
    rankings = [ranker.rank(groups, [], 0, None) for groups in (ours, theirs)]
    others = [FirstAnswer(one.texts[0], ranking.scores[0]) for one, ranking in zip(theirs, rankings[1])]
    assert ranker.wins(ours, rankings[0], others, 0) == [1.0, 0.0, 0.5, None, None]


class Words:
    """Prefers texts later in the alphabet, returns -1 if a text is ``?``, and records its input."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[int]:
        self.shown += pairs
        return [-1 if "?" in pair else int(pair[1] > pair[0]) for pair in pairs]


def test_a_judge_ranks_pairs_and_may_decline() -> None:
    words = Words()
    ranker = JudgeRanker(Judge(words))
    groups = [group(0, "a", "b"), group(1, "b", "a"), group(2, "c", "c"), group(3, "?", "a"), group(4, "a")]
    for seed in range(20):  # in both orders
        rankings = ranker.rank(groups, [], seed, None)
        outcomes = [ranking.outcome for ranking in rankings]
        assert outcomes == [(1, 0), (0, 1), "identical", "failed", "unscored"]
        assert all(ranking.scores is None for ranking in rankings)
    assert ["c", "c"] not in words.shown, "identical texts are not compared"
    assert ["a", "b"] in words.shown and ["b", "a"] in words.shown
    assert ranker.rank([], [], 0, None) == []


def test_a_judge_counts_wins_between_policies() -> None:
    ranker = JudgeRanker(Judge(Words()))
    ours = [group(0, "b", "z"), group(1, "a", "z"), group(2, "c", "z"), group(3, "?", "z")]
    theirs = [group(0, "a"), group(1, "b"), group(2, "c"), group(3, "a")]
    others = [FirstAnswer(one.texts[0], None) for one in theirs]
    for _ in ("once", "twice"):
        for seed in range(20):
            assert ranker.wins(ours, [], others, seed) == [1.0, 0.0, 0.5, None]
        ranker.ask_twice()


def of_trl(prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
    """Prefers the first completion, or one at random if it may shuffle them."""
    return np.random.randint(0, 1 + shuffle_order, len(prompts)).tolist()


@pytest.mark.parametrize("kind", ["function", "TRL", "endpoint"])
def test_a_judge_that_is_asked_twice_and_prefers_a_position_sees_ties(kind: str) -> None:
    with serving(lambda text: Answer("0")) as server:
        codes = {
            "function": lambda prompts, pairs: [0] * len(pairs),
            "TRL": of_trl,
            "endpoint": LLMJudge("m", server.url),
        }
        ranker = JudgeRanker(Judge(codes[kind]))
        groups = [group(row, "a", "z") for row in range(20)]
        others = [FirstAnswer("b", None)] * 20
        assert len(set(ranker.wins(groups, [], others, 0))) == (1 if kind == "endpoint" else 2)
        ranker.ask_twice()
        assert ranker.wins(groups, [], others, 0) == [0.5] * 20


def test_every_window_and_rank_has_its_own_seeds() -> None:
    def seed(run: int, epoch: int, step: int, rank: int, train: bool = True) -> Seeds:
        return window_seeds(run, replace(WINDOW, epoch=epoch, step=step), rank, train=train)

    places = [
        (run, epoch, step, rank) for run in (0, 1, 42) for epoch in range(3) for step in range(5) for rank in (0, 1)
    ]
    seeds = {place: seed(*place) for place in places}
    assert len({one for three in seeds.values() for one in three}) == 3 * len(places)
    assert seeds == {place: seed(*place) for place in places}
    evaluations = {(run, rank): seed(run, 0, 0, rank, train=False) for run in (0, 1, 42) for rank in (0, 1)}
    assert len({*evaluations.values(), *seeds.values()}) == len(evaluations) + len(seeds)
    # All evaluations use the same random numbers, so that only the policy makes a difference.
    assert seed(42, 2, 4, 1, train=False) == evaluations[42, 1]
