"""Two ranks with completions from one server: shares, versions, errors and stops that all ranks agree on."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT
from support.fake_vllm import GENERATE, FakeVLLM, Fault
from support.helpers import make_model

from alignment.rollout.vllm.rollout import DIFFERENCE
from tools.ranks import RankServer

STAGE_3 = {"deepspeed": {"zero_optimization": {"stage": 3}}, "max_steps": 2, "rows": 5}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"], "max_steps": 2, "rows": 1}
STOPPED = {"save_strategy": "steps", "save_steps": 9, "max_steps": 9, "vllm_server_timeout": 100.0}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FakeVLLM]:
    model = make_model(tmp_path_factory.mktemp("model") / "policy")
    return {name: FakeVLLM(model) for name in ("full", "lora", "other version", "refuses", "stopped")}


@pytest.fixture(scope="module")
def found(
    servers: dict[str, FakeVLLM], tmp_path_factory: pytest.TempPathFactory, ranks: RankServer
) -> list[dict[str, Any]]:
    """The outcomes of each rank."""
    left, versions = [Fault(400, "one request only")], ["other-1"]

    def one_other(answer: dict[str, Any]) -> None:
        if "-1-" in servers["other version"].version and versions:  # one of the second step
            answer["choices"][0]["weight_versions"][0]["version"] = versions.pop()

    def one_refused(path: str, number: int) -> Fault | None:
        return left.pop() if path == GENERATE and number > 8 and left else None

    servers["other version"].edit, servers["refuses"].fault = one_other, one_refused
    servers["stopped"].fault = lambda path, number: Fault(200, wait=90) if path == GENERATE and number > 12 else None
    folder, more = tmp_path_factory.mktemp("ranks"), {"full": STAGE_3, "lora": LORA, "stopped": STOPPED}
    spec = {
        name: {"url": server.url, "model": server.folder, "more": more.get(name, {}), "stop": None}
        for name, server in servers.items()
    }
    spec["stopped"]["stop"] = 6.0
    (folder / "spec.json").write_text(json.dumps(spec))
    began = time.monotonic()
    with contextlib.ExitStack() as running:
        for server in servers.values():
            running.enter_context(server.running())
        ranks.run(DRIVERS / "vllm_ranks.py", folder / "spec.json", timeout=100)
    assert time.monotonic() - began < 90, "a rank has waited for a timeout"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["full", "lora"])
def test_ranks_share_a_server(found: list[dict[str, Any]], servers: dict[str, FakeVLLM], name: str) -> None:
    """Five prompts on two ranks, and one prompt, with which a rank has nothing to ask."""
    server = servers[name]
    assert [each[name]["step"] for each in found] == [2, 2] and [each[name]["error"] for each in found] == ["", ""]
    logged = [entry[DIFFERENCE] for entry in found[0][name]["log"] if DIFFERENCE in entry]
    assert len(logged) == 2 and max(logged) < 1e-5
    versions = [body["new_version"] for body in server.bodies("/update_weight_version")]
    assert len(versions) == len(set(versions)) == 2, "one rank updates the weights, once for each step"
    prompts = 5 if name == "full" else 1
    starts, trained = server.bodies()[:2], [body for body in server.bodies()[2:] if body["sampling_params"]["n"] == 2]
    assert len(trained) == 2 * prompts and len(starts) == 2
    assert len({(tuple(body["token_ids"]), body["cache_salt"]) for body in trained}) == 2 * prompts
    seeds = [body["sampling_params"]["seed"] for body in trained]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("name", "expected"), [("other version", "other-1"), ("refuses", "one request only")])
def test_an_error_of_one_rank_is_that_of_all(found: list[dict[str, Any]], name: str, expected: str) -> None:
    first, second = (each[name] for each in found)
    assert first["error"] == second["error"] and expected in first["error"]
    assert (first["step"], second["step"]) == (1, 1)


def test_all_ranks_stop_in_a_rollout(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "RunStopped" in each["stopped"]["error"] and "is complete" in each["stopped"]["error"]
    assert found[0]["stopped"]["step"] == found[1]["stopped"]["step"]


@pytest.mark.ci
@pytest.mark.parametrize("nproc", [1, 2])
def test_sample_uses_a_server(servers: dict[str, FakeVLLM], tmp_path: Path, ranks: RankServer, nproc: int) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cde", "f")))
    server = FakeVLLM(servers["full"].folder)
    with server.running():
        ranks.run(
            *(ROOT / "launch" / "sample.py", server.folder, "--prompts", prompts, "--out", out, "-n", 3),
            *("--use_vllm", "--vllm_server_base_url", server.url, "--max_length", 64, "--max_new_tokens", 5),
            *("--chunk_size", 2, "--use_cpu", "--disable_tqdm"),
            nproc=nproc,
        )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["prompt"] for row in rows} == {"ab", "cde", "f"} and len(rows) == 9
    assert len(server.bodies()) == nproc + 3 and len(server.bodies("/update_weight_version")) == 1
