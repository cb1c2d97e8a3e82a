"""Optimizer steps of adapters in dense float64: PEFT's model on the base model of a run, quantized or not.

Nothing of the package is imported. The base model is built in float64 from its weights, which are packed and unpacked
with bitsandbytes if the run had them in 4 or 8 bits. The adapters are loaded with ``PeftModel.from_pretrained``, the
reference is a separate model, gradients are computed by autograd, and steps are plain SGD. The sequences of a window
form one batch, padded on the right: with causal attention, padding does not affect any result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import PeftModel, get_peft_model_state_dict
from support.oracle.dense import Row, cpo_objective, dpo_objective, kto_objective, reward_objective
from support.oracle.wide import wide_maths, widen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
Objective = tuple[Tensor, dict[str, float]]


@dataclass(frozen=True)
class Task:
    """What is computed for a window.

    Attributes:
        method: name of the method.
        options: options of ``oracle.dense``; None for SFT and reward models.
        center: ``center_rewards_coefficient``.
    """

    method: str
    options: Any = None
    center: float = 0.0

    @property
    def classifies(self) -> bool:
        """Return whether the model has a score head."""
        return self.method == "Reward"


@dataclass
class AdapterStep:
    """The result of a step: values by name, and the update by the names of a saved adapter."""

    metrics: dict[str, float]
    update: dict[str, Tensor]


def dense_base(folder: str | Path, classifies: bool, bits: int | None = None) -> nn.Module:
    """Load a model in float64, with the weights that it has after quantization to 4 (nested NF4) or 8 bits."""
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    whole = auto.from_pretrained(folder, dtype=torch.float64)
    if bits is not None:
        packed = auto.from_pretrained(folder, dtype=torch.float32, quantization_config=quantization(bits))
        replaced = 0
        for name, module in packed.named_modules():
            if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
                whole.get_submodule(name).weight.data = unpacked(module).double()
                replaced += 1
        experts = {name: one for name, one in packed.named_parameters() if one.ndim == 3 and bits == 4}
        for name, weight in experts.items():
            whole.get_parameter(name).data = rounded(weight.data).double()
        layers = whole.config.num_hidden_layers
        assert replaced >= 4 * layers if experts else replaced == 7 * layers
    return widen(whole)


def rounded(weight: Tensor) -> Tensor:
    """Return an fp32 weight after quantization to nested NF4, as a whole."""
    return bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    )


def quantization(bits: int) -> BitsAndBytesConfig:
    """Return the default quantization of a run."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
        bnb_4bit_use_double_quant=True,
    )


def unpacked(module: nn.Module) -> Tensor:
    """Return the weight of a quantized layer in fp32."""
    weight: Any = module.weight
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.CB.float() * weight.SCB[:, None] / 127


def adapted(base: nn.Module, folder: str | Path) -> PeftModel:
    """Return a copy of ``base`` with the adapters of ``folder``, in float64 and evaluation mode."""
    model = PeftModel.from_pretrained(
        copy.deepcopy(base), str(folder), is_trainable=True, autocast_adapter_dtype=False
    )
    return model.double().eval()


def saved(model: PeftModel) -> dict[str, Tensor]:
    """Return the adapters' tensors by their names in a folder."""
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: value.detach().clone() for name, value in state.items()}


def steps_of(
    base: nn.Module, start: str | Path, windows: Sequence[Sequence[Row]], task: Task, rate: float, *, new: bool
) -> list[AdapterStep]:
    """Compute every step of a run in float64.

    Args:
        base: the model without adapters.
        start: folder of the initial adapters.
        windows: rows with token IDs, in the order of the steps.
        task: what is computed.
        rate: learning rate.
        new: whether the adapters are newly initialized, so that the reference is ``base``; otherwise it is a copy.
    """
    policy = adapted(base, start)
    reference = base if new else adapted(base, start)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    steps, before = [], saved(policy)
    for rows in windows:
        loss, metrics = _OBJECTIVES[task.method](policy, reference, rows, task)
        with wide_maths():
            gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= rate * gradient
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        after = saved(policy)
        update = {name: after[name] - before[name] for name in after}
        steps.append(AdapterStep({**metrics, "loss": float(loss.detach()), "grad_norm": norm}, update))
        before = after
    return steps


def summed_logps(model: nn.Module, sequences: Sequences) -> Tensor:
    """Return the (N,) summed log-probs of completions, each after its prompt."""
    logps, mask = completion_logps(model, sequences)
    return (logps * mask).sum(1)


def _batch(sequences: Sequences) -> Tensor:
    ids = [torch.tensor([*prompt, *completion]) for prompt, completion in sequences]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)


def completion_logps(model: nn.Module, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return (N, T - 1) log-probs of all tokens but the first, and a mask of completion tokens."""
    ids = _batch(sequences)
    mask = torch.zeros(ids.shape, dtype=torch.float64)
    for row, (prompt, completion) in enumerate(sequences):
        mask[row, len(prompt) : len(prompt) + len(completion)] = 1
    with wide_maths():
        logps = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        return logps[:, :-1].gather(2, ids[:, 1:, None])[..., 0], mask[:, 1:]


def _sides(rows: Sequence[Row], side: str) -> Sequences:
    return [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows]


def _both(model: nn.Module, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return the summed log-probs of chosen and rejected completions."""
    good, bad = summed_logps(model, [*_sides(rows, "chosen"), *_sides(rows, "rejected")]).chunk(2)
    return good, bad


def _kto(policy: nn.Module, reference: nn.Module, rows: Sequence[Row], task: Task) -> Objective:
    partners = [(row["prompt_ids"], rows[row["partner"]]["completion_ids"]) for row in rows]
    sequences = [*_sides(rows, "completion"), *partners]
    with torch.no_grad():
        fixed, fixed_partners = summed_logps(reference, sequences).chunk(2)
    own, own_partners = summed_logps(policy, sequences).chunk(2)
    labels, gap = [row["label"] for row in rows], own_partners.detach() - fixed_partners
    return kto_objective(own, fixed, labels, gap, task.options)


def _cpo(policy: nn.Module, reference: nn.Module, rows: Sequence[Row], task: Task) -> Objective:
    lengths = [len(row["chosen_ids"]) for row in rows], [len(row["rejected_ids"]) for row in rows]
    return cpo_objective(*_both(policy, rows), lengths, task.options)


def _dpo(policy: nn.Module, reference: nn.Module, rows: Sequence[Row], task: Task) -> Objective:
    with torch.no_grad():
        fixed = _both(reference, rows)
    loss, metrics = dpo_objective(_both(policy, rows), fixed, task.options)
    if task.method == "DPO":  # which does not determine means over all sequences
        metrics = {name: value for name, value in metrics.items() if not name.startswith("objective/")}
    return loss, metrics


def _sft(policy: nn.Module, reference: nn.Module, rows: Sequence[Row], task: Task) -> Objective:
    logps, mask = completion_logps(policy, _sides(rows, "completion"))
    return -(logps * mask).sum() / mask.sum(), {}


def _reward(policy: nn.Module, reference: nn.Module, rows: Sequence[Row], task: Task) -> Objective:
    chosen, rejected = _rewards(policy, [*_sides(rows, "chosen"), *_sides(rows, "rejected")]).chunk(2)
    margins = torch.tensor([row["margin"] for row in rows], dtype=torch.float64)
    return reward_objective(chosen, rejected, margins, task.center)


def _rewards(policy: nn.Module, sequences: Sequences) -> Tensor:
    """Return (N,) scores of the last hidden states."""
    model: Any = policy.get_base_model()
    ends = torch.tensor([len(prompt) + len(completion) - 1 for prompt, completion in sequences])
    with wide_maths():
        states = model.model(input_ids=_batch(sequences), use_cache=False).last_hidden_state
        return model.score(states[torch.arange(len(ends)), ends])[:, 0]


_OBJECTIVES: dict[str, Callable[[nn.Module, nn.Module, Sequence[Row], Task], Objective]] = {
    "KTO": _kto,
    "CPO": _cpo,
    "DPO": _dpo,
    "OnlineDPO": _dpo,
    "SFT": _sft,
    "Reward": _reward,
}
