"""Which module of a layer is its MLP, and how it is computed in slices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import z3_leaf_module
from support.helpers import make_model, options, paired_rows, tiny_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from alignment import CPOConfig, CPOTrainer
from alignment.config.errors import OptionError
from alignment.models import tiled_mlp
from alignment.models.loading import enable_checkpointing
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.models.tiled_mlp import find_mlp, is_tiled, tile_mlps
from alignment.planning import activations
from alignment.planning.activations import Counting, Shape
from tools.architectures.tiny import tiny_config as config_of

IDS = torch.arange(2, 82)[None] % 40


def made() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("untied")).eval()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "mlp"), ("gpt2", "mlp"), ("lfm2", "feed_forward"), ("falcon", "mlp"), ("gemma3_text", "mlp")],
)
def test_the_mlp_is_found(kind: str, name: str) -> None:
    """Falcon changes its output in place."""
    config = config_of(kind)
    before, state = config.to_dict(), torch.get_rng_state()
    assert find_mlp(config, AutoModelForCausalLM.from_config) == name
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("opt", "no module of a decoder layer can be its MLP"),
        ("bloom", "no module of a decoder layer can be its MLP"),  # it adds the residual
        ("rwkv", "a model of one layer cannot be computed: division by zero"),
        ("mixtral", "it is a mixture of experts"),
        ("dbrx", "it is a mixture of experts"),
    ],
)
def test_other_models_are_refused(kind: str, why: str) -> None:
    with pytest.raises(
        OptionError, match=f"^tiled_mlp: {kind} models are not supported: {why}; set tiled_mlp: false$"
    ):
        find_mlp(config_of(kind), AutoModelForCausalLM.from_config)


def test_modules_that_mix_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of RWKV do, which add the hidden states of the token before."""
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, states: plain(self, states + states.roll(1, 1)))
    with pytest.raises(OptionError, match="no module of a decoder layer can be its MLP"):
        find_mlp(config_of("llama"), AutoModelForCausalLM.from_config)


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    args = CPOConfig(**options(tmp_path, tiled_mlp=True))
    model = make_model(tmp_path / "model", "moe")
    with pytest.raises(OptionError, match="^tiled_mlp: mixtral models are not supported"):
        CPOTrainer(model=model, args=args, train_dataset=paired_rows(4))


def test_layers_that_differ_are_refused() -> None:
    model = made()
    model.model.layers[1].mlp = nn.Linear(32, 32)
    with pytest.raises(OptionError, match="^tiled_mlp: llama .*do not all have the same kind of mlp"):
        tile_mlps(model, "mlp")
    assert not any(map(is_tiled, model.modules()))


def test_a_slice_has_at_most_as_many_tokens_as_hidden_states_have_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = made(), []
    whole = model(IDS).logits
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    tile_mlps(model, "mlp")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert torch.allclose(model(IDS).logits, whole, atol=1e-6)
    assert sizes == [27, 27, 26] * 2 * 2, "80 tokens in slices of 32 or fewer"
    sizes.clear()
    monkeypatch.setattr(tiled_mlp, "checkpoint", None)
    model(IDS[:, :32])
    assert sizes == [32, 32], "a single slice is not recomputed"


def test_a_slice_is_recomputed_once() -> None:
    """In the backward pass of its MLP, not also in the recomputation of its layer."""
    model, calls = made().train(), []
    enable_checkpointing(model, None)
    tile_mlps(model, "mlp")
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(lambda *_: calls.append(None))
    model(IDS).logits.sum().backward()
    layers, slices = 2, 3
    assert len(calls) == 2 * layers * slices


def test_the_random_state_of_the_device_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds the device in the arguments of a checkpoint."""
    found: list[Tensor] = []

    def recorded(compute: Any, *args: Any, use_reentrant: bool) -> Tensor:
        found.append(args[0])
        return compute(*args)

    monkeypatch.setattr(tiled_mlp, "checkpoint", recorded)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("untied"))
    tile_mlps(model, "mlp")
    model.model.layers[0].mlp(torch.empty(1, 80, 32, device="meta"))
    assert [one.device.type for one in found] == ["meta"] * 3


def test_a_model_can_be_computed_as_a_whole_again_and_copied() -> None:
    model = made()
    whole = model(IDS).logits
    tile_mlps(model, "mlp")
    twin = copy.deepcopy(model)
    mlps = [layer.mlp for layer in (*model.model.layers, *twin.model.layers)]
    assert all(is_tiled(mlp) and z3_leaf_module(mlp) for mlp in mlps)
    for parameter in twin.model.layers[0].mlp.parameters():
        parameter.data.zero_()
    assert torch.allclose(model(IDS).logits, whole, atol=1e-6) and not torch.allclose(twin(IDS).logits, whole)
    tile_mlps(model, None)
    assert not any(is_tiled(module) or z3_leaf_module(module) for module in model.modules())
    assert torch.equal(model(IDS).logits, whole)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_plan_that_computes_one_slice_is_that_of_all(
    reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=256, vocab_size=64, num_attention_heads=2)
    source, found = ModelSource("tiny", None, config, {}, CAUSAL_LM, mlp="mlp"), []
    for slices in ("first", "all"):
        monkeypatch.setattr(activations, "_FOLDER", tmp_path / slices)  # nothing was counted before
        count = Counting(source, None, torch.bfloat16, "flash", checkpointing={"use_reentrant": reentrant})
        shape = Shape(1, 300, 299)
        passes = [
            *count(shape, gradients=True, recomputed=True),
            *count(shape, gradients=True, kept=1.0),
            *count(shape, gradients=False),
        ]
        found.append([sum(trend.of(4).values()) for trend in passes])
        monkeypatch.setattr(tiled_mlp, "is_enough", lambda: False)
    assert found[0] == pytest.approx(found[1], rel=0.015)  # but for tensors of one or two slices
