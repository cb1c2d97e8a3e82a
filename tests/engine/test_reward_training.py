"""Reward model training: loss, metrics and update against float64 for all splits and stages; saved files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.data_tokenizers import char_tokenizer
from support.helpers import STAGES, make_classifier, make_model, options, paired_rows, train_and_close
from support.oracle.dense import load, reward_objective, wide_maths
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from alignment import RewardConfig, RewardTrainer
from alignment.config.errors import ModelError, OptionError
from alignment.methods.reward import with_own_pad
from alignment.objectives.pairs import bradley_terry

RATE, CENTER = 0.1, 0.05
ROWS: list[dict[str, Any]] = [row | {"margin": 0.25 * (n % 4)} for n, row in enumerate(paired_rows(8, seed=5))]


# The objective ------------------------------------------------------------------------------------------------------


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_losses_match_hand_computed_values() -> None:
    chosen, rejected = wide(1.2, -1.0, 50.0), wide(0.5, 0.0, -50.0)
    assert bradley_terry(chosen, rejected).losses.tolist() == pytest.approx(
        [0.40318604888545784, 1.3132616875182228, math.exp(-100)], rel=1e-12
    )
    with_margin = bradley_terry(chosen[:1], rejected[:1], wide(0.3))
    assert float(with_margin.losses) == pytest.approx(0.5130152523999526, rel=1e-12)
    centered = bradley_terry(chosen[:1], rejected[:1], wide(0.3), 0.01)
    assert float(centered.losses) == pytest.approx(0.5130152523999526 + 0.01 * 1.7**2, rel=1e-12)
    assert (centered.chosen_rewards.tolist(), centered.rejected_rewards.tolist()) == ([1.2], [0.5])


# Training -----------------------------------------------------------------------------------------------------------


def trainer(model: Any, folder: Path, rows: Any = ROWS, **more: Any) -> RewardTrainer:
    arguments = {name: more.pop(name) for name in ("eval_dataset", "processing_class") if name in more}
    given = {"max_grad_norm": 0.0, "optim": "sgd", **options(folder, learning_rate=RATE), **more}
    return RewardTrainer(model=model, args=RewardConfig(**given), train_dataset=rows, **arguments)


def rewards(model: nn.Module, rows: list[dict[str, Any]], side: str) -> Tensor:
    """Return (P,) float64 scores: the head on the last hidden state of each full sequence, one at a time."""
    states = []
    for row in rows:
        ids = torch.tensor([[*row["prompt_ids"], *row[f"{side}_ids"]]])
        states.append(model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
    return torch.stack(states) @ model.score.weight[0]


def dense(path: str, rows: list[dict[str, Any]], center: float) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradient of one window in float64."""
    model = load(AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64))
    with wide_maths():
        chosen, rejected = rewards(model, rows, "chosen"), rewards(model, rows, "rejected")
        margins = torch.tensor([row["margin"] for row in rows])
        loss, metrics = reward_objective(chosen, rejected, margins, center)
        names = [name for name, _ in model.named_parameters()]
        gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    metrics["grad_norm"] = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    return metrics, dict(zip(names, gradients))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_classifier(tmp_path_factory.mktemp("models") / "reward", "tied", seed=1)


@pytest.mark.parametrize(
    ("stage", "micro", "steps"),
    [
        ("stage0", 8, 1),
        ("stage0", 2, 4),
        ("stage0", 1, 8),
        ("stage2", 4, 2),
        ("stage3", 2, 4),
        ("stage3-offload", 1, 8),
    ],
)
def test_one_step_against_float64(tmp_path: Path, classifier: str, stage: str, micro: int, steps: int) -> None:
    split = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps, "max_steps": 1}
    made = trainer(
        classifier,
        tmp_path,
        deepspeed=STAGES[stage],
        center_rewards_coefficient=CENTER,
        eval_dataset=ROWS[:3],
        **split,
    )
    rows = [made.data.train.dataset[number] for number in range(8)]
    assert {row["margin"] for row in rows} == {0.0, 0.25, 0.5, 0.75}
    expected, gradients = dense(classifier, rows, CENTER)
    before = {f"eval_{name}": value for name, value in dense(classifier, rows[:3], CENTER)[0].items()}
    before.pop("eval_grad_norm")
    found_before = made.evaluate()
    train_and_close(made, save=tmp_path / "saved")
    assert {name: found_before[name] for name in before} == pytest.approx(before, rel=1e-4, abs=1e-5)
    found = made.state.log_history[-2]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    old, new = (load_file(Path(folder) / "model.safetensors") for folder in (classifier, tmp_path / "saved"))
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            new[name].double() - old[name].double(), -RATE * gradient, rtol=1e-3, atol=2e-5, msg=name
        )
    assert float(gradients["score.weight"].norm()) > 0.1


def test_a_language_model_becomes_a_reward_model_that_transformers_can_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "model", "tied", gain=1.0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    made = trainer(
        path,
        tmp_path,
        eval_dataset=ROWS,
        processing_class=tokenizer,
        optim="adamw_torch",
        learning_rate=1e-2,
        num_train_epochs=15,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        deepspeed=STAGES["stage3"],
    )
    made.train()
    assert "no score.weight; newly initialized with seed 42\n" in capsys.readouterr().out
    found = made.evaluate()
    made.save_model(tmp_path / "saved")
    made.close()
    assert found["eval_rewards/accuracies"] == 1.0 and found["eval_loss"] < 0.3
    assert tokenizer.pad_token == tokenizer.eos_token, "the user's tokenizer is not modified"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert model.config.num_labels == 1 and model.config.pad_token_id == saved.pad_token_id != saved.eos_token_id
    texts = [f"{row['prompt']}{row[side]}</s>" for side in ("chosen", "rejected") for row in ROWS]
    with torch.no_grad():
        batch = saved(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        each = [saved(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        singly = torch.cat([model(input_ids=ids).logits[:, 0] for ids in each])
    torch.testing.assert_close(together, singly, rtol=1e-4, atol=1e-4)
    assert float(singly[:8].mean()) == pytest.approx(found["eval_rewards/chosen"], rel=1e-4)
    assert float(singly[8:].mean()) == pytest.approx(found["eval_rewards/rejected"], rel=1e-4)


def test_a_live_classifier_is_trained_in_place(tmp_path: Path, classifier: str) -> None:
    live = AutoModelForSequenceClassification.from_pretrained(classifier)
    before = live.score.weight.detach().clone()
    made = trainer(live, tmp_path, processing_class=char_tokenizer(), max_steps=1)
    made.train()
    assert made.model is live and not torch.equal(live.score.weight, before)
    made.close()


# Further files, and refusals ----------------------------------------------------------------------------------------


def test_the_pad_token_does_not_end_a_sequence() -> None:
    tokenizer = char_tokenizer()
    eos, start = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    found, number = with_own_pad(tokenizer, {eos})
    assert number == found.pad_token_id == start and tokenizer.pad_token is None
    tokenizer.pad_token = "<|im_end|>"
    assert with_own_pad(tokenizer, {eos}) == (tokenizer, tokenizer.pad_token_id)
    found, number = with_own_pad(tokenizer, {eos, tokenizer.pad_token_id})
    assert found.pad_token == "<|im_start|>" and number == start and tokenizer.pad_token == "<|im_end|>"
    found, number = with_own_pad(tokenizer, {eos, tokenizer.pad_token_id, start})
    assert found.pad_token == "<s>" and number == tokenizer.bos_token_id
    assert with_own_pad(tokenizer, {*range(len(tokenizer))}) == (tokenizer, None)


def test_models_that_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^model_name_or_path: .*many' has num_labels=3, but a reward model must have 1"
    ):
        trainer(make_classifier(tmp_path / "many", labels=3), tmp_path)
    with pytest.raises(OptionError, match=r"with num_labels=3: num_labels must be 1; remove num_labels"):
        trainer(make_model(tmp_path / "model"), tmp_path, model_init_kwargs={"num_labels": 3})
    BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="can be used for scoring but not trained"):
        trainer(str(tmp_path / "bert"), tmp_path)
    with pytest.raises(OptionError, match="^ref_model: reward has no reference model"):
        RewardTrainer(
            model=str(tmp_path / "model"), ref_model="x", args=RewardConfig(**options(tmp_path)), train_dataset=ROWS
        )
