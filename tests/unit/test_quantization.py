"""Quantization of base weights, planned from options and configurations before weights are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import tiny_config
from transformers import BitsAndBytesConfig

from alignment import KTOConfig
from alignment.config.errors import AlignmentError
from alignment.models import quantization
from alignment.models.quantization import Quantization, plan_quantization

BF16 = torch.bfloat16


def plan(stored: Any = None, stage: int = 2, kwargs: Any = None, live: bool = False, **options: Any) -> Any:
    """Return the plan for a model whose configuration has ``stored``."""
    config = tiny_config("tied")
    if stored is not None:
        config.quantization_config = stored
    args = KTOConfig("out", **options)
    return plan_quantization(
        args,
        config,
        kwargs or {},
        key="some/model",
        in_4bit=args.load_in_4bit,
        in_8bit=args.load_in_8bit,
        live=live,
        compute=BF16,
        stage=stage,
    )


def in_4bit(**more: Any) -> dict[str, Any]:
    """Return a stored configuration, as in a checkpoint's JSON."""
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, **more}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_four_bits_are_packed_in_the_compute_dtype(stage: int) -> None:
    made = plan(stage=stage, load_in_4bit=True).config
    assert (made.bnb_4bit_quant_type, made.bnb_4bit_use_double_quant) == ("nf4", True)
    assert (made.bnb_4bit_compute_dtype, made.bnb_4bit_quant_storage) == (BF16, BF16)


def test_options_are_followed() -> None:
    made = plan(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4",
        bnb_4bit_compute_dtype="float32",
        bnb_4bit_quant_storage="uint8",
        use_bnb_nested_quant=False,
    ).config
    assert (made.bnb_4bit_quant_type, made.bnb_4bit_use_double_quant) == ("fp4", False)
    assert (made.bnb_4bit_compute_dtype, made.bnb_4bit_quant_storage) == (torch.float32, torch.uint8)
    assert plan(load_in_8bit=True).bits == 8


@pytest.mark.parametrize("as_object", [False, True])
def test_a_configuration_in_model_init_kwargs(as_object: bool) -> None:
    """Unset values are filled in with those that the run needs; others are kept, also the default in a dictionary."""
    form: Any = BitsAndBytesConfig if as_object else dict
    given: Any = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    made = plan(stage=3, kwargs={"quantization_config": form(**given, bnb_4bit_use_double_quant=True)})
    assert (made.config.bnb_4bit_compute_dtype, made.config.bnb_4bit_quant_storage) == (BF16, BF16)
    for dtype in ("float16", *["float32"] * (not as_object)):
        other = given | {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": "bfloat16"}
        made = plan(kwargs={"quantization_config": form(**other)})
        assert made.config.bnb_4bit_compute_dtype == getattr(torch, dtype)


def test_a_packed_checkpoint_is_used_unchanged() -> None:
    as_bytes, as_bf16 = in_4bit(), in_4bit(bnb_4bit_quant_storage="bfloat16")
    for stage, stored, repack in ((0, as_bytes, None), (2, as_bytes, None), (3, as_bytes, BF16), (3, as_bf16, None)):
        made = plan(stored, stage=stage)
        assert isinstance(made, Quantization) and made.stored and made.repack == repack
    assert plan({"quant_method": "bitsandbytes", "load_in_8bit": True}, stage=3).repack is None
    assert plan(in_4bit(), load_in_4bit=True).stored


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("stage 3 only partitions weights of the compute dtype", {"stage": 3, "bnb_4bit_quant_storage": "uint8"}),
        ("'float32': the run computes in bfloat16", {"bnb_4bit_quant_storage": "float32"}),
        ("does not partition quantization constants", {"stage": 3, "use_bnb_nested_quant": False}),
        ("remove one of the two", {"kwargs": {"quantization_config": {"load_in_4bit": True}}}),
        ("a live model", {"live": True}),
        ("already quantized to 8 bits", {"stored": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
        ("is already quantized", {"stored": in_4bit(), "kwargs": {"quantization_config": {"load_in_4bit": True}}}),
        ("stored as float32", {"stored": in_4bit(bnb_4bit_quant_storage="float32")}),
        ("quantized with gptq", {"stored": {"quant_method": "gptq", "bits": 4}}),
        ("quantized with awq", {"stored": {"quant_method": "awq", "bits": 4}}),
    ],
)
def test_what_cannot_be_is_said(said: str, more: dict[str, Any]) -> None:
    with pytest.raises(AlignmentError, match=said) as caught:
        plan(load_in_4bit=True, **more)
    assert "\n" not in str(caught.value)


def test_bitsandbytes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(AlignmentError, match="not installed; run pip install bitsandbytes"):
        plan(in_4bit())


def test_configurations_that_bitsandbytes_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AlignmentError, match="^model_init_kwargs: quantization_config=.*'yes'.* is not valid for "):
        plan(kwargs={"quantization_config": {"load_in_4bit": "yes"}})
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    for given in (BitsAndBytesConfig(load_in_4bit=True), {"load_in_4bit": True}):
        with pytest.raises(AlignmentError, match="^model_init_kwargs: .* not installed"):
            plan(kwargs={"quantization_config": given})
