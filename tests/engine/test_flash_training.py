"""Training with FlashAttention, whose functions are replaced by plain torch: no layer reads the positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.drivers.rollout import policy_engine
from support.flash_attention import flash_attention
from support.helpers import make_model
from transformers import modeling_flash_attention_utils

from alignment.data.batching import collate
from alignment.models.loading import enable_checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_layer_reads_the_positions_of_a_row(
    reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the forward pass nor in its recomputation for the backward pass; the gradient is the same."""
    looked: list[int] = []
    look = modeling_flash_attention_utils._is_packed_sequence
    monkeypatch.setattr(
        modeling_flash_attention_utils, "_is_packed_sequence", lambda *args: looked.append(args[1]) or look(*args)
    )
    policy = policy_engine(make_model(tmp_path / "model", layers=3), "stage0")
    enable_checkpointing(policy.scorer.model, {"use_reentrant": reentrant})
    policy.scorer.one_pass = reentrant
    batch = policy.placed(collate([(range(2, 10), range(10, 18))], 8))
    found, numbers = {}, []
    for attention in ("sdpa", "known", "not known"):
        policy.scorer.whole_rows.shared = attention != "not known"
        with flash_attention(policy.scorer.model, 2) as calls:
            if attention == "sdpa":
                policy.scorer.model.config._attn_implementation = attention
            scores = policy.forward(batch).scores
            policy.backward(-scores.sum() / 8, last=True)
        found[attention] = torch.cat([p.grad.flatten() for p in policy.scorer.parameters() if p.grad is not None])
        policy.discard()
        numbers.append((calls.whole, len(looked)))
        looked.clear()
    assert numbers == [(0, 0), (6, 0), (6, 6)], "three layers, forward and again"
    torch.testing.assert_close(found["known"], found["sdpa"])
    assert torch.equal(found["known"], found["not known"])
    policy.close()
