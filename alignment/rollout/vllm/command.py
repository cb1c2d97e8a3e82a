"""The command line and the environment of a vLLM server for a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from alignment.config.dtypes import uses_cuda
from alignment.config.errors import ModelError, OptionError, refuse
from alignment.config.options_online import OnlineOptions
from alignment.engines.memory import VARIABLES as ALLOCATOR_VARIABLES
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.run.ranks import VARIABLES as RANK_VARIABLES

# Endpoints that set weights and adapters, and no usage statistics.
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; by default most of the host's memory
LOCAL = "127.0.0.1"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA, for which vLLM 0.32 reserves memory
COLOCATED_SHARE = 0.55


def sleeps(options: OnlineOptions) -> bool:
    """Whether the server frees the memory of the GPU between rollouts."""
    asked = options.vllm_enable_sleep_mode
    return options.vllm_mode == "colocate" and (uses_cuda(options) if asked is None else asked)


def memory_share(options: OnlineOptions) -> float | None:
    """The share of a GPU's memory that the server takes; None: what vLLM takes by default."""
    return options.vllm_gpu_memory_utilization or (COLOCATED_SHARE if options.vllm_mode == "colocate" else None)


def serve_command(
    options: OnlineOptions, source: ModelSource, adapters: Adapters | None, compute: str, *, host: str, port: int
) -> list[str]:
    """Return the command line of a server for a policy.

    Args:
        options: the run's options.
        source: the policy's model.
        adapters: its adapters, if they are trained instead of the model.
        compute: the dtype in which the policy computes.
        host: address to listen on.
        port: port to listen on.

    Raises:
        ModelError: the model is a live object, which a server cannot load.
        OptionError: the server cannot generate as the policy does.
    """
    if source.path is None:
        raise ModelError(
            f"{source.name}: vLLM loads the model by its path; pass a folder or a Hub name to the trainer"
        )
    if source.quantization is not None and not options.vllm_allow_base_mismatch:
        why = f"the policy's {source.quantization.bits}-bit weights are another distribution than the server's"
        refuse(options, "vllm_allow_base_mismatch", f"{why}; set it to true, or remove the quantization")
    local = Path(source.path).expanduser()
    model = os.path.abspath(local) if local.exists() else source.path
    words = [options.vllm_executable, "serve", model, "--host", host, "--port", str(port), "--dtype", compute]
    words += ["--max-model-len", str(options.vllm_max_model_length or options.max_length)]
    words += ["--model-impl", options.vllm_model_impl, "--generation-config", "vllm", "--enable-scale-out"]
    words += ["--logprobs-mode", "raw_logprobs", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    if adapters is not None:
        words += ["--enable-lora", "--max-lora-rank", str(_lora_rank(adapters))]
    if (share := memory_share(options)) is not None:
        words += ["--gpu-memory-utilization", str(share)]
    if options.vllm_tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(options.vllm_tensor_parallel_size)]
    words += ["--revision", source.init_kwargs["revision"]] if source.init_kwargs.get("revision") else []
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    words += ["--enable-sleep-mode"] if sleeps(options) else []
    return words if uses_cuda(options) else [*words, "--enforce-eager"]


def _lora_rank(adapters: Adapters) -> int:
    """Return the smallest rank that vLLM accepts as a maximum and that is not below that of the adapters."""
    own = int(getattr(adapters.config, "r", 0))
    found = next((each for each in _RANKS if each >= own), None)
    if found is None:
        raise OptionError(f"lora_r={own}: vLLM serves adapters up to rank {_RANKS[-1]}; set a smaller one")
    return found


def listening(options: OnlineOptions) -> tuple[str, int]:
    """Return the host and the port on which the server of ``vllm_mode: server`` listens."""
    parts = urlsplit(options.vllm_url)
    if parts.scheme != "http" or parts.hostname is None:
        refuse(options, "vllm_server_base_url", "vllm-serve starts a server without TLS; set http://HOST:PORT")
    return (LOCAL if parts.hostname == "localhost" else parts.hostname), parts.port or 80


def server_variables(options: OnlineOptions) -> dict[str, str]:
    """Return the variables that a server needs in its environment, besides those that it has."""
    on_cpu = {} if uses_cuda(options) else {key: os.environ.get(key, value) for key, value in _ON_CPU.items()}
    return VARIABLES | on_cpu


def server_environment(options: OnlineOptions) -> dict[str, str]:
    """Return the environment of this process for a server, without what concerns the ranks and their libraries."""
    # vLLM joins a process group of its own. Its pool of memory that sleeps excludes expandable segments.
    dropped = {*RANK_VARIABLES, *ALLOCATOR_VARIABLES, "LOCAL_WORLD_SIZE", "PYTHONHOME"}
    program = Path(options.vllm_executable).expanduser()
    if program.name != options.vllm_executable and Path(sys.prefix) not in program.absolute().parents:
        dropped.add("PYTHONPATH")  # it is in another environment
    prefixes = ("TORCHELASTIC_", "ROLE_", "GROUP_")
    kept = {name: text for name, text in os.environ.items() if name not in dropped and not name.startswith(prefixes)}
    return kept | server_variables(options)


def colocated_environment(options: OnlineOptions, key: str, device: int | None) -> dict[str, str]:
    """Return the environment of a colocated server, which listens on the local host only.

    Args:
        options: the run's options.
        key: the API key of the server.
        device: index of this rank's GPU among those that it sees; None for the CPU.
    """
    found = server_environment(options) | {"VLLM_API_KEY": key, "VLLM_HOST_IP": LOCAL}
    if device is not None:
        seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        found["CUDA_VISIBLE_DEVICES"] = seen[device].strip() if seen else str(device)
    return found
