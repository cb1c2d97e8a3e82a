"""Adapters injected into a model without an engine: seeds, dtypes, what is trained, and the frozen copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.helpers import make_model
from transformers import AutoModelForCausalLM

from alignment.models.adapters.injection import REFERENCE, Given, equip, inject, keep_given
from alignment.models.adapters.record import Adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "model", "untied", seed=1)


def made(folder: str, seed: int = 3, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Adapters]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    adapters = Adapters(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **config))
    inject(model, adapters, ds_config={}, dtype=dtype, seed=seed)
    return model, adapters


def weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.named_parameters() if f".{name}." in f"{key}."}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_initial_policy_is_kept_while_its_adapters_are_trained(folder: str, dtype: torch.dtype) -> None:
    model, adapters = made(folder, dtype=dtype, modules_to_save=["lm_head"])
    with torch.no_grad():
        for number, value in enumerate(weights(model, "default").values()):
            value.fill_(number + 1.0)
    for run in range(2):  # a second run keeps what is trained by then
        assert keep_given(model, adapters, ds_config={}, dtype=dtype) == REFERENCE
        own, kept = (list(weights(model, name).values()) for name in ("default", REFERENCE))
        assert [float(value.flatten()[0]) for value in kept] == [1.0 + run, *range(2, len(own) + 1)]
        assert all(map(torch.equal, own, kept)) and {value.dtype for value in kept} == {dtype}
        assert all(value.requires_grad for value in own) and not any(value.requires_grad for value in kept)
        with torch.no_grad():
            own[0].add_(1.0)
        assert not torch.equal(own[0], kept[0])
    assert model.active_adapters() == ["default"]


@pytest.mark.parametrize(("start", "copied"), [(True, False), ("gaussian", False), (False, True)])
def test_only_new_adapters_without_effect_are_disabled_for_the_initial_policy(
    folder: str, start: bool | str, copied: bool
) -> None:
    """In a later run, the same adapters may have been trained."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    found = [
        equip(model, Adapters(config), ds_config={}, dtype=torch.float32, seed=1, keep=True)
        for _ in ("first", "later")
    ]
    assert found == [Given(REFERENCE if copied else None), Given(REFERENCE)]
