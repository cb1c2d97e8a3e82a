"""The command line and the environment of a vLLM server for a recipe. Seen with vLLM 0.32."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from alignment.config.dtypes import uses_cuda
from alignment.config.errors import OptionError
from alignment.config.options_online import OnlineOptions
from alignment.engines.memory import VARIABLES as ALLOCATOR_VARIABLES
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.rollout.vllm.support import largest_rank
from alignment.run.ranks import VARIABLES as RANK_VARIABLES

LOCAL = "127.0.0.1"
# Endpoints that set weights and adapters, and no usage statistics.
_VARIABLES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
_CACHE_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"  # GiB; by default most of the host's memory
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank accepts
_COLOCATED_SHARE = 0.55  # of the GPU


def sleeps(options: OnlineOptions) -> bool:
    """Whether the server frees the memory of the GPU between rollouts."""
    asked = options.vllm_enable_sleep_mode
    return options.vllm_mode == "colocate" and (uses_cuda(options) if asked is None else asked)


def memory_share(options: OnlineOptions) -> float | None:
    """The share of a GPU's memory that the server takes; None: what vLLM takes by default."""
    return options.vllm_gpu_memory_utilization or (_COLOCATED_SHARE if options.vllm_mode == "colocate" else None)


def serve_command(
    options: OnlineOptions, source: ModelSource, adapters: Adapters | None, compute: str, *, host: str, port: int
) -> list[str]:
    """Return the command line of a server for a policy.

    Args:
        options: the run's options.
        source: the policy's model.
        adapters: its adapters; None if the full model is trained.
        compute: the dtype in which the policy computes.
        host: address to listen on.
        port: port to listen on.

    Raises:
        OptionError: the rank of the adapters is too large.
    """
    folder = Path(source.name).expanduser()
    model = os.path.abspath(folder) if folder.is_dir() else source.name
    words = [options.vllm_executable, "serve", model, "--host", host, "--port", str(port), "--dtype", compute]
    words += ["--max-model-len", str(options.vllm_max_model_length or options.max_length)]
    words += ["--model-impl", options.vllm_model_impl, "--generation-config", "vllm", "--enable-scale-out"]
    words += ["--logprobs-mode", "raw_logprobs", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    if adapters is not None:
        rank = largest_rank(adapters)
        if rank > _LORA_RANKS[-1]:
            raise OptionError(f"lora_r: vLLM serves adapters of ranks up to {_LORA_RANKS[-1]}, not {rank}; reduce it")
        words += ["--enable-lora", "--max-lora-rank", str(min(each for each in _LORA_RANKS if each >= rank))]
    if (share := memory_share(options)) is not None:
        words += ["--gpu-memory-utilization", str(share)]
    if options.vllm_tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(options.vllm_tensor_parallel_size)]
    words += ["--revision", source.init_kwargs["revision"]] if source.init_kwargs.get("revision") else []
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    words += ["--enable-sleep-mode"] if sleeps(options) else []
    # On CPUs, vLLM 0.32 ends at a request with a seed whose prompt it processes in several parts.
    return words if uses_cuda(options) else [*words, "--enforce-eager", "--no-enable-chunked-prefill"]


def server_variables(options: OnlineOptions) -> dict[str, str]:
    """Return the variables that a server needs in its environment."""
    cache = {} if uses_cuda(options) else {_CACHE_ON_CPU: os.environ.get(_CACHE_ON_CPU, "1")}
    return dict.fromkeys(_VARIABLES, "1") | cache


def server_environment(options: OnlineOptions) -> dict[str, str]:
    """Return the environment of this process for a server, without what concerns ranks and their libraries."""
    # vLLM joins a process group of its own. Its pool of memory that sleeps excludes expandable segments.
    dropped = {*RANK_VARIABLES, *ALLOCATOR_VARIABLES, "LOCAL_WORLD_SIZE", "PYTHONHOME"}
    program = Path(options.vllm_executable).expanduser()
    if program.name != options.vllm_executable and Path(sys.prefix) not in program.absolute().parents:
        dropped.add("PYTHONPATH")  # it is in another environment
    others = ("TORCHELASTIC_", "ROLE_", "GROUP_")  # of torchrun
    kept = {name: text for name, text in os.environ.items() if name not in dropped and not name.startswith(others)}
    return kept | server_variables(options)


def colocated_environment(options: OnlineOptions, key: str, device: int | None) -> dict[str, str]:
    """Return the environment of a server with an API key on the GPU with this local index; None: on the CPU."""
    found = server_environment(options) | {"VLLM_API_KEY": key, "VLLM_HOST_IP": LOCAL}
    if device is not None:
        seen = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        found["CUDA_VISIBLE_DEVICES"] = seen[device] if seen else str(device)
    return found
