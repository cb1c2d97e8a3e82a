"""The command ``vllm-serve``: the command that it prints or runs, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from support.fake_vllm_program import write_program
from support.helpers import exit_status, tiny_config

from alignment.cli.vllm_serve import main

pytestmark = pytest.mark.usefixtures("own_process_group")
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are printed for GPUs, unless the variable asks for CPUs; the command sets it itself."""
    monkeypatch.setenv("DS_ACCELERATOR", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    tiny_config("tied").save_pretrained(folder / "model")
    LoraConfig(r=48, target_modules=["q_proj", "v_proj"]).save_pretrained(folder / "adapter")
    return folder


def arguments(folder: Path, *more: object) -> list[str]:
    given = ["online_dpo", "--model_name_or_path", folder / "model", "--reward_funcs", "x.py:f", "--use_vllm"]
    return list(map(str, [*given, "--max_length", 96, "--max_new_tokens", 16, *more]))


def printed(capfd: Any, folder: Path, *more: object) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of the printed command."""
    capfd.readouterr()
    assert exit_status(main, arguments(folder, *more)) == 0
    words = shlex.split(capfd.readouterr().out.replace("\\\n", ""))
    count = next(number for number, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def pairs(words: list[str]) -> dict[str, str]:
    """The options with their values; an empty text for those without one."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word] = ""
        else:
            found[name] = word
    return found


def test_command_of_a_recipe(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    variables, words = printed(capfd, folder)
    assert variables == VARIABLES and words[:3] == ["vllm", "serve", str(folder / "model")]
    assert pairs(words[3:]) == {
        "--host": "127.0.0.1", "--port": "8000", "--dtype": "bfloat16", "--max-model-len": "96",
        "--model-impl": "vllm", "--generation-config": "vllm", "--enable-scale-out": "",
        "--logprobs-mode": "raw_logprobs", "--skip-tokenizer-init": "", "--disable-uvicorn-access-log": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--use_cpu",), {"--dtype": "float32", "--enforce-eager": "", "--no-enable-chunked-prefill": ""}),
        (("--use_peft", "--lora_r", 33), {"--enable-lora": "", "--max-lora-rank": "64"}),
        (("--adapter_name_or_path", "adapter"), {"--enable-lora": "", "--max-lora-rank": "64"}),
        (("--vllm_tensor_parallel_size", 2), {"--tensor-parallel-size": "2"}),
        (("--vllm_gpu_memory_utilization", 0.8), {"--gpu-memory-utilization": "0.8"}),
        (("--vllm_max_model_length", 128), {"--max-model-len": "128"}),
        (("--vllm_model_impl", "transformers"), {"--model-impl": "transformers"}),
        (("--model_init_kwargs", '{"revision": "v1"}'), {"--revision": "v1"}),
        (("--trust_remote_code",), {"--trust-remote-code": ""}),
        (("--vllm_server_port", 9000), {"--port": "9000"}),
        (
            ("--vllm_server_base_url", "http://gpu7:81", "--vllm_weights_folder", "/shared"),
            {"--host": "gpu7", "--port": "81"},
        ),
    ],
)
def test_options_of_the_server(
    folder: Path,
    options: tuple[object, ...],
    expected: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    found = pairs(printed(capfd, folder, *options)[1][3:])
    assert {name: found.get(name) for name in expected} == expected
    assert ("--enable-lora" in found) == ("--enable-lora" in expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rollout_backend", "generate", "--use_vllm", "false"), "rollout_backend: "),
        (("--vllm_mode", "colocate"), "vllm_mode='colocate': "),
        (("--vllm_server_base_url", "https://gpu7"), "vllm_server_base_url='https://gpu7': "),
        (("--vllm_server_base_url", "http://gpu7:81"), "vllm_weights_folder: "),
        (("--use_peft", "--load_in_4bit"), "rollout_backend='vllm': 4-bit"),
        (("--use_peft", "--lora_r", 513), "lora_r: "),
    ],
)
def test_refusals(folder: Path, options: tuple[object, ...], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert exit_status(main, arguments(folder, *options)) == 1
    out, err = capfd.readouterr()
    assert out == "" and f"error: {says}" in err


def test_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process becomes the server, without the variables of a world of one rank."""
    program, facts = write_program(tmp_path, monkeypatch, "fails")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    given = arguments(folder, "--run", "--vllm_executable", program)
    run = os.fork()
    if run == 0:
        try:
            main(given)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == 3
    found = json.loads(facts.read_text())
    assert found["pids"][1] == run and found["arguments"][0] == "serve"
    environment = found["environment"]
    assert environment.items() >= VARIABLES.items() and environment["VLLM_API_KEY"] == "s3cret"
    assert environment.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} == set()
