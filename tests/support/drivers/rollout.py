"""Rollouts on two ranks that stop at very different lengths, at every stage and backend, and the training after them.

Usage: rollout.py SPEC, a JSON file with ``{"model"}``; what each rank found goes to ``rank0.json`` and ``rank1.json``
beside it. ``policy_engine`` and ``train`` serve tests of one process as well.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import parameter_offload
from support.helpers import STAGES, tiny_config
from torch import Tensor
from transformers import PreTrainedModel

from alignment.checkpoint.saving import gathered_state_dict
from alignment.cli.guarded import guarded
from alignment.data.batching import collate
from alignment.engines.collectives import gathered
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import PolicyEngine, checked
from alignment.models.loading import load_model
from alignment.models.scorer import CompletionScorer
from alignment.models.tasks import CAUSAL_LM
from alignment.rollout import memory
from alignment.rollout.backend import RolloutRequest, Sampling
from alignment.rollout.engine import RolloutEngine
from alignment.run.ranks import rank, world_size

EOS, PAD = 1, 2
VOCABULARY = tiny_config("untied").vocab_size
PROMPTS = [[0, 5, 9, 11], [0], [0, 7, 8, 9, 10, 11, 12, 30, 31, 32, 33, 34, 35, 4], [0, 9]]
SEQUENCES = [
    [([0, 5, 9, 11], [3, 40, 8, 8, 21, 1]), ([0, 7], [30, 2, 17])],
    [([0, 4, 6], [12, 44, 13, 9, 50, 31, 33, 1])],
    [([0, 9], [5, 5, 6])],
]
STAGES_AND_WAYS = {
    "stage0": ("generate", "continuous"),
    "stage2": ("generate",),
    "stage3": ("continuous", "by layer"),
    "stage3-offload": ("generate", "continuous", "by layer"),
}
Between = Callable[[PolicyEngine, int], None]


@contextlib.contextmanager
def drawn() -> Iterator[list[tuple[int, float]]]:
    """Record what is sampled within this context: each token with the log-prob that it was drawn with."""
    found: list[tuple[int, float]] = []
    multinomial = torch.multinomial

    def recorded(probabilities: Tensor, **given: Any) -> Tensor:
        tokens = multinomial(probabilities, **given)
        found.extend(zip(tokens[:, 0].tolist(), probabilities.gather(1, tokens).log()[:, 0].tolist()))
        return tokens

    with mock.patch.object(torch, "multinomial", recorded):
        yield found


def sgd(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD with a large learning rate."""
    return torch.optim.SGD(weights, lr=0.1)


def policy_engine(
    model: str,
    stage: str,
    adapted: Callable[[PreTrainedModel, dict[str, Any]], None] | None = None,
    made: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float32,
    further: dict[str, Any] | None = None,
    **loaded: Any,
) -> PolicyEngine:
    """A policy at one of ``helpers.STAGES``; ``adapted`` puts adapters into it, ``made`` creates the optimizer.

    ``further`` are sections of the engine's configuration, ``loaded`` arguments of ``load_model``.
    """
    init_distributed(use_cpu=True)
    config = STAGES[stage] | {
        "train_batch_size": world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **(further or {}),
    }
    scorer = CompletionScorer(load_model(model, dtype, ds_config=config, **loaded))
    if adapted is not None:
        adapted(scorer.model, config)
    optimizer = made([parameter for parameter in scorer.parameters() if parameter.requires_grad])
    policy = PolicyEngine(scorer, config, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    return policy if adapted is None else checked(policy, CAUSAL_LM)


def sampling(**more: Any) -> Sampling:
    """8 tokens at temperature 1, or until the tokenizer's EOS."""
    return Sampling(**{"max_new_tokens": 8, "eos_token_ids": (EOS,), "pad_token_id": PAD, **more})


def train(
    model: str, stage: str, between: Between = lambda policy, step: None, steps: int = 3, **made: Any
) -> dict[str, Tensor]:
    """The weights after some steps of two micro-batches, with ``between`` called before each step.

    ``made`` are further arguments of :func:`policy_engine`.
    """
    policy = policy_engine(model, stage, **made)
    stack = list(parameter_offload.FWD_MODULE_STACK)
    for step in range(steps):
        between(policy, step)
        assert policy.engine.module.training and parameter_offload.FWD_MODULE_STACK == stack
        for micro in range(2):
            batch = collate(SEQUENCES[(step + micro + rank()) % 3], 20)
            with policy.inference():
                policy.forward(batch)
            policy.backward(-policy.forward(batch).scores.mean(), last=micro == 1)
        policy.step()
    weights = gathered_state_dict(policy.scorer.model, keep=True)
    policy.close()
    return weights


def whole(policy: PolicyEngine) -> list[str]:
    """Names of the weights that are gathered on this rank but should not be."""
    return [
        name
        for name, parameter in policy.scorer.named_parameters()
        if policy.partitioned and parameter.ds_status.name != "NOT_AVAILABLE" and not parameter.ds_persist
    ]


def below_the_likeliest(policy: PolicyEngine, prompt: Sequence[int], ids: Sequence[int]) -> float:
    """Return by how much the logits of a completion's tokens are below the highest ones, at most."""
    logits = policy.scorer.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return float((logits.amax(-1) - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).max())


class FailsAt:
    """A forward hook that raises at its ``n``-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("a layer failed")


def failing_rollout(policy: PolicyEngine, step: int, rollout: RolloutEngine) -> None:
    """A rollout during which a layer of this rank fails."""
    hook = policy.scorer.model.model.layers[1].mlp.register_forward_hook(FailsAt(4))
    try:
        rollout.generate(RolloutRequest(PROMPTS, 2, sampling(), step))
    except (RuntimeError, ValueError) as error:
        assert "a layer failed" in str(error)
    else:
        raise AssertionError("the rollout should have failed")
    finally:
        hook.remove()


def lengths(rollout: RolloutEngine, prompts: list[list[int]], seed: int, **more: Any) -> list[list[int]]:
    """The lengths of two completions of each prompt."""
    answers = rollout.generate(RolloutRequest(prompts, 2, sampling(**more), seed))
    return [[len(completion.ids) for completion in completions] for completions in answers]


def unequal(policy: PolicyEngine, backend: str, gather: bool) -> dict[str, Any]:
    """Rollouts of one engine with very different work on each rank."""
    rollout = RolloutEngine(policy, backend, gather=gather, batch_size=4, longest_context=64)
    # Every token ends a completion on one rank, none on the other; then one rank has no prompts at all.
    stops = {"eos_token_ids": tuple(range(VOCABULARY))}
    runs = {"eos_token_ids": ()}
    first, second = (stops, runs) if rank() == 0 else (runs, stops)
    found = {
        "first stops": lengths(rollout, PROMPTS[: 4 - 3 * rank()], 1, **first),
        "second stops": lengths(rollout, PROMPTS[: 4 - 3 * rank()], 2, **second),
        "second has none": lengths(rollout, [] if rank() else PROMPTS, 3),
        "first has none": lengths(rollout, PROMPTS if rank() else [], 4, **runs),
    }
    return found | {"described": rollout.describe(), "whole": whole(policy)}


def token_step(policy: PolicyEngine) -> float:
    """The gradient norm of a token loss, with no tokens on the second rank."""
    scores = policy.forward(collate([] if rank() else SEQUENCES[0], 9), tokens=True)
    assert scores.token_logps is not None
    policy.backward(scores.token_logps.exp().sum() / 9, last=True)
    return policy.step()


def fitting(policy: PolicyEngine) -> int:
    """Number of completions that fit if the first rank's device has space for 40 and the second's for 5."""
    each = memory.completion_bytes(policy.scorer.model.config, policy.scorer.model.dtype.itemsize, 64)
    free = int((5 if rank() else 40) * each / 0.8) + 1
    with mock.patch.object(memory, "free_bytes", lambda where: free):
        return memory.measure_room(policy.scorer.model, 64, gather=False, batch_size=None, generations=2).batch_size


def unaffected(model: str) -> bool:
    """Whether training after rollouts, with fewer prompts or a failure on one rank, is that without any."""

    def between(policy: PolicyEngine, step: int) -> None:
        rollout = RolloutEngine(policy, "generate", gather=step == 1, longest_context=64)
        if step == 1 and rank() == 0:
            failing_rollout(policy, step, rollout)
        else:
            rollout.generate(RolloutRequest(PROMPTS[: 4 - 2 * rank()], 2, sampling(), step))

    plain, after = train(model, "stage3"), train(model, "stage3", between)
    return all(torch.equal(after[name], weight) for name, weight in plain.items())


def main() -> None:
    """Run everything."""
    gc.freeze()  # DeepSpeed collects garbage with every engine, which scans every library
    spec = Path(sys.argv[-1])
    model = json.loads(spec.read_text())["model"]
    found: dict[str, Any] = {}
    for stage, ways in STAGES_AND_WAYS.items():
        policy = policy_engine(model, stage)
        for way in ways:
            gather = way != "by layer"
            found[f"{stage} {way}"] = unequal(policy, way if gather else "auto", gather)
        found["fits"] = fitting(policy)
        found[f"{stage} tokens"] = token_step(policy)
        policy.close()
    found["unaffected"] = unaffected(model)
    assert all(gathered(True))
    spec.with_name(f"rank{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(guarded(main, use_cpu=True))
