"""DeepSpeed engines that score completions: one for inference, one for training."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import deepspeed
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from alignment.config.errors import ModelError, OptionError, first_line
from alignment.data.batching import Batch, packed
from alignment.data.transfer import OnDevice
from alignment.engines.collectives import device, true_on_every_rank
from alignment.engines.host import compiling
from alignment.internals.deepspeed import destroy, partitions_weights, reports_grad_norm, scales_loss, undo_dummy_step
from alignment.internals.deepspeed_reduction import (
    accumulate_locally,
    can_reduce_once,
    complete_offloaded,
    hold_back,
    let_go,
    reduce_held,
)
from alignment.internals.deepspeed_step import (
    complete_partitioned,
    discard_gradients,
    drop_older,
    forget_sums,
    loss_scale,
    lower_loss_scale,
    scaled_where_missing,
    skip_invalid_norm,
    step_in_fp16,
)
from alignment.internals.deepspeed_zero3 import (
    balanced_module_stack,
    divide_again,
    forget_order,
    forget_partitioned,
    reduced_by_parameter,
)
from alignment.internals.deepspeed_zero3 import settle as settle_weights
from alignment.internals.torch import release_pinned_memory
from alignment.models.attention import without_math_kernel
from alignment.models.checking import why_not_packed
from alignment.models.kernels import choose_hub_kernels_again
from alignment.models.partitioning import partition_whole
from alignment.models.scorer import Scorer
from alignment.models.tasks import Task
from alignment.models.tiled_mlp import is_tiled
from alignment.models.tiles.choice import settle
from alignment.run.ranks import tell

Placed = TypeVar("Placed", bound=OnDevice)


class SequenceOutput(NamedTuple):
    """A model's scores of S sequences, and the load-balancing loss of a mixture of experts.

    Attributes:
        scores: (S,) fp32, with graph: the sum of the completion tokens' log-probs, or a reward model's score.
        aux_loss: 0-dim, with graph; 0 for a dense model.
        entropy: (S,) sum over the completion tokens, in nats; like all following fields, None unless requested.
        logits: (S,) sum over the completion tokens of the mean of their logits.
        top1: (S,) number of completion tokens that were the most likely ones.
        token_logps: (N,) fp32, with graph: one log-prob for each of ``batch.targets``, in their order, of which
            ``scores`` are the sums. ``batch.segments`` (N,) maps each token to its sequence.
    """

    scores: Tensor
    aux_loss: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None
    top1: Tensor | None = None
    token_logps: Tensor | None = None


class ScoringEngine:
    """Base of both kinds of engine: log-probs of the sequences of a batch.

    Attributes:
        engine: the DeepSpeed engine.
        scorer: the module that it wraps.
        device: where batches have to be.
        packs: whether the sequences of a batch are in one row, without padding.
    """

    packs = False

    def __init__(self, scorer: Scorer, ds_config: dict[str, Any], **kwargs: Any) -> None:
        self.scorer, self.device = scorer, device()
        partition_whole(scorer, ds_config, self.device)
        # DeepSpeed must not initialize the process group again, and it writes into its configuration, hence the copy.
        with compiling(), reduced_by_parameter(is_tiled):  # some of DeepSpeed's features are compiled here
            self.engine, *_ = deepspeed.initialize(
                model=scorer, config=copy.deepcopy(ds_config), dist_init_required=False, **kwargs
            )
        release_pinned_memory()  # DeepSpeed has copied the offloaded shards into one buffer and dropped them
        self.partitioned = partitions_weights(self.engine)

    @property
    def shares(self) -> bool:
        """Whether sequences in one row also share their prefixes. A balancing loss counts all of their tokens."""
        return self.packs and self.scorer.balancing_loss is None

    def placed(self, batch: Placed, leave: Collection[str] = ()) -> Placed:
        """Pack a batch if the engine does, and move all tensors that :meth:`forward` reads to the device in one copy.

        Fields in ``leave`` stay as they are.
        """
        if self.packs:
            batch = packed(batch, self.shares, leave)
        return batch.to(self.device, (*leave, *(() if self.scorer.reads_mask else ("attention_mask",))))

    def forward(self, batch: Batch, stats: bool = False, tokens: bool = False) -> SequenceOutput:
        """Score the sequences of a batch; ``stats`` adds statistics of the distributions, ``tokens`` token log-probs.

        The batch is moved to the device, unless it is there. Scores have a graph even without any sequence, so that a
        rank without rows takes part in every collective of the backward pass.
        """
        batch = self.placed(batch)
        # If weights are gathered for each pass, every rank must make the same number of passes.
        blocks = () if self.partitioned else batch.blocks
        output = self.engine(batch.inputs, batch.positions, batch.targets, batch.longest, stats, blocks)
        zeros = output.scores.new_zeros(batch.lengths.shape[0])
        scores, *measured = (
            zeros.index_add(0, batch.segments, part) for part in (output.scores, *(output.stats or ()))
        )
        sums = SequenceOutput(scores, output.aux_loss, *measured)
        return sums._replace(token_logps=output.scores) if tokens else sums

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Disable dropout and gradients; restore the previous mode on any exit."""
        training = self.engine.module.training
        self.engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.engine.train(training)

    def release(self) -> None:
        """Release gathered weights: several passes leave those that the last one prefetched, one that raised all."""
        if self.partitioned:
            settle_weights(self.engine, self.scorer)
            divide_again(self.scorer)

    def close(self) -> None:
        """Release the engine and its optimizer's memory."""
        destroy(self.engine)
        if self.partitioned:
            forget_partitioned(self.scorer)


class FrozenEngine(ScoringEngine):
    """An engine without an optimizer: ZeRO stage 3 (with or without parameter offload) or 0. Freezes its model."""

    def __init__(self, scorer: Scorer, ds_config: dict[str, Any]) -> None:
        self._froze = [p for p in scorer.parameters() if p.requires_grad]
        scorer.requires_grad_(False)
        super().__init__(scorer, ds_config)
        self.engine.eval()

    def close(self) -> None:
        """Release the engine; parameters that were trainable before become trainable again."""
        super().close()
        for parameter in self._froze:
            parameter.requires_grad_(True)


class PolicyEngine(ScoringEngine):
    """A training engine.

    Three rules, all implemented here, keep gradients exact at every ZeRO stage: the accumulation boundary is set for
    each micro-batch, the backward pass is ``engine.backward`` without DeepSpeed's own scaling, and the wrapped module
    returns no differentiable output that the loss does not use.

    The engine steps the scheduler together with the optimizer. With ``reduce_once``, the gradients of a window's
    micro-batches are summed on each rank, and reduced after the last.
    """

    def __init__(
        self,
        scorer: Scorer,
        ds_config: dict[str, Any],
        optimizer: Optimizer,
        scheduler: LRScheduler,
        reduce_once: bool = False,
    ) -> None:
        super().__init__(scorer, ds_config, optimizer=optimizer, lr_scheduler=scheduler)
        self.scheduler, self.world_size = scheduler, torch.distributed.get_world_size()
        undo_dummy_step(self.engine.optimizer)
        skip_invalid_norm(self.engine)
        self.reduces_once, self._holding = reduce_once and can_reduce_once(self.engine), False
        self._begun = False  # whether a micro-batch of the window has been accumulated
        self._inside = False  # whether a backward pass has not ended
        if self.reduces_once:
            accumulate_locally(self.engine)
        self.engine.train()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of this rank's share of the window's loss.

        Args:
            loss: 0-dim, the local sum over the *global* count. It is multiplied by the number of ranks here because
                DeepSpeed averages gradients over ranks.
            last: whether this is the window's last micro-batch.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        if self.reduces_once and not last and not self._holding:
            hold_back(self.engine)
            self._holding = True
        loss = scaled_where_missing(self.engine, loss)
        self._inside = True
        with balanced_module_stack(), self.scorer.attending():
            self.engine.backward(loss * self.world_size, scale_wrt_gas=False)
        self._inside = False
        if not self._begun and not self._holding:
            drop_older(self.engine, several=not last)
        self._begun = not last
        if last and self._holding:
            self._holding = False
            reduce_held(self.engine)
        elif last:
            complete_offloaded(self.engine)
            complete_partitioned(self.engine)

    def step(self) -> float:
        """Apply the accumulated gradient; return its global L2 norm before clipping.

        If the norm is not finite, no update is made and the schedule does not advance: see :meth:`discard`. In fp16
        the norm is then inf, and the same window may succeed at a lower loss scale: see :meth:`lower_loss_scale`.
        """
        if self.scales_loss:
            scaled = step_in_fp16(self.engine)
            norm = math.inf if scaled is None else scaled
        elif reports_grad_norm(self.engine):
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
        else:  # DeepSpeed does not wrap the optimizer: stage 0, fp32, unsharded gradients
            norm = float(get_total_norm([p.grad for p in self.scorer.parameters() if p.grad is not None]))
            if math.isfinite(norm):
                self.engine.step()
            else:
                self.discard()
        if not math.isfinite(norm):
            forget_sums(self.engine)
        return norm

    def discard(self) -> None:
        """Discard the accumulated gradient, also within a window; weights, optimizer state and loss scale stay."""
        self._begun = False
        if self._holding:
            self._holding = False
            let_go(self.engine)
        if self._inside:  # interrupted: stages 2 and 3 refuse another backward pass until this one is completed
            self._inside = False
            self.engine.set_gradient_accumulation_boundary(False)
            self.engine.allreduce_gradients()
        discard_gradients(self.engine)
        forget_sums(self.engine)

    @property
    def scales_loss(self) -> bool:
        """Whether a non-finite gradient is due to loss scaling (fp16), and therefore not a fault."""
        return scales_loss(self.engine)

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss of the next micro-batch is multiplied in fp16."""
        return loss_scale(self.engine)

    def lower_loss_scale(self) -> bool:
        """Lower the loss scale after an overflow; return False if it cannot be lowered."""
        return lower_loss_scale(self.engine)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])


Engine = TypeVar("Engine", bound=ScoringEngine)


def checked(engine: Engine, task: Task, pack: str = "false", say: bool = True) -> Engine:
    """Return the engine after checking its scorer's results against the model's own; close it if they differ.

    Args:
        engine: the engine.
        task: the task of its model.
        pack: whether it packs sequences: ``true``, ``false``, or ``auto`` if its model supports it.
        say: whether to print why it does not; False for another engine of the same model.

    Raises:
        OptionError: ``pack`` is ``true``, but the model does not support it.
        ModelError: the scores differ by more than rounding, or a module reads weights that ZeRO-3 has not gathered.
    """
    try:
        settle(engine.device, engine.scorer.model.dtype, true_on_every_rank)
        choose_hub_kernels_again(engine.scorer)
        with without_math_kernel(engine.scorer.model, engine.device):
            task.check_scorer(engine.scorer, engine.device)
        if pack != "false":
            _pack(engine, pack, say)
        engine.release()
        if engine.partitioned:
            forget_order(engine.engine)  # of the check's passes
    except BaseException as error:
        engine.close()
        # Out of memory, lost ranks and device errors have their own classes.
        if not engine.partitioned or type(error) not in (IndexError, RuntimeError):
            raise
        model = engine.scorer.model
        raise ModelError(
            f"model {type(model).__name__} ({model.config.model_type}) does not work with ZeRO-3, which gathers the "
            f"weights of a module when it is called: {first_line(error)}; set a ZeRO stage below 3"
        ) from error
    return engine


def _pack(engine: ScoringEngine, pack: str, say: bool) -> None:
    """Let an engine pack sequences if its model supports it on every rank; else say why not, or raise."""
    reason, model = why_not_packed(engine.scorer, engine.device), engine.scorer.model
    engine.packs = true_on_every_rank(reason is None)
    if engine.packs:
        return
    reason = f"{type(model).__name__} cannot score several sequences in one row: {reason or 'see the other ranks'}"
    if pack == "true":
        raise OptionError(f"pack: true: {reason}; set pack to auto or false")
    if say:
        tell(f"pack: {reason}; sequences are padded")
