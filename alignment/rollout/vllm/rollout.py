"""Rollouts by vLLM servers, which get the policy's weights before each rollout for which these are new.

Completions are used only if the server says that the weights of this version made them. As a further check, the policy
scores some of them: the log-probs have to be those that vLLM reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from alignment.config.errors import OptionError, TrainingError, listing
from alignment.config.options_online import OnlineOptions
from alignment.data.batching import collate
from alignment.engines.collectives import gathered, largest_numbers, together_or_cut
from alignment.engines.scoring import ScoringEngine
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.rollout.backend import Completion, Rollout, RolloutRequest, Sampling
from alignment.rollout.vllm import support
from alignment.rollout.vllm.client import Choice, Client, ServerInfo
from alignment.rollout.vllm.colocated import Colocated
from alignment.rollout.vllm.weights import WeightSync
from alignment.run.ending import OtherRankFailed
from alignment.run.ranks import rank

DIFFERENCE = "rollout/logp_difference"
_LIMITS = {2: 0.1, 4: 0.01}  # of a mean difference that is due to rounding, by the bytes of the dtype
_UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # an environment variable of the server


class VLLMRollout(Rollout):
    """Completions by one server for all ranks, or with ``vllm_mode: colocate`` by one for each rank.

    Args:
        options: the run's options.
        source: the policy's model.
        adapters: what is trained; None: the full model.
        compute: the dtype in which the policy computes.

    Raises:
        OptionError: vLLM cannot do what these options ask for.
    """

    metrics = (DIFFERENCE,)

    def __init__(self, options: OnlineOptions, source: ModelSource, adapters: Adapters | None, compute: str) -> None:
        self.options, self.source, self.adapters, self.compute = options, source, adapters, compute
        obstacle = (
            support.sampling_obstacle(options)
            or (None if adapters is None else support.adapter_obstacle(adapters))
            or support.base_obstacle(source, adapters, allow_mismatch=options.vllm_allow_base_mismatch)
        )
        if obstacle is not None:
            raise OptionError(f"rollout_backend='vllm': {obstacle}; or set rollout_backend: generate")
        self._colocated, self._sleeps = options.vllm_mode == "colocate", False
        self._given = self._version = self._model = ""  # versions of the policy and the server, and its model's name
        self._updates = 0
        self._opened = contextlib.ExitStack()
        self._client: Client | None = None
        self._info: ServerInfo | None = None
        self._policy: ScoringEngine | None = None
        self._weights: WeightSync | None = None

    def start(self) -> list[str]:
        """Start a colocated server, or wait for the given one; check that it suits the run. Collective.

        Raises:
            TrainingError: on every rank; the message says what to change.
        """
        self.close()
        options = self.options
        with together_or_cut():
            url, key, check = options.vllm_url, None, None
            if self._colocated:
                folder = Path(options.output_dir or "")
                server = Colocated(options, self.source, self.adapters, self.compute, folder)
                self._opened.callback(server.stop)
                url, key, check = server.start(), server.key, server.check
            self._client = client = Client(url, options.vllm_server_timeout, key, check)
            self._opened.callback(client.close)
            self._info = client.info()
            self._sleeps = bool(self._info.config["model_config"]["enable_sleep_mode"]) and self._colocated
            self._check(client, self._info)
            self._sleep()
        where = "one server on the device of each rank" if self._colocated else client.url
        return [f"rollouts: vLLM, {where}"]

    def _check(self, client: Client, info: ServerInfo) -> None:
        """Refuse a server that cannot make completions, or would make others than the policy."""
        model, options, (_, _, paused) = info.config["model_config"], self.options, client.state()
        most, count = info.config["scheduler_config"]["max_num_seqs"], options.num_generations
        others = Path(info.root).name != Path(self.source.name).name and not options.vllm_allow_base_mismatch
        problems = {
            f"it serves {info.root}, but the policy is {self.source.name}; start it with the same model": others,
            f"start it with --max-model-len {options.max_length} or more": info.max_length < options.max_length,
            f"start it with --max-num-seqs {count} or more": most < count,
            f"start it with {_UPDATING}=1": self.adapters is not None and not info.config["env"].get(_UPDATING),
            "start it with --logprobs-mode raw_logprobs": model["logprobs_mode"] != "raw_logprobs",
            "start it without --logits-processors": bool(model["logits_processors"]),
            support.server_obstacle(self.adapters, info.config): True,
        }
        for problem, found in problems.items():
            if found and problem is not None:
                raise client.error(problem)
        if not paused or self.adapters is not None:  # an update of full weights, by a run that was killed, is repeated
            self._model = info.model
            self._ask(client, [self._body((0,), Sampling(1, (), 0), count, 0)])

    def attach(self, policy: ScoringEngine) -> None:
        """See :class:`Rollout`. Collective."""
        assert self._info is not None
        given, own = self.options.vllm_weights_folder, self._colocated or rank() == 0
        client, folder = self._client if own else None, None if given is None else Path(given)
        self._policy = policy
        self._weights = WeightSync(client, policy, self.adapters, self.source, folder, base_name=self._info.model)
        self._opened.callback(self._weights.close)

    def update(self, version: str) -> None:
        """Send the weights to the server, unless it has those of this version. Collective."""
        assert self._client is not None and self._weights is not None
        with together_or_cut():
            if self._sleeps:
                get_accelerator().empty_cache()
                self._client.wake()
        with together_or_cut(OtherRankFailed):  # all ranks raise their own errors, which are the same
            if version != self._given:
                self._updates += 1
                self._version = f"{version}-{self._updates}"  # another one if the server has dropped the weights
                self._model, self._given = self._weights.update(self._version), version

    def generate(self, request: RolloutRequest) -> list[list[Completion]]:
        """See :class:`Rollout`."""
        client, count, choices = self._client, request.num_generations, list[list[Choice]]()
        assert client is not None
        with together_or_cut():
            seeds = range(request.seed, request.seed + count * len(request.prompts), count)
            bodies = [self._body(ids, request.sampling, count, seed) for ids, seed in zip(request.prompts, seeds)]
            choices = self._ask(client, bodies) if bodies else []
            found = {version for group in choices for choice in group for version in choice.versions or ("none",)}
            if others := found - {self._version}:
                raise self._stale(client, others)
            self._sleep()
        self._measure(client, request, choices)
        return [[Completion.cut(each.ids, request.sampling) for each in group] for group in choices]

    def _body(self, ids: Sequence[int], sampling: Sampling, count: int, seed: int) -> dict[str, Any]:
        """Return a request. What other weights have cached does not have its salt."""
        params, salt = support.sampling_params(sampling, count, seed), self._version or "none"
        return {"token_ids": list(ids), "model": self._model, "cache_salt": salt, "sampling_params": params}

    def _ask(self, client: Client, bodies: Sequence[Mapping[str, Any]]) -> list[list[Choice]]:
        """Return the choices of requests to a server that generates, and has the weights of the newest update."""
        version, sleeping, paused = client.state()
        if sleeping or paused:
            raise client.error("it sleeps; wake it by POST /wake_up" if sleeping else "it is paused; restart it")
        if self._version and version != self._version:
            raise self._stale(client, {version})
        return client.generate(bodies)

    def _stale(self, client: Client, found: set[str]) -> TrainingError:
        why = "it was restarted, and has lost them" if "default" in found else "does another run use it?"
        return client.error(f"its weights are of version {listing(sorted(found))}, not of {self._version}; {why}")

    def _measure(self, client: Client, request: RolloutRequest, choices: Sequence[Sequence[Choice]]) -> None:
        """Compare vLLM's log-probs of a completion of this rank's first prompts with the policy's. Collective.

        Raises:
            TrainingError: on every rank, if they differ by more than rounding.
        """
        policy, most, own, count = self._policy, self.options.per_device_train_batch_size, 0.0, 0
        assert policy is not None and self._info is not None
        sample = [(prompt, group[0]) for prompt, group in zip(request.prompts[:most], choices)]
        (longest,) = largest_numbers([sum(len(choice.ids) for _, choice in sample)])
        if longest:
            batch = collate([(prompt, choice.ids) for prompt, choice in sample], int(longest))
            with policy.inference():
                logps = policy.forward(batch, tokens=True).token_logps
            assert logps is not None
            theirs = torch.tensor([logp for _, choice in sample for logp in choice.logps], dtype=torch.float64)
            own, count = float((logps.double().cpu() - theirs).abs().sum()), len(theirs)
        self.measured = {DIFFERENCE: (own, count)}
        total, number = map(sum, zip(*gathered((own, count))))
        server: torch.dtype = getattr(torch, self._info.config["model_config"]["dtype"].removeprefix("torch."))
        limit = _LIMITS[min(4, server.itemsize, policy.scorer.model.dtype.itemsize)]
        if not total <= limit * number and not self.options.vllm_allow_base_mismatch:
            raise client.error(
                f"its log-probs differ from the policy's by {total / number:.3g} on average ({DIFFERENCE}); rounding "
                f"explains {limit:g}. Does it have another base model, quantize it, scale RoPE otherwise "
                "(--hf-overrides), or not use the adapter? If you want this, set vllm_allow_base_mismatch: true"
            )

    def _sleep(self) -> None:
        """Let a colocated server free its memory. It drops full weights, which the next update sends again."""
        if self._sleeps and self._client is not None:
            self._client.sleep(2 if self.adapters is None else 1)
            self._given = self._given if self.adapters is not None else ""

    def rehearse(self, longest: Callable[[int], RolloutRequest], most: int) -> None:
        """See :class:`Rollout`; the server has allocated its memory."""

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Rollout`; nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Rollout`."""

    def describe(self) -> str:
        """See :class:`Rollout`."""
        return f"vLLM, {'colocated' if self._colocated else 'server'}" if self._info is not None else ""

    def close(self) -> None:
        """See :class:`Rollout`: delete the weights that were sent, and stop a colocated server."""
        self._opened.close()
        self._client = self._info = self._policy = self._weights = None
        self._given = self._version = ""
