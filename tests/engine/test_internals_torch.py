"""Assumptions of `alignment.internals.torch`."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from torch import nn
from torch.utils import cpp_extension

from alignment.engines.launch_env import init_distributed
from alignment.internals.torch import (
    has_cuda_compiler,
    hush_deprecated_collectives,
    is_dropout,
    release_pinned_memory,
    schedule_may_go_first,
    storage_key,
    take_scheduled_rates,
    version_of,
    watching_operations,
    without_forward_hooks,
)
from tools.ranks import RankServer


@pytest.mark.ci
def test_the_store_serves_as_long_as_it_is_referenced(ranks: RankServer) -> None:
    """At the group's address, even after the group has been destroyed."""
    done = ranks.run(DRIVERS / "process_group.py", "store", timeout=60)
    assert "rank 0 was given a word" in done.stdout and "rank 1 was given a word" in done.stdout


@pytest.mark.ci
@pytest.mark.parametrize(("rank_0_is", "said"), [("patient", "rank 0 waited"), ("impatient", "rank 0 gave up")])
def test_a_collective_waits_for_the_configured_timeout(ranks: RankServer, rank_0_is: str, said: str) -> None:
    done = ranks.run(DRIVERS / "process_group.py", rank_0_is, timeout=60, check=False)
    assert said in done.stdout, done.report()


def test_every_kind_of_dropout_is_recognized() -> None:
    kinds = [kind for name, kind in vars(nn).items() if "Dropout" in name and isinstance(kind, type)]
    assert len(kinds) >= 6 and all(is_dropout(kind(0.5)) and kind(0.5).p == 0.5 for kind in kinds)
    assert not any(is_dropout(module) for module in (nn.Linear(1, 1), nn.Identity(), nn.Sequential(nn.Dropout())))


def test_in_place_changes_of_a_tensor_are_counted() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    assert version_of(tensor) == before
    tensor += 1
    assert version_of(tensor) == before + 1


def test_a_schedule_that_was_restored_sets_its_rates() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler.last_epoch = 3
    take_scheduled_rates(scheduler)
    assert optimizer.param_groups[0]["lr"] == 2.0 and scheduler.get_last_lr() == [2.0]


def test_hooks_are_restored_in_order_on_any_exit() -> None:
    calls: list[str] = []

    def hook(name: str) -> Any:
        return lambda *_: calls.append(name)

    module = nn.Sequential(nn.Linear(2, 2))
    unwanted = [hook("second"), hook("before")]
    handles = [
        module[0].register_forward_hook(hook("first")),
        module[0].register_forward_hook(unwanted[0], always_call=True),
        module[0].register_forward_hook(hook("third")),
        module.register_forward_pre_hook(unwanted[1], prepend=True),
    ]

    def called() -> list[str]:
        calls.clear()
        module(torch.zeros(1, 2))
        return list(calls)

    before = called()
    assert before == ["before", "first", "second", "third"]
    with pytest.raises(ValueError), without_forward_hooks(module, lambda hook: hook in unwanted):
        assert called() == ["first", "third"]
        raise ValueError
    assert called() == before
    handles[1].remove()
    assert called() == ["before", "first", "third"], "handles are good for what they were"


@pytest.mark.parametrize("installed", [True, False])
def test_the_toolkit_is_that_of_extensions(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path) if installed else None, raising=False)
    assert not has_cuda_compiler(), "the folder of a runtime has no compiler"
    if installed:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch(mode=0o755)
        assert has_cuda_compiler() and f"{tmp_path}/include" in cpp_extension.include_paths("cuda")
        return
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")


def test_allocators_can_be_configured_at_run_time() -> None:
    """The environment is read once, and not before the first question."""
    code = (
        "import os, torch\n"
        "from alignment.internals.torch import allocator_settings, set_allocator_settings\n"
        "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True,pinned_max_cached_size_mb:8'\n"
        "print(allocator_settings())\n"
        "set_allocator_settings('expandable_segments:False')\n"
        "print(allocator_settings())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "expandable_segments:True,pinned_max_cached_size_mb:8",
        "expandable_segments:False",
    ]


def test_unused_pinned_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: calls.append("public"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("private"), raising=False)
    release_pinned_memory()
    assert not calls, "nothing on a CPU, where torch raises"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release_pinned_memory()
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    release_pinned_memory()
    assert calls == ["public", "private"]


def test_a_schedule_may_step_first_if_intended() -> None:
    def steps() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()

    with pytest.warns(UserWarning, match="before"):
        steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with schedule_may_go_first():
            steps()
        with pytest.raises(UserWarning):
            steps()


def test_deprecated_collectives_do_not_warn() -> None:
    init_distributed(use_cpu=True)

    def gather() -> None:
        torch.distributed.all_gather_into_tensor(torch.zeros(1), torch.ones(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning):
            gather()
        hush_deprecated_collectives()
        gather()
        with pytest.raises(FutureWarning):
            warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)


def test_tensors_without_data_are_seen_with_their_sizes() -> None:
    """Those of a backward pass too; views have the key of what they share."""
    seen: list[torch.Tensor] = []
    with torch.device("meta"), watching_operations(seen.append):
        weight = torch.empty(2**20, 2**20, requires_grad=True)
        (weight @ torch.empty(2**20, 3)).sum().backward()
    assert weight.grad is not None and weight.grad.untyped_storage().nbytes() == 4 * 2**40
    keys = [storage_key(each) for each in seen]
    assert storage_key(weight.grad) in keys and storage_key(weight.t()) == storage_key(weight) != keys[-1]
