"""What `alignment.internals.torch` relies on."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from torch import nn
from torch.distributed import TCPStore

from alignment.engines.launch_env import init_distributed
from alignment.internals.torch import default_store, is_dropout, without_forward_hooks
from tools.ranks import RankServer


@pytest.mark.usefixtures("own_process_group")
def test_the_store_serves_as_long_as_it_is_held() -> None:
    """Another connection reaches it at the group's address, also when the group is gone."""
    import deepspeed

    init_distributed(use_cpu=True)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held = default_store()
    client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    client.set("alignment.tests/word", "held")
    deepspeed.comm.destroy_process_group()
    assert client.get("alignment.tests/word") == b"held"
    del held


@pytest.mark.parametrize(("when", "said"), [("before", "rank 0 waited"), ("after", "rank 0 gave up")])
def test_a_collective_waits_as_long_as_was_set(ranks: RankServer, when: str, said: str) -> None:
    done = ranks.run(DRIVERS / "group_timeout.py", when, timeout=60, check=False)
    assert said in done.stdout


def test_dropout_of_every_kind_is_one() -> None:
    kinds = [kind for name, kind in vars(nn).items() if "Dropout" in name and isinstance(kind, type)]
    assert len(kinds) >= 6 and all(is_dropout(kind(0.5)) and kind(0.5).p == 0.5 for kind in kinds)
    assert not any(is_dropout(module) for module in (nn.Linear(1, 1), nn.Identity(), nn.Sequential(nn.Dropout())))


def test_hooks_are_back_in_their_order_on_any_exit() -> None:
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
