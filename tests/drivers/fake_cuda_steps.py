"""Traces a step of every method on a fake CUDA device: ``python fake_cuda_steps.py LIBRARY RESULT.json [CASE ...]``.

LIBRARY is built from ``data/fake_cuda.cpp``. RESULT: for each method and kind of weights the number of gradients, or
what went wrong. With MIXED=1 in the environment one tensor of each window stays in host memory.
"""

from __future__ import annotations

import ctypes
import sys

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch

import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from fake_cuda import CUDA, TracedEngine, check_devices, faked, onto_cuda, pack, tracing  # noqa: E402
from helpers import tiny_config  # noqa: E402
from peft import LoraConfig  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402

from alignment.config.options import AlignmentConfig  # noqa: E402
from alignment.config.registry import METHODS  # noqa: E402
from alignment.data.batching import (  # noqa: E402
    Batch,
    CompletionBatch,
    PreferenceBatch,
    UnpairedBatch,
    collate,
    collate_preference_ids,
)
from alignment.data.windows import WindowCounts  # noqa: E402
from alignment.engines.phases import Phases  # noqa: E402
from alignment.models.loading import enable_checkpointing  # noqa: E402
from alignment.online.pairs import RankedBatch  # noqa: E402
from alignment.references.base import RowIds  # noqa: E402
from alignment.reporting.metrics import MetricSums  # noqa: E402
from alignment.training.method import Models, Window  # noqa: E402
from alignment.training.window import WindowPass  # noqa: E402

KINDS = ("full", "lora", "4-bit")
PAIRS = [((0, 5, 9), (3, 40, 1), (8, 8, 21, 1)), ((0, 7), (30, 1), (17, 2, 2, 2, 2, 1))]
COUNTS = WindowCounts(rows=4, desirable=2, partnered=4, first_completion_tokens=10, sequence_tokens=50)


def unpaired() -> UnpairedBatch:
    own = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
    others = [(prompt, rejected) for prompt, _, rejected in PAIRS]
    parts = {"matched": own, "mismatched": others, "joint": own + others}
    batches = {name: collate(sequences, 20) for name, sequences in parts.items()}
    return UnpairedBatch(rows=(0, 1), partners=(1, 0), labels=torch.tensor([True, False]), **batches)


def pairs(kind: type[PreferenceBatch] = PreferenceBatch, **more: Any) -> PreferenceBatch:
    plain = collate_preference_ids((0, 1), PAIRS, 20)
    return kind(rows=plain.rows, pairs=plain.pairs, **more)


BATCHES: dict[str, Callable[[], Any]] = {
    "kto": unpaired,
    "cpo": pairs,
    "dpo": pairs,
    "online_dpo": lambda: pairs(RankedBatch, scores=torch.tensor([1.0, 2.0, 0.5, 0.1]), beta=0.1),
    "sft": lambda: CompletionBatch((0, 1), collate([(prompt, chosen) for prompt, chosen, _ in PAIRS], 20)),
    "reward": lambda: pairs(margins=torch.tensor([0.5, 0.0])),
}


class TracedReference:
    """A reference on the fake device."""

    def __init__(self, engine: TracedEngine) -> None:
        self.engine = engine

    def sequence_logps(self, batch: Batch, ids: RowIds) -> torch.Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        return self.engine.sequence_scores(batch)

    def token_logps(self, batch: Batch, ids: RowIds) -> torch.Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        return self.engine.token_logps(batch)

    def close(self) -> None:
        """Nothing to release."""


def scorer_of(method: Any, weights: str, architecture: str) -> Any:
    """A tiny model in its scorer, with its trained parameters."""
    config = tiny_config(architecture)
    config.num_labels, config.pad_token_id = 1, 2
    auto = AutoModelForSequenceClassification if method.options.method == "reward" else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    if weights == "4-bit":
        pack(model)
    scorer = method.task.scorer(model, False)
    if weights != "full":
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    if method.options.gradient_checkpointing:
        enable_checkpointing(model, None)
    return scorer


def step(method: Any, weights: str, architecture: str) -> int:
    """Trace two micro-batches of a window, forward and backward; the number of gradients."""
    scorers = [scorer_of(method, weights, architecture) for _ in range(2)]
    real = [replace(BATCHES[method.options.method](), rows=(2 * n, 2 * n + 1)) for n in range(2)]
    mode = FakeTensorMode()
    for scorer in scorers:
        onto_cuda(scorer, mode)
    batches = [faked(batch, mode) for batch in real]
    # On the host, where there are values: the end of each sequence, for a reward model.
    scored = {batch.rows: faked(method.scored(batch), mode) for batch in real}
    method.scored = lambda batch: scored[batch.rows]
    with tracing(mode):
        policy = TracedEngine(scorers[0])
        reference = TracedReference(TracedEngine(scorers[1])) if method.needs_reference else None
        models, phases = Models(policy, reference), Phases(torch.device("cpu"))
        window_pass = WindowPass(method, models, phases, None)
        sums = MetricSums((*window_pass.names, "objective/rlhf_reward", "objective/scores_margin"), CUDA, True)
        window = Window(batches, COUNTS, models, sums, phases, "train")
        with torch.no_grad():
            known = method.before_training(window)
        if os.environ.get("MIXED"):
            mixed = sums.add
            sums.add = lambda name, total, count: mixed(name, total + torch.zeros(1), count)  # type: ignore[method-assign]
        for index, batch in enumerate(batches):
            policy.backward(window_pass._micro_batch(batch, index, known, window, []), last=index == 1)
        return check_devices(policy)


def options_of(name: str, **more: Any) -> AlignmentConfig:
    made: AlignmentConfig = METHODS[name](output_dir="out", use_cpu=True, **{"gradient_checkpointing": False, **more})
    return made


def main() -> None:
    """Trace everything, and write the results."""
    found: dict[str, Any] = {}
    cases: list[tuple[str, str, dict[str, Any], str]]
    cases = [(name, kind, {}, "untied") for name, kind in itertools.product(BATCHES, KINDS)]
    cases += [
        ("kto", "full", {"loss_type": "apo_zero_unpaired"}, "tied"),
        ("kto", "lora", {"gradient_checkpointing": True}, "untied"),
        ("cpo", "full", {"loss_type": "simpo"}, "capped"),
    ]
    for name, kind, more, architecture in cases:
        label = "/".join([name, kind, *map(str, more.values())])
        if sys.argv[3:] and label not in sys.argv[3:]:
            continue
        try:
            options = options_of(name, **more)
            method = METHODS.trainer(options).method_class(options)
            found[label] = step(method, kind, architecture)
        except Exception as error:
            found[label] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
