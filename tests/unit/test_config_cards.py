"""The compute dtype on GPUs of several generations, with a patched ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fragment_runs import fp16_on_cpu
from support.helpers import STAGES

from alignment import KTOConfig
from alignment.config.dtypes import DtypePlan, compute_dtype, plan_dtypes
from alignment.config.errors import OptionError
from alignment.planning import engines

CARDS = {"P100": (6, 0), "V100": (7, 0), "T4": (7, 5), "A10": (8, 6), "H100": (9, 0)}
Plan = Callable[..., DtypePlan]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The dtypes of a run on a host with these cards, a rank for each or ``ranks``; this one has the first."""

    def planned(*cards: str, ds: dict[str, Any] | None = None, ranks: int | None = None, **options: Any) -> DtypePlan:
        of = [CARDS[card] for card in cards]
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks or len(cards)))
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: len(cards),
            "current_device": lambda: 0,
            "get_device_name": lambda: cards[0],
            "get_device_capability": lambda device=0: of[device],
            "get_device_properties": lambda device=0: SimpleNamespace(major=of[device][0], minor=of[device][1]),
            # What an emulated bf16 says of itself.
            "_check_bf16_tensor_supported": lambda device: True,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        with fp16_on_cpu():
            return plan_dtypes(KTOConfig("out", **options), STAGES["stage2"] if ds is None else ds)

    return planned


@pytest.mark.parametrize(
    ("cards", "ranks", "compute"),
    [
        (("A10",), None, "bfloat16"),
        (("H100", "A10"), None, "bfloat16"),
        (("T4",), None, "float16"),
        (("V100",), None, "float16"),
        (("P100",), None, "float32"),
        # Every rank of a host decides as the oldest card has to; a GPU that no rank uses is ignored.
        (("A10", "T4"), None, "float16"),
        (("T4", "A10"), None, "float16"),
        (("A10", "P100"), None, "float32"),
        (("A10", "P100"), 1, "bfloat16"),
        (("T4", "P100"), 1, "float16"),
        (("A10", "A10", "P100"), 3, "float32"),
    ],
)
def test_bf16_is_used_if_all_gpus_support_it(
    cards: tuple[str, ...], ranks: int | None, compute: str, plan: Plan
) -> None:
    made = plan(*cards, ranks=ranks)
    assert (made.compute, made.master) == (compute, "float32")
    assert (made.note is None) == (compute == "bfloat16")
    assert compute_dtype(KTOConfig("out")) == compute, "what options say without a JSON is the same"


def test_hosts_with_different_gpus_are_rejected(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host decides by its own GPUs, and ranks with different dtypes would wait for each other forever."""
    made: Any = SimpleNamespace(dtypes=plan("A10"), adapters=None)
    monkeypatch.setattr(engines, "gathered", lambda own: [own, own, "float16", "float16"])
    with pytest.raises(OptionError, match=r"bfloat16 on rank 0, float16 on rank 2\); set dtype"):
        engines.check_alike(made)
    monkeypatch.setattr(engines, "gathered", lambda own: [own, own])
    engines.check_alike(made)


@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3"])
def test_turing_trains_in_fp16_at_every_stage_with_a_note(stage: str, plan: Plan) -> None:
    made = plan("T4", ds=STAGES[stage])
    assert made.ds["fp16"] == {"enabled": True} and made.ds["bf16"] == {"enabled": False}
    assert made.note is not None and made.note.startswith("fp16: T4 does not support bf16")
    assert "\n" not in made.note and "dtype: float32" in made.note


def test_requested_bf16_is_emulated_with_a_warning(plan: Plan) -> None:
    made = plan("T4", bf16=True)
    assert made.compute == "bfloat16"
    assert made.note is not None and "emulates" in made.note and "slow" in made.note
    assert plan("T4", ds={**STAGES["stage2"], "bf16": {"enabled": True}}).note == made.note


@pytest.mark.parametrize(
    ("options", "ds"), [({"fp16": False}, {}), ({}, {"fp16": {"enabled": False}})], ids=["option", "json"]
)
def test_fp32_is_used_if_fp16_is_disabled(options: dict[str, Any], ds: dict[str, Any], plan: Plan) -> None:
    made = plan("T4", ds={**STAGES["stage2"], **ds}, **options)
    assert made.compute == "float32" and made.note is not None and made.note.startswith("fp32: T4")
