"""The real vLLM server of ``tests/vllm/``, in an environment of its own, and tiny models that it can serve."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from alignment import OnlineDPOConfig
from alignment.engines.scoring import ScoringEngine
from alignment.models.adapters.record import Adapters
from alignment.models.source import model_source
from alignment.rollout.vllm.client import Choice, Client
from alignment.rollout.vllm.colocated import Colocated
from support.data_tokenizers import char_tokenizer
from support.helpers import save_random

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 256
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def program() -> Path | None:
    """``bin/vllm`` of the environment of ``VLLM_PYTHON``, by default of ``.venv-vllm``; None if it is missing."""
    python = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    found = python.parent.absolute() / "vllm"
    return found if found.exists() else None


def make_served(folder: Path, *, tied: bool = False, seed: int = 0) -> str:
    """Save a random model with heads of 32 dimensions, the fewest that vLLM has kernels for on a CPU."""
    config = LlamaConfig(
        vocab_size=len(char_tokenizer()),
        hidden_size=64,
        head_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=tied,
    )
    return save_random(folder, AutoModelForCausalLM, config, seed, 4.0)


class RealServer:
    """A server that runs until :meth:`close`; it takes adapters and whole models.

    Attributes:
        model: the folder of its model.
        url: its address; another one after :meth:`restart`.
        key: its API key.
    """

    def __init__(self, model: str, folder: Path, dtype: str = "float32") -> None:
        self.model, self._folder, self._dtype = model, folder, dtype
        self.restart()

    def restart(self) -> None:
        """Start it, as a new process, or raise."""
        options = OnlineDPOConfig(
            output_dir=str(self._folder),
            rollout_backend="vllm",
            vllm_mode="colocate",
            vllm_executable=str(program()),
            vllm_server_timeout=400,
            max_length=LONGEST,
            use_cpu=True,
        )
        adapters = Adapters(LoraConfig(r=16, task_type="CAUSAL_LM"))
        source = model_source(self.model, "model", options)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.server = Colocated(options, source, adapters, self._dtype, self._folder)
        self.url, self.key = self.server.start(), self.server.key

    def client(self, timeout: float = 30.0) -> Client:
        """A new client, which the caller closes."""
        return Client(self.url, timeout, self.key)

    def restore(self) -> None:
        """Give it its original weights."""
        with contextlib.closing(self.client()) as client:
            client.pause()
            client.reload(Path(self.model))
            client.resume()

    def revive(self) -> None:
        """Start it again if it was killed."""
        if self.server._process is None or self.server._process.poll() is not None:
            self.restart()

    def kill(self) -> None:
        """Kill all processes, which then execute none of their code."""
        process = self.server._process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes."""
        self.server.stop()


def body(prompt: Sequence[int], model: str, salt: str, **sampling: Any) -> dict[str, Any]:
    """A request for completions of 16 tokens with temperature 1."""
    given = {"n": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "max_tokens": 16, "ignore_eos": True}
    params = {**given, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "detokenize": False, **sampling}
    return {"token_ids": list(prompt), "model": model, "cache_salt": salt, "sampling_params": params}


def differences(policy: ScoringEngine, prompt: Sequence[int], choices: Sequence[Choice]) -> torch.Tensor:
    """Absolute differences between the server's log-probs of its tokens and the policy's, of a policy on one rank."""
    found = []
    with policy.inference():
        for choice in choices:
            ids = torch.tensor([[*prompt, *choice.ids]])
            logps = policy.scorer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            own = logps.gather(1, ids[0, len(prompt) :, None])[:, 0]
            found.append((own - torch.tensor(choice.logps)).abs())
    return torch.cat(found)
