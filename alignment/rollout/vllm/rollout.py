"""Rollouts by a vLLM server, which gets the policy's weights before each rollout in which they are new.

A completion is used only if the server says that the weights of this version made it. As a further check, the policy
itself scores a sample of the completions, whose log-probs have to be those that vLLM reports.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from alignment.config.errors import OptionError, TrainingError, listing
from alignment.config.options_online import OnlineOptions
from alignment.data.batching import collate
from alignment.engines.collectives import gathered, largest_numbers, together
from alignment.engines.scoring import ScoringEngine
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.rollout.backend import Completion, Rollout, RolloutRequest, Sampling
from alignment.rollout.vllm.client import Choice, Client, ServerInfo
from alignment.rollout.vllm.support import sampling_obstacle, sampling_params
from alignment.run.ranks import rank, tell
from alignment.run.stop import REQUESTS, Cut

DIFFERENCE = "rollout/logp_difference"
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # an environment variable of the server
_ASLEEP = "it sleeps; wake it by POST /wake_up"
# The largest mean difference between vLLM's log-probs and the policy's that rounding explains, by bytes of the dtype.
_LIMITS = {2: 0.1, 4: 0.01}
_CLOSING_S = 5.0  # for which the end of a run waits for the server
_MEMORY = Path("/dev/shm")  # in the host's memory, on Linux


class VLLMRollout(Rollout):
    """Completions by one server for all ranks, or with ``vllm_mode: colocate`` by one for each rank.

    Args:
        options: the run's options.
        source: the policy's model.
        adapters: the adapters that the policy trains, or None.

    Raises:
        OptionError: vLLM cannot generate as these options ask for.
    """

    metrics = (DIFFERENCE,)

    def __init__(self, options: OnlineOptions, source: ModelSource, adapters: Adapters | None) -> None:
        self.options, self.source, self.adapters = options, source, adapters
        obstacle = sampling_obstacle(options)
        if obstacle is not None:
            raise OptionError(f"rollout_backend='vllm': {obstacle}, or set rollout_backend: generate")
        self.measured = {}
        self._sleeps = False  # between rollouts
        self._version = self._model = ""  # of the newest update: of the weights, and the name in requests
        self._opened = contextlib.ExitStack()  # what :meth:`close` ends
        self._client: Client | None = None
        self._info: ServerInfo | None = None
        self._policy: ScoringEngine | None = None
        self._sync: Any = None

    @property
    def _colocated(self) -> bool:
        return self.options.vllm_mode == "colocate"

    # Before the engines ----------------------------------------------------------------------------------------------

    def start(self) -> list[str]:
        """Start a colocated server, or wait for the given one; check that it can generate for this run. Collective.

        Raises:
            TrainingError: on every rank; the message says what to change.
        """
        self.close()
        with _agreed():
            url = self._start_server() if self._colocated else self.options.vllm_url
            self._client = Client(url, self.options.vllm_server_timeout)
            self._opened.callback(self._client.close)
            self._info = self._client.info()
            self._sleeps = self._colocated and bool(self._info.config["model_config"]["enable_sleep_mode"])
            self._check(self._client, self._info)
            self._client.resume()  # an update that was killed has paused the server
            self._model, o = self._info.model, self.options
            probe = Sampling(1, (), 0, o.temperature, o.top_p, o.top_k, o.min_p, o.repetition_penalty)
            self._client.generate([self._body((0,), probe, o.num_generations, 0)])
            self._sleep()
        return [self.describe()]

    def _start_server(self) -> str:
        colocated = importlib.import_module("alignment.rollout.vllm.colocated")
        server = colocated.Colocated(self.options, self.source.name)
        self._opened.callback(server.stop)
        return str(server.start())

    def _check(self, client: Client, info: ServerInfo) -> None:
        """Refuse a server that cannot make completions, or would make others."""
        model, lora = info.config["model_config"], info.config["lora_config"] or {"max_lora_rank": 0}
        own, name, options = getattr(self.adapters and self.adapters.config, "r", 0), self.source.name, self.options
        length, count, most = (
            options.max_length,
            options.num_generations,
            info.config["scheduler_config"]["max_num_seqs"],
        )
        fits = info.max_length >= length, most >= count, lora["max_lora_rank"] >= own
        others = Path(info.root).name != Path(name).name and not options.vllm_allow_base_mismatch
        problems = (
            (info.sleeping, _ASLEEP),
            (others, f"it serves {info.root}, but the policy is {name}; start it with the same model"),
            (not fits[0], f"its contexts are of {info.max_length} tokens; start it with --max-model-len {length}"),
            (not fits[1], f"it makes at most {most} completions at a time; start it with --max-num-seqs {count}"),
            (
                not fits[2],
                f"its adapters have a rank of at most {lora['max_lora_rank']}; start it with --enable-lora "
                f"--max-lora-rank {own}",
            ),
            (own and not info.config["env"].get(UPDATING), f"start it with {UPDATING}=1"),
            (model["logprobs_mode"] != "raw_logprobs", "start it with --logprobs-mode raw_logprobs"),
            (model["logits_processors"], "start it without --logits-processors, which change the distribution"),
        )
        for found, problem in problems:
            if found:
                raise client.error(problem)

    # A rollout -------------------------------------------------------------------------------------------------------

    def attach(self, policy: ScoringEngine) -> None:
        """See :class:`Rollout`."""
        self._policy, self._version = policy, ""
        folder = self.options.vllm_weights_folder
        parent = Path(folder) if folder is not None else _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        weights = importlib.import_module("alignment.rollout.vllm.weights")
        client = self._client if self._colocated or rank() == 0 else None
        self._sync = weights.WeightSync(client, policy, self.adapters, self.source, parent)
        self._opened.callback(self._sync.close)

    def update(self, version: str) -> None:
        """Send the weights to the server, unless it has those of this version. Collective."""
        with _agreed():
            self._wake()
            if version != self._version:
                self._model = self._sync.update(version)
                self._version = version

    def generate(self, request: RolloutRequest) -> list[list[Completion]]:
        """See :class:`Rollout`."""
        choices: list[list[Choice]] = []
        with _agreed():
            choices = self._ask(request)
            self._sleep()
        self._measure(request, choices)
        return [[Completion.cut(each.ids, request.sampling) for each in group] for group in choices]

    def _ask(self, request: RolloutRequest) -> list[list[Choice]]:
        """Return the choices for this rank's prompts, all of which the weights of the newest update have made."""
        client, count = self._client, request.num_generations
        assert client is not None
        if not request.prompts:
            return []
        version, sleeping = client.state()
        if sleeping:
            raise client.error(_ASLEEP)
        seeds = range(request.seed, request.seed + count * len(request.prompts), count)
        bodies = [self._body(ids, request.sampling, count, seed) for ids, seed in zip(request.prompts, seeds)]
        choices = [] if version != self._version else client.generate(bodies, _look)
        found = {version, *(each for group in choices for choice in group for each in choice.versions or ("unknown",))}
        if found != {self._version}:
            restarted = "default" in found
            why = "it was restarted, and has lost the policy's weights" if restarted else "does another run use it?"
            raise client.error(
                f"its weights are those of version {listing(sorted(found))}, not {self._version}; {why}"
            )
        return choices

    def _body(self, ids: Sequence[int], sampling: Sampling, count: int, seed: int) -> dict[str, Any]:
        """Return a request. Keys and values that other weights have computed do not have its salt."""
        salt = self._version or "none"
        params = sampling_params(sampling, count, seed)
        return {"token_ids": list(ids), "model": self._model, "cache_salt": salt, "sampling_params": params}

    def _measure(self, request: RolloutRequest, choices: Sequence[Sequence[Choice]]) -> None:
        """Compare vLLM's log-probs with the policy's, for a completion of the first prompts of each rank. Collective.

        Raises:
            TrainingError: on every rank, if they differ by more than rounding.
        """
        policy, most = self._policy, self.options.per_device_train_batch_size
        assert policy is not None and self._info is not None and self._client is not None
        sample = [(prompt, group[0]) for prompt, group in zip(request.prompts[:most], choices)]
        (longest,) = largest_numbers([sum(len(choice.ids) for _, choice in sample)])
        own, count = 0.0, 0
        if longest:
            batch = collate([(prompt, choice.ids) for prompt, choice in sample], int(longest))
            with policy.inference():
                logps = policy.forward(batch, tokens=True).token_logps
            theirs = torch.tensor([logp for _, choice in sample for logp in choice.logps], dtype=torch.float64)
            assert logps is not None
            own, count = float((logps.double().cpu() - theirs).abs().sum()), len(theirs)
        self.measured = {DIFFERENCE: (own, count)}
        sums = gathered((own, count))
        mean = sum(each for each, _ in sums) / max(1, sum(number for _, number in sums))
        server = getattr(torch, self._info.config["model_config"]["dtype"].removeprefix("torch."))
        limit = _LIMITS[min(4, server.itemsize, policy.scorer.model.dtype.itemsize)]
        if not mean <= limit and not self.options.vllm_allow_base_mismatch:
            raise self._client.error(
                f"its log-probs differ from the policy's by {mean:.3g} per token ({DIFFERENCE}), more than the "
                f"{limit:g} that rounding explains. Likely causes: the server has another base model, quantizes it, "
                "scales RoPE otherwise (--hf-overrides), or does not use the adapter. To use its completions in spite "
                "of this, set vllm_allow_base_mismatch: true"
            )

    # Memory ----------------------------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        """Let a colocated server free its memory; full weights are dropped, as they are sent before the next use."""
        if self._sleeps and self._client is not None:
            self._client.sleep(2 if self.adapters is None else 1)
            self._version = self._version if self.adapters is not None else ""

    def _wake(self) -> None:
        if self._sleeps and self._client is not None:
            get_accelerator().empty_cache()
            self._client.wake()

    def rehearse(self, longest: Callable[[int], RolloutRequest], most: int) -> None:
        """See :class:`Rollout`; the server has allocated its memory."""

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Rollout`: a server keeps nothing that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Rollout`."""

    def describe(self) -> str:
        """See :class:`Rollout`."""
        if self._client is None or self._info is None:
            return ""
        where = "one server on the device of each rank" if self._colocated else self._client.url
        return f"vLLM ({where}), {self._info.max_length} tokens at most"

    def close(self) -> None:
        """End the server if it was started here, and delete the weights that were sent."""
        if self._client is not None:
            self._client.timeout = min(self._client.timeout, _CLOSING_S)
        with contextlib.suppress(TrainingError):  # a server that does not answer any more has nothing to release
            self._opened.close()
        self._client = self._info = self._policy = self._sync = None
        self._version = ""


def _look() -> None:
    """Abandon requests once a stop is requested."""
    if REQUESTS.may_cut and REQUESTS.asked() is not None:
        raise Cut


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """Raise the error of a rank on all ranks; once a stop is requested on any of them, Cut."""
    failed: TrainingError | None = None
    try:
        with together(TrainingError), contextlib.suppress(Cut):
            yield
    except TrainingError as error:
        failed = error
    if REQUESTS.may_cut and largest_numbers([REQUESTS.reason is not None]) != [0.0]:
        if failed is not None:
            tell(f"{failed}. The run is stopping and repeats this step when it resumes")
        raise Cut from failed
    if failed is not None:
        raise failed
