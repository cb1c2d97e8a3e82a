"""The expected results of the runs of ``test_split_invariance.py``: their steps in dense float64."""

from __future__ import annotations

import json
from typing import Any

import torch

from support.data_tokenizers import char_tokenizer
from support.drivers import canned
from support.oracle.dense import CPOOptions, DPOOptions, KTOOptions, Step, load, solve
from support.oracle.distributions import distribution_metrics
from support.oracle.pairs import Candidate, Prompt, pairs_of
from support.split_runs import METHOD

OnlineSteps = tuple[list[Step | None], list[dict[str, float]], torch.nn.Module]


def oracle_steps(outcome: dict[str, Any]) -> list[Step]:
    """Compute both steps in float64, the second one from the float64 weights after the first."""
    run, steps = outcome["run"], []
    args = run["args"]
    common = {"max_length": 64, "learning_rate": args["learning_rate"], "max_grad_norm": args["max_grad_norm"] or None}
    own = {
        name: args[name]
        for name in ("loss_type", "loss_weights", "discopop_tau", *METHOD[run["trainer"]])
        if name in args
    }
    if run["trainer"] == "DPO":
        own["means"] = True
    options = {"KTO": KTOOptions, "CPO": CPOOptions, "DPO": DPOOptions}[run["trainer"]](**own, **common)
    model = load(run["model"])
    for rows in outcome["windows"]:
        steps.append(solve(model, rows, options, run["ref_model"]))
        steps[-1].metrics.update(distribution_metrics(model, rows, options.max_length))
        advance(model, steps[-1])
    return steps


@torch.no_grad()
def advance(model: torch.nn.Module, step: Step) -> None:
    for name, parameter in model.named_parameters():
        parameter += step.update[name]


def answered(rows: list[dict[str, Any]], count: int) -> list[Prompt]:
    """Return prompts with the given completions."""
    tokenizer, prompts = char_tokenizer(), []
    for row in rows:
        prompt = json.loads(row["prompt"]) if "prompt_ids" in row else row["prompt"]
        ids, made = tokenizer(prompt)["input_ids"], []
        for number in range(count):
            one = canned.completion(ids, number, count)
            text = canned.written(one)
            made.append(Candidate(one, text, one[-1] == canned.EOS, canned.score(prompt, text)))
        prompts.append(Prompt(ids, made))
    return prompts


def online_steps(outcome: dict[str, Any]) -> OnlineSteps:
    """Compute every step in float64 (None for a window without pairs), the window logs, and the final model."""
    run, windows = outcome["run"], outcome["windows"]
    args, model = run["args"], load(run["model"])
    betas = args["beta"] if isinstance(args["beta"], list) else [args["beta"]] * len(windows)
    steps: list[Step | None] = []
    logs, tokens = [], 0
    for number, window in enumerate(windows):
        rate = args["learning_rate"]
        if args["lr_scheduler_type"] == "linear":
            rate *= 1 - number / len(windows)
        prompts = answered(window, args.get("num_generations", 2))
        pairs, metrics = pairs_of(prompts, args.get("missing_eos_penalty", 0.0))
        metrics |= {"beta": betas[number], "grad_norm": 0.0, "learning_rate": rate}
        step = None
        if pairs:
            options = DPOOptions(loss_type=args.get("loss_type", "sigmoid"), beta=betas[number], learning_rate=rate)
            step = solve(model, pairs, options, run["ref_model"])
            metrics |= {**step.metrics, **entropies(model, pairs), "grad_norm": step.grad_norm}
            advance(model, step)
        tokens += sum(2 * len(p["prompt_ids"]) + len(p["chosen_ids"]) + len(p["rejected_ids"]) for p in pairs)
        steps.append(step)
        logs.append({**metrics, "num_tokens": tokens, "step": number + 1})
    return steps, logs, model


def entropies(model: torch.nn.Module, pairs: list[dict[str, Any]]) -> dict[str, float]:
    found = distribution_metrics(model, pairs, None)
    return {name: found[name] for name in ("entropy", "objective/entropy")}
