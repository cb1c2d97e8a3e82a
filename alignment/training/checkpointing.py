"""How many layers gradient checkpointing recomputes, which is decided once per run, and whether they are offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from alignment.config.dtypes import planned
from alignment.config.fields import AUTO
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.data.windows import micro_tokens
from alignment.engines.collectives import together
from alignment.engines.memory import ranks_of_host
from alignment.engines.offloading import check_host_memory
from alignment.models.loading import checkpoint_first
from alignment.models.packed_attention import configured_refusal
from alignment.planning.engines import EnginePlan
from alignment.run.ending import OtherRankFailed
from alignment.run.ranks import tell
from alignment.training.data import RunData, total_steps


def check_offloading(args: AlignmentConfig, plan: EnginePlan, data: RunData) -> None:
    """Check before a model is loaded that the host can hold what ``activation_offloading`` moves there. Collective.

    Not if the lengths of the sequences are not known yet: memory is checked again when it is allocated.

    Raises:
        OptionError: if it cannot.
    """
    config, sampler = plan.source.config.get_text_config(), data.sampler
    if not args.activation_offloading or sampler is None or planned() is not None:
        return
    if isinstance(args, OnlineOptions) or args.auto_find_batch_size:
        return
    packs = args.pack != "false" and configured_refusal(plan.source.config) is None
    with together(OtherRankFailed):
        largest = sampler.largest(total_steps(args, sampler))
        tokens = max(micro_tokens(sampler.table, largest, micro, packs) for micro in range(len(largest.micro_batches)))
        layers, hidden = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
        check_host_memory(tokens * layers * hidden * plan.compute.itemsize, ranks_of_host())


class CheckpointedLayers:
    """The part of the run state that is the number of recomputed layers. It affects time and memory, not results.

    Args:
        asked: the option ``gradient_checkpointing``: a boolean or ``auto``.
        model: the policy's model, with gradient checkpointing enabled unless ``asked`` is false.
        planned: number of layers that ``auto`` means, from the memory plan; None without a plan.
    """

    def __init__(self, asked: Any, model: PreTrainedModel, planned: int | None) -> None:
        self.asked, self.model, self.planned = asked, model, planned
        self.layers, self.total = checkpoint_first(model, planned if asked == AUTO else None) if asked else (0, 0)

    def describe(self) -> str | None:
        """Return a line for the start of a run, unless the options say how many layers are recomputed."""
        if self.asked != AUTO or self.planned is None:
            return None
        return f"gradient checkpointing: {self.layers} of {self.total} layers"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of recomputed layers."""
        return {"layers": self.layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Recompute as many layers as the run did before, unless the options now say otherwise."""
        before = int(state["layers"])
        if self.asked == AUTO and self.layers != before:
            self.layers, self.total = checkpoint_first(self.model, before)
            tell(f"gradient checkpointing: {self.layers} of {self.total} layers, as in the run that is resumed")
        if self.layers != before:
            tell(f"gradient checkpointing: {self.layers} layers instead of {before} in the run that is resumed")
