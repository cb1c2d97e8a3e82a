"""Sequences in one row without padding: their layout, attention within them, and models that do not support it."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import make_classifier, make_model, tiny_config
from support.operations import Allocations
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from alignment.data.batching import collate, ends
from alignment.data.layout import Group, Layout
from alignment.internals.transformers import attending_with, requested_attention
from alignment.models import packed_attention
from alignment.models.checking import why_not_packed
from alignment.models.classifier import RewardScorer
from alignment.models.packed_attention import CannotPack, configured_refusal
from alignment.models.scorer import CompletionScorer, balancing_loss

CPU = torch.device("cpu")


def test_the_layout_of_its_docstring() -> None:
    """The sequences abcXY, abcZ and de, of which the first two are a group."""
    layout = Layout.of([5, 4, 2], [Group((0, 1), 3)])
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert [(piece.start, piece.stop) for piece in layout.pieces] == [(0, 3), (3, 5), (5, 6), (6, 8)]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 8] and layout.cu_seqlens_k.tolist() == [0, 3, 8, 12, 14]
    assert layout.keys is not None and layout.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    sequences, positions = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 4, 2, 3, 0])
    assert layout.places(sequences, positions).tolist() == [1, 4, 2, 5, 6]


def test_groups_in_any_order_and_without_a_prefix() -> None:
    layout = Layout.of([3, 2, 4, 2], [Group((1, 3), 0), Group((0, 2), 2)])
    assert [piece.attended.tolist() for piece in layout.sequences] == [[0, 1, 2], [5, 6], [0, 1, 3, 4], [7, 8]]
    assert Layout.of([3, 2]).keys is None and Layout.of([3, 2]).cu_seqlens_k.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("first", "second", "prefix"),
    [
        (([1, 2], [3, 4]), ([1, 2], [5]), 2),
        (([1, 2], [3, 4]), ([1, 2], [3, 5, 6]), 3),  # it reaches into the completions
        (([1, 2], [3, 4]), ([1, 2], [3, 4]), 3),  # one token of each is left
        (([1, 2], [3]), ([1, 2], [3, 4]), 2),
        (([], [3, 4]), ([], [3, 5]), 1),
        (([1], [2]), ([7], [2]), 0),
    ],
)
def test_the_shared_prefix_is_the_longest_that_leaves_a_token(first: Any, second: Any, prefix: int) -> None:
    batch = collate([first, second], 9, groups=[(0, 1)])
    assert [group.prefix for group in batch.groups] == [prefix]
    packed = batch.packed()
    assert packed.inputs["input_ids"].shape == (1, batch.tokens - prefix)
    row = packed.inputs["input_ids"][0]
    for sequence, piece in zip((first, second), packed.inputs["layout"].sequences):
        assert row[piece.attended].tolist() == [*sequence[0], *sequence[1]]


def test_a_batch_is_packed_once_and_only_if_all_its_inputs_are_known() -> None:
    batch = collate([([1, 2], [3]), ([1, 2], [4, 5])], 3, groups=[(0, 1)])
    packed, apart = batch.packed(), batch.packed(share=False)
    assert packed.packed() is packed and packed.blocks == () and packed.tokens == apart.tokens == 7
    assert packed.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert apart.inputs["input_ids"].tolist() == [[1, 2, 3, 1, 2, 4, 5]]
    assert packed.positions.tolist() == [1, 1, 3], "one hidden state has two targets"
    assert ends(packed).positions.tolist() == [2, 4] and ends(apart).positions.tolist() == [2, 6]
    assert collate([], 0).packed().inputs["input_ids"].shape == (1, 1)
    batch.inputs["pixel_values"] = torch.zeros(2, 3)
    assert batch.packed() is batch


def sequences(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(0)
    first, second, third, begun = (rng.choices(range(vocabulary), k=size) for size in (20, 9, 1, 4))
    answers = [rng.choices(range(vocabulary), k=size) for size in (7, 12, 11, 3, 40)]
    prompts = (first, second, first, second, third)
    return [(prompt, begun * (prompt is first) + answer) for prompt, answer in zip(prompts, answers)]


def outcome(scorer: CompletionScorer, batch: Any) -> list[Tensor]:
    """Return the scores of a batch and the gradients of a weighted sum of them."""
    scorer.zero_grad()
    scores = scorer(batch.inputs, batch.positions, batch.targets, batch.longest).scores
    with scorer.attending():
        (scores * torch.linspace(-1, 1, len(scores))).sum().backward()
    return [scores.detach(), *(each.grad.clone() for each in scorer.parameters() if each.grad is not None)]


def config(kind: str) -> PretrainedConfig:
    tiny = tiny_config("tied").to_dict()
    sizes = {name: tiny[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    if kind == "sliding":
        return MistralConfig(**sizes, sliding_window=7)
    if kind == "sinks":
        return GptOssConfig(**sizes, sliding_window=7, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    return tiny_config(kind)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["stored", "reentrant", "not-reentrant"])
@pytest.mark.parametrize("kind", ["tied", "odd", "capped", "moe", "sliding", "sinks"])
def test_scores_and_gradients_are_those_of_padded_rows(
    kind: str, checkpointing: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``capped`` has a soft cap and a sliding window; ``_QUERIES`` lets masks be created in parts."""
    monkeypatch.setattr(packed_attention, "_QUERIES", 6)
    torch.manual_seed(0)
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(config(kind)))
    if checkpointing is not None:
        scorer.model.train().gradient_checkpointing_enable({"use_reentrant": checkpointing})
        scorer.model.enable_input_require_grads()
    loaded = scorer.model.config._attn_implementation
    assert why_not_packed(scorer, CPU) is None
    batch = collate(sequences(40), 99, groups=[(0, 2), (1, 3)])
    expected = outcome(scorer, batch)
    for share in (True, False):
        for found, value in zip(outcome(scorer, batch.packed(share)), expected, strict=True):
            assert (found - value).norm() <= 1e-5 * value.norm() + 1e-6
    assert scorer.model.config._attn_implementation == loaded, "rollouts attend as before"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_peak_memory_of_pairs_does_not_rise(checkpointing: bool) -> None:
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(config("sliding")))
    if checkpointing:
        scorer.model.train().gradient_checkpointing_enable({"use_reentrant": False})
    rng = random.Random(0)
    prompts = [rng.choices(range(40), k=size) for size in (60, 20)]
    batch = collate([(prompt, rng.choices(range(40), k=30)) for prompt in prompts * 2], 120, groups=[(0, 2), (1, 3)])
    peaks = []
    for each in (batch, batch.packed(False), batch.packed()):
        outcome(scorer, each)
        scorer.zero_grad(set_to_none=True)
        with Allocations() as allocations:
            outcome(scorer, each)
        peaks.append(allocations.peak)
    padded, apart, shared = peaks
    assert shared < apart <= padded


def test_a_reward_model_reads_the_ends_of_sequences(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(make_classifier(tmp_path))
    scorer = RewardScorer(model).eval()
    batch = collate(sequences(40), 99, groups=[(0, 2), (1, 3)])
    padded, packed = (scorer(b.inputs, b.positions, b.targets, 5).scores for b in map(ends, (batch, batch.packed())))
    assert torch.allclose(padded, packed, atol=1e-5) and padded.std() > 1e-3


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *most: int, **more: Any
) -> Tensor:
    """The functions of torch and FlashAttention in plain operations: queries are aligned with the last keys."""
    assert most == (int(cu_q.diff().max()), int(cu_k.diff().max())) and more.get("enable_gqa", more.get("causal"))
    cap = more.get("softcap", math.inf)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    left, right = more["window_size"]
    groups, found = query.shape[1] // key.shape[1], []
    for number in range(len(cu_q) - 1):
        q = query[cu_q[number] : cu_q[number + 1]].transpose(0, 1)
        k, v = (each[cu_k[number] : cu_k[number + 1]].transpose(0, 1) for each in (key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        seen = (distance >= -right) & (distance <= (left if left >= 0 else k.shape[1]))
        logits = q @ k.transpose(1, 2) * more.get("scale", more.get("softmax_scale"))
        logits = logits if cap == math.inf else torch.tanh(logits / cap) * cap
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append((weights @ v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["tied", "sliding", "capped"])
def test_the_path_of_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the libraries' functions replaced by plain operations; a window that is one token too long is seen."""
    torch.manual_seed(0)
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(config(kind)))
    batch = collate(sequences(40), 99, groups=[(0, 2), (1, 3)])
    expected = outcome(scorer, batch)
    monkeypatch.setattr(packed_attention, "_flash_supports", lambda query, value, softcap: True)
    taken: dict[str, int] = Counter()
    for name in ("varlen_attn", "flash_attn_varlen_func"):

        def plain(*given: Any, name: str = name, **more: Any) -> Tensor:
            taken[name] += 1
            return plain_varlen(*given, **more)

        monkeypatch.setattr(packed_attention, name, plain)
    for share in (True, False):
        for found, value in zip(outcome(scorer, batch.packed(share)), expected, strict=True):
            assert (found - value).norm() <= 1e-5 * value.norm() + 1e-6
    assert [*taken] == ["flash_attn_varlen_func" if kind == "capped" else "varlen_attn"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "it has layers of linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "its RoPE type dynamic depends"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "its RoPE type longrope depends"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, None),
    ],
)
def test_configurations_that_cannot_be_packed(change: dict[str, Any], reason: str | None) -> None:
    given = LlamaConfig(num_hidden_layers=2)
    for name, value in change.items():
        setattr(given, name, value)
    found = configured_refusal(given)
    assert found is None if reason is None else str(found).startswith(reason)


def changed(model: Any, what: str) -> None:
    """Change how a Llama attends."""
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    if what == "positions":
        model.model.forward = _dropping(model.model.forward, "position_ids")
    elif what == "own":
        layer.forward = lambda hidden_states, **kwargs: (layer.o_proj(layer.q_proj(hidden_states)), None)
    elif what == "layout":
        layer.forward = _dropping(forward, "layout")
    elif what == "bias":
        layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, position_bias=torch.zeros(1))
    else:
        model.set_attn_implementation("eager")


def _dropping(function: Any, name: str) -> Any:
    return lambda *args, **kwargs: function(*args, **{key: value for key, value in kwargs.items() if key != name})


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("positions", "scores differ by"),
        ("own", "1 of its layers have an attention of their own"),
        ("layout", "its layers do not pass on the layout"),
        ("bias", "its attention is not causal, or has biases of its own"),
        ("eager", "attn_implementation is eager"),
    ],
)
def test_models_that_cannot_be_packed(tmp_path: Path, what: str, reason: str) -> None:
    scorer = CompletionScorer(AutoModelForCausalLM.from_pretrained(make_model(tmp_path)))
    assert why_not_packed(scorer, CPU) is None
    changed(scorer.model, what)
    assert str(why_not_packed(scorer, CPU)).startswith(reason)


def test_a_long_sliding_window_has_to_reach_the_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config("sliding")
    given.sliding_window = 10_000
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(given))
    assert why_not_packed(scorer, CPU) is None
    scorer.model.model.layers[1].self_attn.config = MistralConfig(**given.to_dict() | {"sliding_window": 9_999})
    assert why_not_packed(scorer, CPU) == "its sliding window is part of the mask only"
    for layer in scorer.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", _dropping(layer.self_attn.forward, "sliding_window"))
        layer.self_attn.config = LlamaConfig(**given.to_dict() | {"sliding_window": None, "model_type": "llama"})
    assert why_not_packed(scorer, CPU) == "its sliding window is part of the mask only"


def test_a_mask_is_never_ignored() -> None:
    states = torch.zeros(1, 1, 2, 4)
    with pytest.raises(CannotPack):
        packed_attention.packed_attention(
            nn.Identity(), states, states, states, torch.zeros(1, 1, 2, 2), layout=Layout.of([2])
        )


def test_attention_is_restored_after_an_error(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path))
    with pytest.raises(ValueError, match="stop"), attending_with(model, "packed"):
        assert model.model.layers[0].self_attn.config._attn_implementation == "packed"
        raise ValueError("stop")
    assert model.config._attn_implementation == "sdpa" and requested_attention(model) is None


def test_a_balancing_loss_counts_every_token_of_every_sequence() -> None:
    torch.manual_seed(0)
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(tiny_config("moe")), router_aux_loss=True).eval()
    assert scorer.balancing_loss is not None and balancing_loss(scorer.model) is not None
    batch = collate(sequences(40), 99, groups=[(0, 2), (1, 3)])
    padded, packed = (
        scorer(b.inputs, b.positions, b.targets, 99).aux_loss for b in (batch, batch.packed(share=False))
    )
    torch.testing.assert_close(padded, packed)
