"""Which kernel of SDPA a model uses on a GPU: what torch says that it can use is patched."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.helpers import tiny_config
from torch.backends.cuda import SDPAParams
from transformers import AutoModelForCausalLM
from transformers.integrations import sdpa_attention

from alignment.engines import scoring
from alignment.models import attention
from alignment.models.scorer import CompletionScorer
from alignment.models.tasks import CAUSAL_LM

# Which heads each kernel supports, by GPU and dtype, as in torch's sdp_utils.cpp: FlashAttention, the memory-efficient
# one; whether keys are shared; whether a line is printed.
EQUAL_HEADS, ANY_HEADS, NEVER = (lambda grouped: not grouped), (lambda grouped: True), (lambda grouped: False)
CASES = {
    "Ampere, bf16": (ANY_HEADS, EQUAL_HEADS, True, False),
    "Turing, fp16": (NEVER, EQUAL_HEADS, False, False),
    "fp32": (NEVER, EQUAL_HEADS, False, False),
    "Turing, bf16": (NEVER, NEVER, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_grouped_queries_do_not_use_the_math_kernel(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are expanded where only the math kernel shares them; a line is printed if it is used all the same."""
    flash, efficient, shared, warned = CASES[case]
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    heads: list[tuple[int, int]] = []

    def supported(by: Any) -> Any:
        def can_use(call: SDPAParams) -> bool:
            heads.append((call.query.shape[1], call.key.shape[1]))
            return bool(by(call.enable_gqa))

        return can_use

    monkeypatch.setattr(attention, "can_use_flash_attention", supported(flash))
    monkeypatch.setattr(attention, "can_use_efficient_attention", supported(efficient))
    monkeypatch.setattr(scoring, "settle", lambda *_: None)
    torch.manual_seed(0)
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(tiny_config("tied")))
    engine = mock.Mock(device=torch.device("cuda"), scorer=scorer, partitioned=False)
    task = mock.Mock()
    task.check_scorer.side_effect = lambda scorer, device: CAUSAL_LM.check_scorer(scorer, torch.device("cpu"))
    scoring.checked(engine, task)
    assert ((4, 2) in heads) == shared and ((4, 4) in heads) != shared
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention: ")]
    assert len(lines) == warned and all("LlamaForCausalLM in float32" in line for line in lines)
