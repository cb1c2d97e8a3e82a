"""The log-prob head compared with dense float64, its memory, and its fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.head_problems import TRANSFORMS, dense, dense_stats, problem
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, Gemma2Config, GPT2Config, GraniteConfig, LlamaConfig, OPTConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from alignment.config.errors import ModelError
from alignment.models import scorer
from alignment.models.checking import check_scorer
from alignment.models.head import LogProbHead, answers_logprobs, checkpointed_logprobs, install_logprob_head
from alignment.models.logprobs import DEFAULT_TILE_BYTES, LogitTransform, tile_length, token_logprobs
from alignment.models.scorer import CompletionScorer
from alignment.models.tiles import products


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_values_and_gradients_against_dense_float64(name: str, bias: bool, trained: bool) -> None:
    transform = TRANSFORMS[name]
    hidden, weight, offset, targets, upstream = problem(700, 24, 333, bias)
    wide = [None if t is None else t.double().requires_grad_() for t in (hidden, weight, offset)]
    hidden.requires_grad_()
    for parameter in (weight, offset):
        if parameter is not None:
            parameter.requires_grad_(trained)
    # A small budget: three tiles in the forward pass, several vocabulary slices in the backward pass.
    targets[:300] = (hidden @ weight.T).argmax(1)[:300]
    expected = dense(wide[0], wide[1], wide[2], targets, transform)
    expected.backward(upstream.double())
    found, stats = token_logprobs(hidden, weight, offset, targets, transform, tile_bytes=6 * 333 * 100, stats=True)
    assert stats is not None and not any(part.requires_grad for part in stats)
    measured = dense_stats(
        hidden.detach(), weight.detach(), None if offset is None else offset.detach(), targets, transform
    )
    torch.testing.assert_close(torch.stack(tuple(stats)).double(), measured, rtol=1e-4, atol=1e-4)
    found.backward(upstream)

    assert found.dtype == torch.float32
    assert bool(((found - expected).abs() <= 1e-5 * expected.abs().clamp(min=1)).all())
    for ours, theirs in zip((hidden, weight, offset), wide):
        if ours is None or not ours.requires_grad:
            assert ours is None or ours.grad is None
            continue
        assert theirs is not None
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert float(error) < 1e-5


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_statistics_without_gradients(name: str, bias: bool) -> None:
    hidden, weight, offset, targets, _ = problem(700, 24, 333, bias)
    with torch.no_grad():
        _, stats = token_logprobs(hidden, weight, offset, targets, TRANSFORMS[name], 6 * 333 * 100, stats=True)
    assert stats is not None
    measured = dense_stats(hidden, weight, offset, targets, TRANSFORMS[name])
    torch.testing.assert_close(torch.stack(tuple(stats)).double(), measured, rtol=1e-5, atol=1e-5)


def test_gradcheck_in_float64() -> None:
    hidden, weight, offset, targets, _ = problem(5, 4, 11, True)
    assert offset is not None
    inputs = [t.double().requires_grad_() for t in (hidden, weight, offset)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, b, targets, LogitTransform(0.7, 2.0))[0], inputs
    )


def test_an_empty_batch_gives_gradients_to_all_parameters() -> None:
    hidden, weight, _, targets, _ = problem(0, 8, 50, False)
    hidden.requires_grad_()
    weight.requires_grad_()
    logps, _ = token_logprobs(hidden, weight, None, targets)
    logps.sum().backward()
    assert logps.shape == (0,)
    assert weight.grad is not None and float(weight.grad.abs().max()) == 0.0
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)


@pytest.mark.parametrize("trained", [False, True])
def test_bf16_keeps_fp32_logps(trained: bool) -> None:
    """fp32 sums of bf16 inputs are much closer to the exact result than a bf16 log-softmax (rms 2e-2)."""
    hidden, weight, _, targets, upstream = problem(600, 64, 9000, False)
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(trained)
    wide_hidden, wide_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = dense(wide_hidden, wide_weight, None, targets, LogitTransform())
    expected.backward(upstream.double())
    found, stats = token_logprobs(hidden, weight, None, targets)
    assert stats is None
    found.backward(upstream)
    assert found.dtype == torch.float32
    assert float((found - expected).detach().abs().max()) < 1e-4
    assert hidden.grad is not None and wide_hidden.grad is not None
    assert float((hidden.grad - wide_hidden.grad).norm() / wide_hidden.grad.norm()) < 1e-2
    if trained:
        assert weight.grad is not None and wide_weight.grad is not None
        assert float((weight.grad - wide_weight.grad).norm() / wide_weight.grad.norm()) < 1e-2


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("tokens", [300, 1024])
@pytest.mark.parametrize("trained", [False, True])
def test_no_tensor_has_half_of_the_logits(tokens: int, trained: bool) -> None:
    vocabulary = 32000
    hidden, weight, _, targets, upstream = problem(tokens, 16, vocabulary, False)
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    with LargestTensor() as largest:
        token_logprobs(hidden, weight, None, targets, stats=True)[0].backward(upstream)
        with torch.no_grad():
            token_logprobs(hidden, weight, None, targets, stats=True)
    assert 0 < largest.elements < tokens * vocabulary // 2


@pytest.mark.parametrize(("tokens", "width"), [(512, 8192), (1024, 4096), (4096, 4096)])
def test_temporary_tensors_of_the_backward_pass_fit_in_tile_bytes(
    tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products as on a GPU, for the trained bf16 head of a large model, all of them together."""
    monkeypatch.setattr(products, "sums_wider", lambda factor: True)
    monkeypatch.setattr(products, "mixed_product", lambda a, b, dtype: a.new_empty(len(a), b.shape[1], dtype=dtype))
    with FakeTensorMode():
        hidden, weight = (
            torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, 128256)
        )
        logps, _ = token_logprobs(hidden, weight, None, torch.empty(tokens, dtype=torch.long))
        with MemTracker() as tracker:
            logps.sum().backward()
    (peak,) = (found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    lasting = 2 * weight.nbytes + 3 * hidden.nbytes  # both with gradients, and the saved Jacobian
    assert 0 < peak - lasting <= DEFAULT_TILE_BYTES


def test_a_rounded_product_is_written_in_blocks() -> None:
    left, right = torch.randn(700, 5, dtype=torch.bfloat16), torch.randn(5, 40, dtype=torch.bfloat16)
    out = torch.full((700, 40), torch.nan, dtype=torch.bfloat16)
    products.write_product(out, left, right, torch.float32, tile_bytes=0)
    torch.testing.assert_close(out.double(), left.double() @ right.double(), rtol=4e-3, atol=1e-6)


def test_tile_length_respects_its_budget() -> None:
    assert tile_length(100_000, 32000, 256 * 2**20) == 256 * 2**20 // (6 * 32000)
    assert tile_length(100_000, 10**9, 2**20) == 256  # the minimum
    assert tile_length(900, 512, 256 * 2**20) == 300  # a third of the rows
    assert tile_length(0, 512, 2**20) >= 1


COMMON = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "llama-untied": LlamaConfig(**COMMON, intermediate_size=48, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**COMMON, intermediate_size=48, tie_word_embeddings=True),
    "gemma2-capped": Gemma2Config(
        **COMMON, intermediate_size=48, head_dim=8, num_key_value_heads=2, final_logit_softcapping=0.05
    ),
    "cohere-scaled": CohereConfig(**COMMON, intermediate_size=48, logit_scale=0.3),
    "granite-divided": GraniteConfig(**COMMON, intermediate_size=48, logits_scaling=4.0),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
    "opt": OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32),
}


def scored(scorer: CompletionScorer, ids: Tensor) -> Tensor:
    length = ids.shape[1]
    return scorer({"input_ids": ids}, torch.arange(length - 1), ids[0, 1:], length - 1).scores


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scorer_matches_the_models_logits(name: str) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    ids = torch.randint(3, 97, (1, 20))
    logits = model(ids).logits[0, :-1]
    expected = logits.log_softmax(-1)[torch.arange(19), ids[0, 1:]]
    expected.sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    names = [n for n, _ in model.named_parameters()]

    scorer = CompletionScorer(model).eval()
    found = scored(scorer, ids)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    found.sum().backward()
    assert [n for n, _ in model.named_parameters()] == names, "replacing the head must not change a parameter's name"
    for n, p in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(p.grad, gradients[n], rtol=1e-7, atol=1e-9, msg=n)
    check_scorer(scorer, torch.device("cpu"))


def test_check_detects_nan() -> None:
    """Corrupt weights make both sides NaN, which is neither above nor below any tolerance."""
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama-untied"])
    model.lm_head.weight.data[7].fill_(float("nan"))
    with pytest.raises(ModelError, match="contain NaN or infinite values, so its weights are corrupted"):
        check_scorer(CompletionScorer(model), torch.device("cpu"))


def test_generation_with_the_head_which_is_installed_once() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama-tied"]).eval()
    ids = torch.randint(3, 97, (1, 5))
    before = model.generate(ids, max_new_tokens=6, do_sample=False)
    head = install_logprob_head(model)
    assert install_logprob_head(model) is not head and isinstance(model.lm_head, LogProbHead)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), before)


class DoubledHead(nn.Linear):
    """A custom head that is not a plain linear layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 2


@pytest.mark.parametrize("longest", [130, 700])
def test_fallback_for_an_unknown_head(longest: int) -> None:
    """The number of chunks depends on the largest share of any rank; chunks may be empty."""
    hidden, weight, _, targets, upstream = problem(130, 24, 333, False)
    head = DoubledHead(24, 333, bias=False)
    head.weight.data.copy_(weight)
    wide_hidden, wide_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = dense(wide_hidden, wide_weight * 2, None, targets, TRANSFORMS["capped"])
    expected.backward(upstream.double())
    hidden.requires_grad_()
    calls: list[int] = []
    head.register_forward_hook(lambda *_: calls.append(1))
    found, stats = checkpointed_logprobs(
        head, hidden, targets, TRANSFORMS["capped"], 6 * 333 * 100, longest, stats=True
    )
    assert stats is not None
    measured = dense_stats(wide_hidden.detach(), 2 * wide_weight.detach(), None, targets, TRANSFORMS["capped"])
    torch.testing.assert_close(torch.stack(tuple(stats)).double(), measured, rtol=1e-5, atol=1e-5)
    assert len(calls) == -(-longest // tile_length(longest, 333, 6 * 333 * 100))
    found.backward(upstream)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None and head.weight.grad is not None
    assert wide_hidden.grad is not None and wide_weight.grad is not None
    assert float((hidden.grad - wide_hidden.grad).norm() / wide_hidden.grad.norm()) < 1e-5
    assert float((head.weight.grad - wide_weight.grad).norm() / wide_weight.grad.norm()) < 1e-5


def test_tensors_saved_for_backward_have_the_dtype_of_the_hidden_states() -> None:
    """One (N, H) tensor, which would take twice the memory of the hidden states in fp32."""
    hidden = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_logprobs(hidden, weight, None, torch.zeros(40, dtype=torch.long))
    wide = [tensor for tensor in kept if tensor.shape == (40, 16)]
    assert wide and all(tensor.dtype == torch.bfloat16 for tensor in wide)


@pytest.mark.parametrize("kind", ["an own subclass", "a trainable copy"])
def test_heads_that_are_not_plain_layers(kind: str) -> None:
    """A head of a model's own class stays, and only its logits are used; PEFT's copy is replaced with its original."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(ARCHITECTURES["llama-untied"]).double()
    ids = torch.randint(0, model.config.vocab_size, (1, 20))
    if kind == "an own subclass":
        head = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.functional.linear(x, self.weight)})
        model.lm_head.__class__ = head
    else:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        model.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(3)
        model = model.base_model.model
    kept = model.lm_head
    expected = model(ids).logits[0, :-1].log_softmax(-1)[torch.arange(19), ids[0, 1:]]
    scorer = CompletionScorer(model).eval()
    assert answers_logprobs(model.get_output_embeddings()) == (kind == "a trainable copy")
    torch.testing.assert_close(scored(scorer, ids), expected, rtol=1e-9, atol=1e-9)
    assert model.lm_head is kept
    if kind == "a trainable copy":
        heads = [kept.original_module, *kept.modules_to_save.values()]
        assert len(heads) == 2 and all(isinstance(head, LogProbHead) for head in heads)


def test_models_without_a_head_or_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama-untied"])
    with pytest.raises(ModelError, match="^model LlamaModel has no language modeling head; load it with "):
        install_logprob_head(model.model)
    monkeypatch.setattr(scorer, "decoder_of", lambda model: None)
    with pytest.raises(ModelError, match=r"^model LlamaForCausalLM \(llama\) is not supported: it has no decoder"):
        CompletionScorer(model)
