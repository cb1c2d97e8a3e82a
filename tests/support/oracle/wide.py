"""Models in dense float64 and their log-probs, the basis of the other modules of this package.

``module.double()`` is not sufficient: transformers computes norms, rotary angles and the attention's softmax in
float32 regardless of the weights, which *narrows* a float64 model. :class:`WideMaths` converts such requests to
float64, the modules' constants (rotary frequencies) are recomputed in float64, and :class:`OnlyFloat64` fails on any
operation that still returns a narrower tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

Source = str | Path | nn.Module
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)


class WideMaths(TorchFunctionMode):
    """Replaces every 16- or 32-bit floating-point dtype requested from torch with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NARROWING:
            return args[0].double()
        widened = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*(_wide(arg) for arg in args), **widened)


class OnlyFloat64(TorchDispatchMode):
    """Fails on an operation, forward or backward, that returns a floating-point tensor other than float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                raise TypeError(f"{func} gave {leaf.dtype} inside the float64 computation")
        return out


@contextmanager
def wide_maths() -> Iterator[None]:
    """Use float64 as the default dtype and for every narrower request, and check every operation."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WideMaths(), OnlyFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def widen(module: nn.Module) -> nn.Module:
    """Return a float64 copy of a live model in evaluation mode.

    A transformers model is rebuilt from its configuration, so that its constants are computed in float64, and then
    gets the weights. Any other module is copied and cast; its buffers keep the precision in which they were created.
    """
    if not isinstance(module, PreTrainedModel):
        return copy.deepcopy(module).double().eval()
    config = copy.deepcopy(module.config)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]), wide_maths():
        fresh = type(module)(config).double()
    weights = {name: value.double() for name, value in module.state_dict().items()}
    fresh.load_state_dict(weights)
    if any(not torch.equal(value, weights[name]) for name, value in fresh.state_dict().items()):
        raise ValueError(
            f"{type(module).__name__}: tie_word_embeddings of its configuration is not what its weights are"
        )
    trained = dict(module.named_parameters())
    for name, parameter in fresh.named_parameters():
        parameter.requires_grad_(trained[name].requires_grad)
    return fresh.eval()


def load(source: Source) -> nn.Module:
    """Load the float64 model of a Hugging Face folder or of a live module (see :func:`widen`)."""
    if isinstance(source, nn.Module):
        return widen(source)
    return widen(AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float64))


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def token_logps(
    model: nn.Module, prompt_ids: Sequence[int], completion_ids: Sequence[int], max_length: int | None = None
) -> Tensor:
    """Return (n,) log-probs of the completion tokens after truncating the sequence at the end.

    A token without context (empty prompt, no BOS) has no probability and is not counted.
    """
    ids = [*prompt_ids, *completion_ids][:max_length]
    first = max(len(prompt_ids), 1)
    if first >= len(ids):
        return torch.zeros(0, dtype=torch.float64)
    with wide_maths():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        logps = torch.log_softmax(logits, dim=-1)
        return torch.stack([logps[place - 1, ids[place]] for place in range(first, len(ids))])
