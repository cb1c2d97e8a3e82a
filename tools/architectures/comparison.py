"""Compare log-probs and gradients of a tiny model from the scorer with those from the model's logits and autograd."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from alignment.config.errors import ModelError, first_line
from alignment.data.batching import collate
from alignment.models.architectures import REFUSED
from alignment.models.checking import check_scorer, why_not_packed
from alignment.models.loading import disable_dropout
from alignment.models.scorer import CompletionScorer
from alignment.models.source import read_config
from alignment.rollout.memory import completion_bytes
from tools.architectures.experts import examine_experts
from tools.architectures.tiny import tiny_config, tiny_model

LENGTHS = (12, 9, 5)  # lengths of the rows of a batch, padded on the right
SHARED = (0, 2)  # rows with a common prefix
TOLERANCE = 1e-4  # for fp32, relative to the largest log-prob and to the norm of the gradient


@dataclass(frozen=True)
class Result:
    """The result for one model type: why it is refused, None if it is not, the relative differences of log-probs and
    gradients (:func:`relative`), why its sequences are padded, None if they are also compared in one row, and the
    result for experts in 4 bits (:func:`examine_experts`).
    """

    model_type: str
    refused: str | None = None
    logps: float = 0.0
    gradient: float = 0.0
    note: str = ""
    unpacked: str | None = None
    experts: str = ""

    @property
    def exact(self) -> bool:
        """Whether the type is supported and the results only differ by rounding."""
        return self.refused is None and self.logps < TOLERANCE and self.gradient < TOLERANCE

    @property
    def good(self) -> bool:
        """Whether the type is exact or refused, and so are its experts."""
        return (self.exact or self.refused is not None) and self.experts in ("", "exact", "refused")

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        named = (self.model_type, types()[self.model_type])
        if self.refused is not None:
            return *named, "refused", "", "", "", "", self.refused
        word = "exact" if self.exact else "**differs**"
        rows = "packed" if self.unpacked is None else f"padded: {self.unpacked}"
        return *named, word, f"{self.logps:.0e}", f"{self.gradient:.0e}", rows, self.experts, self.note


def types() -> dict[str, str]:
    """Return every type of causal language model in the installed transformers, with its class."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return {name: value if isinstance(value, str) else value[0] for name, value in sorted(names)}


def examine(model_type: str) -> Result:
    """Examine a type. It may be refused as for a user: when the model is passed, loaded or checked."""
    if model_type in REFUSED:  # some of these have no tiny model
        return Result(model_type, REFUSED[model_type])
    try:
        _check_config(tiny_config(model_type))
        return _compared(model_type, tiny_model(model_type))
    except ModelError as error:
        return Result(model_type, str(error).rpartition(f"({model_type})")[2].strip())
    except ImportError as error:  # reported by load_model as a model that could not be loaded
        return Result(model_type, f"could not be loaded: {first_line(error)}")
    except Exception as error:  # the crash that a user would see
        return Result(model_type, None, torch.inf, torch.inf, f"{type(error).__name__}: {first_line(error)}")


def _check_config(config: PretrainedConfig) -> None:
    """Validate a checkpoint with this configuration as a run does before weights are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({"weight": torch.zeros(1)}, Path(folder) / "model.safetensors")
        try:
            read_config(folder, key="model", trust_remote_code=False)
        except ModelError as error:
            reason = str(error).replace(f"model: {folder!r} is", "it is")
            raise ModelError(f"({config.model_type}) {reason}") from error


def _compared(model_type: str, model: PreTrainedModel) -> Result:
    completion_bytes(model.config, 4, 100)  # the check of Online DPO before the first rollout
    model.train()
    disable_dropout(model)
    note = ""
    if not torch.equal(*(from_logits(model)[0] for _ in range(2))):
        note = "random in training mode (compared in evaluation mode)"
        model.eval()
    expected, gradient = from_logits(model)
    rows = _rows(model)
    scorer = CompletionScorer(model)
    check_scorer(scorer, torch.device("cpu"))
    scorer.train(not note)
    padded = collate([(row[:1].tolist(), row[1:].tolist()) for row in rows], sum(LENGTHS), groups=[SHARED])
    unpacked = why_not_packed(scorer, torch.device("cpu"))
    differences = []
    for batch in (padded, *([] if unpacked else [padded.packed()])):
        scored = scorer(batch.inputs, batch.positions, batch.targets, batch.longest)
        with scorer.attending():
            differences.append(relative(_with_gradient(model, scored.scores), (expected, gradient)))
    logps, gradients = (max(each) for each in zip(*differences, strict=True))
    return Result(model_type, None, logps, gradients, note, unpacked, examine_experts(tiny_model(model_type)))


def relative(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the relative differences of log-probs and of their gradients."""
    logps = (found[0] - expected[0]).abs().max() / expected[0].abs().max()
    return float(logps), float((found[1] - expected[1]).norm() / expected[1].norm())


def from_logits(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the log-probs of each row's tokens, except the first, from the model's logits, and their gradients."""
    logps = []
    for row in _rows(model):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        logps.append(logits.log_softmax(-1).gather(1, row[1:, None])[:, 0])
    return _with_gradient(model, torch.cat(logps))


def _rows(model: PreTrainedModel) -> list[Tensor]:
    """Return rows of :data:`LENGTHS` tokens from the whole vocabulary, except special tokens at its start.

    The first and the last begin with the same 3 tokens.
    """
    vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    rows = [torch.randint(2, vocabulary, (length,), generator=generator).to(model.device) for length in LENGTHS]
    rows[2][:3] = rows[0][:3]
    return rows


def _with_gradient(model: PreTrainedModel, logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs, and the gradient of their sum with random weights."""
    weights = torch.randn(len(logps), generator=torch.Generator().manual_seed(2)).to(logps.device)
    model.zero_grad()
    (logps * weights).sum().backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in sorted(model.named_parameters())]
    return logps.detach(), torch.cat([part.reshape(-1) for part in parts])
