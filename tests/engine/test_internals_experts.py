"""transformers' mixtures of experts: how experts are found, packed while they are loaded, and multiplied."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_experts import make_experts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, modeling_utils

from alignment.internals import transformers_experts as internals

IDS = torch.arange(24).view(2, 12) * 7 % 66


class Marked(nn.Parameter):
    """A weight that the products below recognize."""


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_products_of_an_implementation_replace_those_of_packed_weights_only(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_experts(tmp_path, name))
    found = internals.experts_modules(model)
    assert [*found] == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    calls: list[tuple[Any, ...]] = []

    def product(rows: Tensor, weight: Tensor, offs: Tensor, transposed: bool) -> Tensor:
        calls.append((*rows.shape, *offs.shape, int(offs[-1]), transposed))
        return internals.grouped_product(rows, weight if transposed else weight.mT, offs)

    internals.register_experts("of_a_test", lambda weight: isinstance(weight, Marked), product)
    with torch.no_grad():
        expected = model(IDS).logits
        model.set_experts_implementation("of_a_test")
        assert torch.equal(model(IDS).logits, expected) and not calls
        for module in found.values():
            module.gate_up_proj = Marked(module.gate_up_proj.data)
        assert torch.equal(model(IDS).logits, expected)
    assert calls == 2 * [(48, 64, 6, 48, name == "gpt_oss")]


def test_rows_are_multiplied_with_their_experts() -> None:
    rows, weight = torch.randn(5, 64), torch.randn(3, 64, 32)
    found = internals.grouped_product(rows, weight, torch.tensor([2, 2, 5], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[2]]))


def test_experts_are_packed_while_they_are_loaded(tmp_path: Path) -> None:
    """One after another, once they are assembled, and together with linear layers; afterwards, nothing is changed."""
    folder = make_experts(tmp_path, "qwen3_moe")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    names = [f"model.layers.{layer}.mlp.experts.{part}" for layer in (0, 1) for part in ("down_proj", "gate_up_proj")]
    packed: list[Tensor] = []

    def pack(weight: Tensor, config: BitsAndBytesConfig) -> nn.Parameter:
        assert config.load_in_4bit
        packed.append(weight.clone())
        return nn.Parameter(weight.sum((1, 2)), requires_grad=False)

    arguments = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "dtype": torch.float32}
    with internals.packing_while_loading(lambda model, config: names, pack):
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not any(report[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert len(packed) == 4 and type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    for name in names:
        weight = plain.get_parameter(name)
        assert any(torch.equal(one, weight) for one in packed)
        assert torch.equal(model.get_parameter(name), weight.sum((1, 2)))
    again = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    assert all(again.get_parameter(name).ndim == 3 for name in names)


def test_experts_are_taken_apart_file_by_file(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The files contain what those of another call do."""
    model = AutoModelForCausalLM.from_pretrained(make_experts(tmp_path / "base", "qwen3_moe"))
    converted: list[int] = []
    convert = modeling_utils.revert_weight_conversion

    def counted(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        converted.append(len(state))
        return convert(model, state)

    with mock.patch.object(modeling_utils, "revert_weight_conversion", counted):
        model.save_pretrained(tmp_path / "whole", max_shard_size="200KB")
        assert len(converted) == 1
        with internals.converting_by_file(model):
            model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    files = [*(tmp_path / "parts").glob("*.safetensors")]
    assert len(converted) == 1 + len(files) > 3 and sum(converted[1:]) == converted[0]
    whole, parts = (
        {name: value for file in (tmp_path / folder).glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert not recwarn and not hasattr(model, "hf_device_map")
