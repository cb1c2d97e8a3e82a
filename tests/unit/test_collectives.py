"""Collectives are in one module, which moves tensors to the communication device: NCCL has no backend for the host."""

from __future__ import annotations

import ast

import pytest
import torch
from conftest import ROOT

from alignment.engines import collectives

# `barrier` has no tensor. ProcessFacts offers TRL's `main_process_first`, two layers below the collectives.
ELSEWHERE = {("alignment/config/process_facts.py", "barrier")}
NAMES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter"),
    *("reduce_scatter_tensor", "scatter_object_list", "send", "recv", "isend", "irecv", "barrier"),
    *("monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced", "batch_isend_irecv"),
}


def calls(tree: ast.AST) -> set[str]:
    """Return the collectives of torch and DeepSpeed that a module mentions."""
    modules = ("torch.distributed", "distributed", "dist", "deepspeed.comm", "comm")
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in NAMES and ast.unparse(node.value) in modules
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch.distributed", "deepspeed.comm")
        ):
            found |= {alias.name for alias in node.names} & NAMES
    return found


def test_collectives_are_called_in_one_module() -> None:
    found = set()
    for file in sorted((ROOT / "alignment").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        found |= {(name, call) for call in calls(ast.parse(file.read_text(encoding="utf-8")))}
    home = {pair for pair in found if pair[0] == "alignment/engines/collectives.py"}
    assert {"all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"} <= {call for _, call in home}
    assert found - home == ELSEWHERE


def test_tensors_are_reduced_on_the_communication_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr(collectives, "device", lambda: torch.device("meta"))
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(collectives.dist, name, lambda values, **_: devices.append(values.device.type))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # meta tensors have no values to copy back
    for collective in (collectives.sum_over_ranks, collectives.copied_from_first_rank):
        values = torch.ones(2)
        assert collective(values) is values
    assert devices == ["meta"] * 2
