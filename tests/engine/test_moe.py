"""The load-balancing loss of mixtures of experts: value, weight and gradient, compared with the model's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import STAGES, make_model, paired_rows, unpaired_rows
from support.helpers import options as short
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer
from alignment.config.errors import OptionError
from alignment.data.batching import MicroBatches
from alignment.models.scorer import balancing_loss
from alignment.training.arguments import balancing_coefficient
from alignment.training.trainer import AlignmentTrainer

ROWS, RATE = 6, 0.01
Outcome = tuple[dict[str, float], dict[str, Tensor]]
TRAINERS: dict[str, tuple[Any, Any, Any]] = {
    "kto": (KTOTrainer, KTOConfig, unpaired_rows),
    "cpo": (CPOTrainer, CPOConfig, paired_rows),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("moe") / "model", "moe")


def make_trainer(path: str, folder: Path, method: str = "cpo", **options: Any) -> AlignmentTrainer:
    trainer, config, rows = TRAINERS[method]
    settings = short(folder, optim="sgd", learning_rate=RATE, max_grad_norm=0.0, max_steps=1)
    settings |= {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
    return trainer(model=path, args=config(**settings | options), train_dataset=rows(ROWS))


def train(trainer: AlignmentTrainer) -> Outcome:
    """Return the first log line and the weights after the step."""
    trainer.train()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    log: dict[str, float] = trainer.state.log_history[0]
    trainer.close()
    return log, weights


@pytest.fixture(scope="module")
def plain(path: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The CPO step without a load-balancing loss."""
    return train(make_trainer(path, tmp_path_factory.mktemp("plain") / "out", router_aux_loss_coef=0.0))


def own_balancing_loss(path: str, trainer: AlignmentTrainer) -> tuple[list[Tensor], list[int], Any]:
    """Return, per micro-batch of the first window, the unmodified model's loss and token count; and the model."""
    model = AutoModelForCausalLM.from_pretrained(path)
    data, plan = trainer.data.train, trainer.data.sampler.plan(0, 0)
    losses, tokens = [], []
    for batch in MicroBatches(trainer.method.kind.collate, data.dataset, plan, 0):
        scored = trainer.method.scored(batch)
        mask = scored.inputs["attention_mask"]
        output = model(input_ids=scored.inputs["input_ids"], attention_mask=mask, output_router_logits=True)
        losses.append(load_balancing_loss_func(output.router_logits, 4, 2, mask))
        tokens.append(int(mask.sum()))
        assert tokens[-1] < mask.numel(), "without padding, the mask would have no effect"
    return losses, tokens, model


@pytest.mark.parametrize("method", ["kto", "cpo"])
def test_one_micro_batch_has_the_models_own_balancing_loss(path: str, tmp_path: Path, method: str) -> None:
    trainer = make_trainer(path, tmp_path / "with", method, router_aux_loss_coef=0.5)
    assert trainer.aux_loss_enabled
    (expected,), _, _ = own_balancing_loss(path, trainer)
    log, _ = train(trainer)
    plain, _ = train(make_trainer(path, tmp_path / "without", method, router_aux_loss_coef=0.0))
    assert log["aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert "aux_loss" not in plain
    assert log["loss"] == pytest.approx(plain["loss"] + 0.5 * log["aux_loss"], rel=1e-6)
    shared = set(plain) - {"loss", "grad_norm", "aux_loss"}
    # Without the loss, pairs share their prompts.
    assert {name: log[name] for name in shared} == pytest.approx({name: plain[name] for name in shared}, rel=1e-5)


def test_several_micro_batches_are_weighted_by_their_tokens(path: str, tmp_path: Path, plain: Outcome) -> None:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "router_aux_loss_coef": 0.5,
    }
    trainer = make_trainer(path, tmp_path / "three", **options)
    losses, tokens, _ = own_balancing_loss(path, trainer)
    assert len(losses) == 3 and len(set(tokens)) == 3
    values = [float(loss.detach()) for loss in losses]
    expected = sum(value * count for value, count in zip(values, tokens)) / sum(tokens)
    plain_mean = sum(values) / 3
    assert abs(plain_mean - expected) > 1e-4, "the weights have an effect"
    log, _ = train(trainer)
    assert log["aux_loss"] == pytest.approx(expected, rel=1e-6)
    assert log["loss"] == pytest.approx(plain[0]["loss"] + 0.5 * expected, rel=1e-6)


@pytest.mark.parametrize(("stage", "checkpointing"), [("stage0", False), ("stage2", True)])
def test_its_gradient_reaches_every_weight(
    path: str, tmp_path: Path, plain: Outcome, checkpointing: bool, stage: str
) -> None:
    """The difference between two updates equals the gradient of the loss by autograd on the plain model."""
    options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "deepspeed": STAGES[stage]}
    coefficient = 20.0
    trainer = make_trainer(path, tmp_path / "with", router_aux_loss_coef=coefficient, **options)
    (loss,), _, model = own_balancing_loss(path, trainer)
    loss.backward()
    _, balanced = train(trainer)
    routers = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # nothing after the last router
            assert torch.allclose(balanced[name], plain[1][name], atol=1e-7), name
            continue
        expected = -RATE * coefficient * parameter.grad
        error = float((balanced[name] - plain[1][name] - expected).norm())
        assert error <= 1e-4 * float(expected.norm()) + 1e-6, name
        if ".gate." in name:
            routers += 1
            assert float(expected.norm()) > 1e-2
    assert routers == 2


def test_every_stage_has_the_same_gradient(path: str, tmp_path: Path, plain: Outcome) -> None:
    norms = {}
    for stage in ("stage0", "stage2", "stage3"):
        trainer = make_trainer(path, tmp_path / stage, router_aux_loss_coef=20.0, deepspeed=STAGES[stage])
        norms[stage] = train(trainer)[0]["grad_norm"]
    assert norms["stage2"] == pytest.approx(norms["stage0"], rel=1e-5)
    assert norms["stage3"] == pytest.approx(norms["stage0"], rel=1e-5)
    assert abs(plain[0]["grad_norm"] - norms["stage0"]) > 0.1 * norms["stage0"]


def test_the_weight_defaults_to_that_of_the_configuration(path: str, tmp_path: Path, plain: Outcome) -> None:
    assert AutoModelForCausalLM.from_pretrained(path).config.router_aux_loss_coef == 0.001
    log, _ = train(make_trainer(path, tmp_path / "default"))
    assert log["loss"] == pytest.approx(plain[0]["loss"] + 0.001 * log["aux_loss"], rel=1e-6)
    assert 0.0005 * log["aux_loss"] > 1e-6 * log["loss"], "the difference is more than rounding"


def test_experts_without_router_logits_are_refused() -> None:
    options = CPOConfig("out", router_aux_loss_coef=0.1)
    with pytest.raises(OptionError, match=r"^router_aux_loss_coef=0\.1: MixtralConfig .*output_router_logits"):
        balancing_coefficient(options, MixtralConfig())
    with pytest.raises(OptionError, match=r"^router_aux_loss_coef=0\.1: PreTrainedConfig "):
        balancing_coefficient(options, PreTrainedConfig(num_experts_per_tok=2))
    assert balancing_coefficient(options, MixtralConfig(output_router_logits=True)) == 0.1
    assert balancing_coefficient(CPOConfig("out"), MixtralConfig()) is None


def test_a_dense_model_has_nothing_to_balance(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "dense", "tied")
    trainer = make_trainer(dense, tmp_path / "out", router_aux_loss_coef=0.001)  # the default of recent TRL releases
    assert trainer.planned.aux_coefficient is None
    trainer = make_trainer(dense, tmp_path / "out", router_aux_loss_coef=0.0)
    assert trainer.planned.aux_coefficient is None and not trainer.aux_loss_enabled
    with pytest.raises(OptionError, match="LlamaForCausalLM has no load-balancing loss"):
        balancing_loss(AutoModelForCausalLM.from_pretrained(dense))


def test_evaluation_logs_it_too(path: str, tmp_path: Path) -> None:
    trainer = make_trainer(path, tmp_path / "out", router_aux_loss_coef=0.5)
    (expected,), _, _ = own_balancing_loss(path, trainer)
    metrics = trainer.evaluate(paired_rows(ROWS))
    plain_trainer = make_trainer(path, tmp_path / "plain", router_aux_loss_coef=0.0)
    plain = plain_trainer.evaluate(paired_rows(ROWS))
    trainer.close()
    plain_trainer.close()
    assert metrics["eval_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"] + 0.5 * metrics["eval_aux_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", [GraniteMoeConfig, Qwen2MoeConfig])
def test_the_balancing_loss_supports_both_names_for_the_number_of_experts(kind: Any) -> None:
    """Granite's configuration only has ``num_local_experts``, Qwen's only ``num_experts``."""
    name = {GraniteMoeConfig: "num_local_experts", Qwen2MoeConfig: "num_experts"}[kind]
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = kind(**sizes, num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, **{name: 6})
    assert hasattr(config, "num_local_experts") != hasattr(config, "num_experts")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logits, mask = torch.randn(8, 6), torch.ones(2, 4)
    expected = sys.modules[type(model).__module__].load_balancing_loss_func((logits,), 6, 2, mask)
    torch.testing.assert_close(balancing_loss(model)((logits,), mask), expected, rtol=0, atol=0)
