"""Assumptions of `alignment.internals.peft`."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.internals.peft import as_peft_model, computing_with, train_adapter

ROWS = torch.linspace(-1, 1, 12).reshape(2, 6)


class Plain(nn.Module):
    """A layer that gets adapters, and a fully trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.layer(rows))


@pytest.fixture
def base() -> Plain:
    torch.manual_seed(0)
    return Plain()


def adapted(base: Plain) -> PeftModel:
    """A model with two adapters, each with its own copy of the head; the first one is trained."""
    config = LoraConfig(r=2, target_modules=["layer"], modules_to_save=["head"], init_lora_weights=False)
    model = get_peft_model(base, config, "own")
    model.add_adapter("other", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter += torch.randn_like(parameter)
    model.set_adapter("own")
    return model


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_layers_and_wrappers_compute_with_the_adapter_that_is_named(base: Plain) -> None:
    with torch.no_grad():
        plain = base(ROWS)
        model = adapted(base)
        own, names = model(ROWS), trainable(model)
        model.set_adapter("other")
        other = model(ROWS)
        model.set_adapter("own")
        for adapter, expected in ((None, plain), ("other", other), ("own", own)):
            with computing_with(model, adapter):
                assert torch.equal(model(ROWS), expected), adapter
                assert trainable(model) == names
            assert torch.equal(model(ROWS), own) and trainable(model) == names
    assert len({tuple(one.flatten().tolist()) for one in (plain, own, other)}) == 3
    assert any("modules_to_save.own" in name for name in names) and not any("other" in name for name in names)


def test_the_previous_adapter_is_restored_on_any_exit(base: Plain) -> None:
    model = adapted(base)
    with torch.no_grad():
        own = model(ROWS)
        with pytest.raises(RuntimeError, match="a layer failed"), computing_with(model, None):
            raise RuntimeError("a layer failed")
        assert torch.equal(model(ROWS), own)
        with computing_with(model, "other"):
            other = model(ROWS)
            with computing_with(model, None):
                pass
            assert torch.equal(model(ROWS), other)
    model(ROWS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_one_adapter_is_trained_and_computed_with(base: Plain) -> None:
    model = adapted(base)
    with torch.no_grad(), computing_with(model, "other"):
        other = model(ROWS)
    train_adapter(base, "other")
    names = trainable(model)
    assert torch.equal(model(ROWS), other)
    assert len(names) == 4 and all(".other." in name for name in names)
    assert any("modules_to_save" in name for name in names)


def test_the_peft_model_around_injected_adapters_is_that_of_get_peft_model() -> None:
    """The same class, names, trained parameters, attributes and results; the injected model does not change."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0
    )
    plain = LlamaForCausalLM(config)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    expected = get_peft_model(copy.deepcopy(plain), copy.deepcopy(lora))
    plain.add_adapter(lora, "default")
    parameters = dict(plain.named_parameters())
    found = as_peft_model(plain, "default")
    assert type(found) is type(expected) and found.get_base_model() is plain
    assert trainable(found) == trainable(expected)
    for own, other in ((found, expected), (found.base_model, expected.base_model)):
        assert vars(own).keys() == vars(other).keys(), "peft sets other attributes"
    named = dict(found.named_parameters())
    assert list(named) == [name for name, _ in expected.named_parameters()]
    assert all(named[f"base_model.model.{name}"] is parameter for name, parameter in parameters.items())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for name, parameter in named.items():
            expected.get_parameter(name).copy_(parameter)
        assert torch.equal(found(ids).logits, expected(ids).logits)
    assert found.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
