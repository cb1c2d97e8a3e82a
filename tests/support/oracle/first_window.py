"""The first window of a run in float64: which rows it may contain, and its loss and metrics.

Which rows a seed selects, their order and KTO's partners are the run's choice: this module checks what the
documentation says about them, and computes everything that follows. Nothing of the package is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from support.oracle.dense import (
    CPOOptions,
    DPOOptions,
    KTOOptions,
    cpo_objective,
    dpo_objective,
    kto_objective,
    reward_objective,
)
from support.oracle.pairs import Prompt, pairs_of
from support.oracle.rows import Example, Refused, Setting, examples
from support.oracle.wide import wide_maths
from torch import Tensor, nn

Key = tuple[int, int, Any]  # number of the dataset in the mixture, number of the row in it, label
Metrics = dict[str, float]


@dataclass(frozen=True)
class Part:
    """A dataset of raw rows, with its columns and its weight in the mixture."""

    rows: Sequence[Mapping[str, Any]]
    column_map: Mapping[str, str]
    weight: float | None = None


def usable(parts: Sequence[Part], setting: Setting) -> dict[Key, Example]:
    """Return all examples that a run may train on, before rows of a mixture are sampled."""
    limit = setting["max_train_samples"] if len(parts) == 1 else None
    found = {
        (part, row, label): example
        for part, given in enumerate(parts)
        for (row, label), example in examples(given.rows[:limit], given.column_map, setting).items()
    }
    sizes = Counter(part for part, _, _ in found)
    shares = [] if len(sizes) < len(parts) else _shares(sizes, parts, setting["max_train_samples"])
    if not shares or shares[0] < 0.5 or min(shares[1:], default=1) <= 0.5:
        raise Refused("no row of a dataset is used")
    return found


def _shares(sizes: Mapping[int, int], parts: Sequence[Part], limit: int | None) -> list[Fraction]:
    """Return how many rows of each dataset the largest mixture without repetitions has, as fractions."""
    weights = [Fraction(part.weight or sizes[number]) for number, part in enumerate(parts)]
    largest = min(int(sizes[number] * sum(weights) / weight) for number, weight in enumerate(weights))
    total = largest if limit is None else min(limit, largest)
    return [(largest if len(parts) == 1 else total) * weight / sum(weights) for weight in weights]


def check_taken(taken: Sequence[Key], found: Mapping[Key, Example], parts: Sequence[Part], limit: int | None) -> None:
    """Check the rows of a mixture: none twice, in the proportions of the weights or sizes, as many as possible."""
    assert len(set(taken)) == len(taken) and set(taken) <= found.keys()
    assert list(taken) == sorted(taken, key=lambda key: (key[0], key[1], key[2] is False)), "in the order of the data"
    sizes, used = Counter(part for part, _, _ in found), Counter(part for part, _, _ in taken)
    shares = _shares(sizes, parts, limit)
    assert used.total() == sum(shares), f"{dict(used)} of {dict(sizes)} is not the largest mixture"
    assert all(abs(used[number] - share) < 1 for number, share in enumerate(shares)), f"{dict(used)} for {shares}"


def check_partners(pairs: Sequence[tuple[Key, Key | None]], found: Mapping[Key, Example]) -> None:
    """Check that partners are a permutation in which nobody is its own, with another prompt whenever possible."""
    if len(pairs) == 1:
        assert pairs[0][1] is None
        return
    assert {row for row, _ in pairs} == {partner for _, partner in pairs}
    assert all(row != partner for row, partner in pairs)
    prompts = Counter(found[row].requested for row, _ in pairs)
    alike = sum(found[row].requested == found[partner].requested for row, partner in pairs if partner)
    assert alike == max(0, 2 * max(prompts.values()) - len(pairs))


@dataclass(frozen=True)
class Scored:
    """Of each token of a completion: log-prob, entropy, mean logit, and whether it is the most likely one."""

    logps: Tensor
    entropy: Tensor
    logits: Tensor
    hits: Tensor


@torch.no_grad()
def scored(model: nn.Module, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
    """Score completions after their prompts, in batches of similar lengths, padded on the right."""
    found: dict[int, Scored] = {}
    groups: dict[int, list[int]] = {}
    for place, (prompt, completion) in enumerate(sequences):
        groups.setdefault((len(prompt) + len(completion)).bit_length(), []).append(place)
    for places in groups.values():
        ids = [torch.tensor([*sequences[place][0], *sequences[place][1]]) for place in places]
        with wide_maths():
            logits = model(input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False).logits
        for own, given, place in zip(logits, ids, places):
            start = len(sequences[place][0])
            before, target = own[start - 1 : len(given) - 1], given[start:]
            logps = before.log_softmax(-1)
            entropy, hits = -(logps.exp() * logps).sum(-1), (before.argmax(-1) == target).double()
            found[place] = Scored(logps.gather(1, target[:, None])[:, 0], entropy, before.mean(-1), hits)
    return [found[place] for place in range(len(sequences))]


def _sums(all_scored: Sequence[Scored]) -> Tensor:
    return torch.stack([each.logps.sum() for each in all_scored])


def _mean(all_scored: Sequence[Scored], name: str) -> float:
    return float(torch.cat([getattr(each, name) for each in all_scored]).mean())


def _distributions(sides: Mapping[str, Sequence[Scored]]) -> Metrics:
    logits = {f"logits/{name}": _mean(side, "logits") for name, side in sides.items() if side}
    return {"entropy": _mean([each for side in sides.values() for each in side], "entropy"), **logits}


def kto(
    rows: Sequence[Example], partners: Sequence[Example | None], policy: nn.Module, reference: nn.Module, o: Setting
) -> Metrics:
    """KTO and APO-zero; a partner's completion is cut where it would exceed ``max_length``."""
    own, count = [(row.prompt, row.completions[0]) for row in rows], len(rows)
    drawn = [(row, partner.completions[0]) for row, partner in zip(rows, partners) if partner is not None]
    others = [(row.prompt, ids[: o["max_length"] - len(row.prompt)]) for row, ids in drawn]
    now, fixed = scored(policy, [*own, *others]), scored(reference, [*own, *others])
    ratios = _sums(now)[count:] - _sums(fixed)[count:]
    options, labels = KTOOptions(**_given(o, KTOOptions)), [bool(row.label) for row in rows]
    _, metrics = kto_objective(_sums(now)[:count], _sums(fixed)[:count], labels, ratios, options)
    if options.loss_type != "kto":
        del metrics["kl"]
    sides = {
        name: [each for each, label in zip(now, labels) if label is wanted]
        for name, wanted in (("chosen", True), ("rejected", False))
    }
    metrics |= _distributions(sides)
    for name, side in sides.items():
        metrics[f"count/{name}"] = number = len(side)
        for what, weight in (("rewards", number), ("logps", number), ("logits", sum(len(s.logps) for s in side))):
            metrics[f"{what}/{name}_sum"] = metrics.get(f"{what}/{name}", 0.0) * weight
    return metrics


def _given(o: Setting, options: Any) -> dict[str, Any]:
    fields = options.__dataclass_fields__.keys() - {"max_length"}
    return {name: value for name, value in o.options.items() if name in fields}


def pairs(rows: Sequence[Example], policy: nn.Module, reference: nn.Module, o: Setting) -> Metrics:
    """CPO, DPO, and the pairs of Online DPO."""
    sequences, count = [(row.prompt, row.completions[side]) for side in (0, 1) for row in rows], len(rows)
    now = scored(policy, sequences)
    good, bad = now[:count], now[count:]
    lengths = [len(each.logps) for each in good], [len(each.logps) for each in bad]
    own, distributions = (_sums(good), _sums(bad)), _distributions({"chosen": good, "rejected": bad})
    if o.method == "cpo":
        given = _given(o, CPOOptions)
        if o["gamma_beta_ratio"] is not None:
            given["simpo_gamma"] = o["gamma_beta_ratio"] * given["beta"]
        return cpo_objective(*own, lengths, CPOOptions(**given))[1] | distributions
    before = _sums(scored(reference, sequences))
    options = DPOOptions(**_given(o, DPOOptions), means=o.method == "dpo")
    _, metrics = dpo_objective(own, (before[:count], before[count:]), options, lengths)
    if o.method == "dpo":
        return {name: value for name, value in metrics.items() if "objective" not in name} | distributions
    spread = float(torch.stack([each.entropy.sum() for each in now]).mean())
    return metrics | {"entropy": distributions["entropy"], "objective/entropy": spread}


def online(prompts: Sequence[Prompt], policy: nn.Module, reference: nn.Module, o: Setting) -> Metrics:
    """Online DPO on given completions, in the first epoch."""
    rows, metrics = pairs_of(prompts, o["missing_eos_penalty"] or 0.0)
    beta = o.options.get("beta", 0.1)
    metrics["beta"] = beta = beta[0] if isinstance(beta, list) else beta
    if not rows:
        return metrics
    given = Setting(o.method, {**o.options, "beta": beta}, o.tokenizer, o.positions)
    trained = [Example(row["prompt_ids"], (row["chosen_ids"], row["rejected_ids"])) for row in rows]
    metrics |= pairs(trained, policy, reference, given)
    scores = torch.tensor([row["scores"] for row in rows])
    return metrics | {"objective/rlhf_reward": float(scores.mean()) + metrics["objective/non_score_reward"]}


def sft(rows: Sequence[Example], policy: nn.Module, o: Setting) -> Metrics:
    """The mean over all learned tokens of the window."""
    now = scored(policy, [(row.prompt, row.completions[0]) for row in rows])
    learned = torch.tensor([value for row in rows for value in row.learned])
    tokens = Scored(*(torch.cat([getattr(each, name) for each in now])[learned] for name in vars(now[0])))
    weights = tokens.logps.exp() if o["loss_type"] == "dft" else 1.0
    loss = float(-(weights * tokens.logps).mean())
    return {"loss": loss, "entropy": _mean([tokens], "entropy"), "mean_token_accuracy": _mean([tokens], "hits")}


@torch.no_grad()
def reward(rows: Sequence[Example], policy: Any, o: Setting) -> Metrics:
    """The Bradley-Terry loss of the scores at the last tokens."""
    scores = []
    for ids in [[*row.prompt, *row.completions[side]] for side in (0, 1) for row in rows]:
        with wide_maths():
            states = policy.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
            scores.append(policy.score(states[0, -1])[0])
    better, worse = torch.stack(scores).chunk(2)
    margins = torch.tensor([row.margin for row in rows], dtype=torch.float64)
    return reward_objective(better, worse, margins, o["center_rewards_coefficient"] or 0.0)[1]


def window_of(
    rows: Sequence[Example], partners: Sequence[Example | None], policy: nn.Module, reference: nn.Module, o: Setting
) -> Metrics:
    """Return loss and metrics of a window."""
    if o.method in ("kto", "sft"):
        return kto(rows, partners, policy, reference, o) if o.method == "kto" else sft(rows, policy, o)
    return reward(rows, policy, o) if o.method == "reward" else pairs(rows, policy, reference, o)
