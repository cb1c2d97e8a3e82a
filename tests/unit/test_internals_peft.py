"""What `alignment.internals.peft` relies on."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from alignment.internals.peft import computing_with, train_adapter

ROWS = torch.linspace(-1, 1, 12).reshape(2, 6)


class Plain(nn.Module):
    """A layer that gets adapters, and a head that is trained whole."""

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
    """With two adapters, each with its own copy of the head, of which the first one trains."""
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


def test_what_was_computed_with_before_comes_back_on_any_exit(base: Plain) -> None:
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
