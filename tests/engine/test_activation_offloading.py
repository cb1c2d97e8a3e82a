"""Hidden states in host memory: equal updates, counted copies, bounded device memory, and what is refused.

:class:`Queued` stands in for the copies of a GPU. They are executed when they are waited for, in their order;
until then their targets contain NaN, and a tensor that is freed too early is noticed.
"""

from __future__ import annotations

import functools
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from support.helpers import STAGES, make_model, options, paired_rows, train_and_close, unpaired_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import alignment
from alignment.config.errors import OptionError
from alignment.data import batching
from alignment.engines import offloading
from alignment.engines.offloading import ActivationOffloading, Copies
from alignment.models.loading import enable_checkpointing
from alignment.models.scorer import CompletionScorer
from alignment.planning.live import live_bytes
from alignment.training.trainer import AlignmentTrainer
from tools.ranks import RankServer

LAYERS, HIDDEN, CPU = 4, 32, torch.device("cpu")
Passes = list[list[int]]  # the tokens of each block of rows of each pass with gradients
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


class Queued(Copies):
    """Copies that are only executed when they are waited for.

    Attributes:
        moved: bytes of the copies to the host and to the device.
        events: copies that have started, and those that were waited for, by number.
    """

    def __init__(self) -> None:
        self.moved = [0, 0]
        self.events: list[str] = []
        self._started = self._done = 0
        self._queue: list[tuple[Any, Any]] = []

    def start(self, target: Tensor, source: Tensor) -> int:
        self.moved[target.nbytes == target.untyped_storage().nbytes()] += source.nbytes  # the host's are slices
        target.fill_(torch.nan)
        self._queue.append((weakref.ref(target), weakref.ref(source)))
        self._started += 1
        self.events.append(f"start {self._started}")
        return self._started

    def wait(self, copy: int) -> None:
        self.events.append(f"wait {copy}")
        while self._done < copy:
            target, source = (each() for each in self._queue.pop(0))
            assert target is not None and source is not None, "freed before it was copied"
            with torch.no_grad():
                target.copy_(source)
            self._done += 1

    def finish(self) -> None:
        assert not self._queue


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Queued]:
    """Use :class:`Queued`; return those that are created."""
    made: list[Queued] = []

    def create() -> Queued:
        made.append(Queued())
        return made[-1]

    monkeypatch.setattr(offloading, "Copies", create)
    return made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Record the number of tokens of each block of rows of each pass with gradients."""
    found: Passes = []
    forward = CompletionScorer.forward

    def recorded(self: CompletionScorer, inputs: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            blocks = args[-1]
            found.append([rows * width for rows, width in blocks] or [inputs["input_ids"].numel()])
        return forward(self, inputs, *args)

    monkeypatch.setattr(CompletionScorer, "forward", recorded)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "untied", layers=LAYERS, dropout=0.1)


def completions(count: int) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in unpaired_rows(count)]


def trainer_of(model: str, folder: Path, method: str = "SFT", **more: Any) -> AlignmentTrainer:
    given = {"max_steps": 2, "use_cpu": True, "optim": "sgd", "learning_rate": 0.1, "disable_dropout": False, **more}
    made = getattr(alignment, f"{method}Config")(**options(folder, **given))
    rows = completions(8) if method == "SFT" else paired_rows(8)
    trainer: AlignmentTrainer = getattr(alignment, f"{method}Trainer")(
        model, args=made, train_dataset=rows, eval_dataset=rows[:2]
    )
    return trainer


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage0": ("SFT", {"deepspeed": STAGES["stage0"], "eval_strategy": "steps", "eval_steps": 1}),
    "stage2-qlora": ("DPO", {"deepspeed": STAGES["stage2"], **LORA, "load_in_4bit": True, "bf16": True}),
    "stage3-lora-reentrant": ("DPO", {"deepspeed": STAGES["stage3"], **LORA, **REENTRANT}),
    "stage0-blocks": ("SFT", {"deepspeed": STAGES["stage0"], "pack": False, "per_device_train_batch_size": 4}),
    "stage0-reentrant": ("SFT", {"deepspeed": STAGES["stage0"], **REENTRANT}),
    "stage0-bf16": ("SFT", {"deepspeed": STAGES["stage0"], "bf16": True}),
    "stage2": ("SFT", {"deepspeed": STAGES["stage2"]}),
    "stage2-bf16-reentrant": ("SFT", {"deepspeed": STAGES["stage2"], "bf16": True, **REENTRANT}),
    "stage3": ("SFT", {"deepspeed": STAGES["stage3"]}),
    "stage3-bf16-offload": ("SFT", {"deepspeed": STAGES["stage3-offload"], "bf16": True}),
    "stage3-qlora": ("SFT", {"deepspeed": STAGES["stage3"], **LORA, "load_in_4bit": True, "bf16": True}),
    "stage2-qlora-reentrant": ("SFT", {"deepspeed": STAGES["stage2"], **LORA, "load_in_4bit": True, **REENTRANT}),
}
OFTEN = ("stage0", "stage2-qlora", "stage3-lora-reentrant", "stage0-blocks", "stage0-reentrant", "stage3")


@pytest.mark.parametrize("run", [run if run in OFTEN else pytest.param(run, marks=pytest.mark.ci) for run in RUNS])
def test_updates_are_bitwise_those_without(
    run: str,
    model: str,
    tmp_path: Path,
    queued: list[Queued],
    passes: Passes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dropout. Each layer's hidden states move once in each direction, those of other passes never."""
    method, more = RUNS[run]
    if run == "stage0-blocks":
        monkeypatch.setattr(batching, "_BLOCK_COST", 0)
    saved = []
    for asked in (False, True):
        folder = tmp_path / str(asked)
        passes.clear()
        trainer = trainer_of(model, folder, method, activation_offloading=asked, **more)
        train_and_close(trainer, save=True)
        (file,) = (folder / "out").glob("*model.safetensors")
        saved.append((file.read_bytes(), [each["loss"] for each in trainer.state.log_history if "loss" in each]))
    assert saved[0] == saved[1]
    (copies,) = queued
    assert len(passes) == 4 and any(len(blocks) > 1 for blocks in passes) is (run == "stage0-blocks")
    assert copies.moved == [LAYERS * sum(map(sum, passes)) * HIDDEN * (2 if more.get("bf16") else 4)] * 2


@pytest.mark.ci
def test_ranks_with_unequal_lengths_train_as_without(model: str, tmp_path: Path, ranks: RankServer) -> None:
    """With sequences of different lengths, at stages 2 and 3, on a device that is the host."""
    runs = [
        {
            "name": f"{stage}-{asked}",
            "trainer": "SFT",
            "model": model,
            "args": options(
                tmp_path / f"{stage}-{asked}",
                **{"max_steps": 2, "use_cpu": True, "learning_rate": 0.1, "optim": "sgd", "disable_dropout": False},
                deepspeed=STAGES[stage],
                activation_offloading=asked,
            ),
            "train": completions(16),
            "save": str(tmp_path / f"{stage}-{asked}" / "saved"),
        }
        for stage in ("stage2", "stage3")
        for asked in (False, True)
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    ranks.run(DRIVERS / "runs.py", tmp_path / "runs.json", nproc=2)
    for stage in ("stage2", "stage3"):
        files = [tmp_path / f"{stage}-{asked}" / "saved" / "model.safetensors" for asked in (False, True)]
        assert files[0].read_bytes() == files[1].read_bytes()


def scorer_of(model: str, **checkpointing: Any) -> CompletionScorer:
    loaded = AutoModelForCausalLM.from_pretrained(model, attention_dropout=0.0)
    scorer = CompletionScorer(loaded).train()
    enable_checkpointing(loaded, checkpointing)
    return scorer


def loss_of(scorer: CompletionScorer, length: int) -> Tensor:
    ids = torch.arange(length).remainder(40)[None] + 4
    place = torch.tensor([length - 2])
    scores: Tensor = scorer({"input_ids": ids}, place, ids[0, place + 1], 1).scores
    return scores.sum()


def gradient_of(scorer: CompletionScorer, length: int) -> list[Tensor]:
    scorer.zero_grad(set_to_none=True)
    loss_of(scorer, length).backward()
    return [parameter.grad.clone() for parameter in scorer.parameters() if parameter.grad is not None]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def peak_of(scorer: CompletionScorer, length: int, moved: ActivationOffloading | None) -> int:
    """Return the bytes of the device at the peak of a pass, beyond weights and gradients."""
    loss_of(scorer, length).backward()  # allocates what stays
    arena = [] if moved is None else [moved._memory]
    stays = [*scorer.parameters(), *scorer.buffers(), *(one.grad for one in scorer.parameters()), *arena]
    with live_bytes(stays) as live:
        loss_of(scorer, length).backward()
    return live.peak


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_device_holds_two_hidden_states_and_the_host_all(model: str, reentrant: bool) -> None:
    """Growth per token: that of the device does not depend on the number of layers."""
    scorer, lengths = scorer_of(model, use_reentrant=reentrant), (90, 45)
    without = [peak_of(scorer, length, None) for length in lengths]
    moved = ActivationOffloading(scorer, CPU)
    found = []
    for length in lengths:
        found.append(peak_of(scorer, length, moved))
        memory = moved._memory
        assert memory is not None and memory.nbytes == LAYERS * 90 * HIDDEN * 4, "one for all micro-batches"
    growths = [(longer - shorter) / 45 for longer, shorter in (without, found)]
    assert growths[0] - growths[1] == (LAYERS - 2) * HIDDEN * 4
    moved.close()


def test_no_more_than_two_copies_are_pending(model: str, queued: list[Queued]) -> None:
    """A copy to the host is waited for when the next but one starts; one to the device starts a layer ahead."""
    scorer = scorer_of(model)
    moved = ActivationOffloading(scorer, CPU)
    loss_of(scorer, 30).backward()
    forward = "start 1, start 2, wait 1, start 3, wait 2, start 4"
    backward = "wait 3, wait 4, start 5, start 6, wait 5, start 7, wait 6, start 8, wait 7, wait 8"
    assert ", ".join(queued[0].events) == f"{forward}, {backward}"
    moved.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_aborted_backward_pass_leaves_nothing(model: str, reentrant: bool, queued: list[Queued]) -> None:
    """Also if the next micro-batch is longer, for which the memory is replaced."""
    scorer = scorer_of(model, use_reentrant=reentrant)
    expected = {length: gradient_of(scorer, length) for length in (20, 40)}
    moved = ActivationOffloading(scorer, CPU)
    assert equal(gradient_of(scorer, 20), expected[20])

    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    weight = scorer.model.model.layers[1].mlp.down_proj.weight
    handle = weight.register_hook(interrupt)
    for length in (20, 40, 20):
        with pytest.raises(KeyboardInterrupt):
            gradient_of(scorer, length)
        handle.remove()
        assert equal(gradient_of(scorer, length), expected[length])
        handle = weight.register_hook(interrupt)
    handle.remove()
    older = loss_of(scorer, 20)
    assert equal(gradient_of(scorer, 20), expected[20])
    with pytest.raises(RuntimeError, match="later forward pass"):
        older.backward()
    moved.close()
    before = list(queued[0].moved)
    assert equal(gradient_of(scorer, 20), expected[20]) and queued[0].moved == before, "closed"


def test_passes_without_gradients_move_nothing(model: str, queued: list[Queued]) -> None:
    scorer = scorer_of(model)
    moved = ActivationOffloading(scorer, CPU)
    loss = loss_of(scorer, 30)
    with torch.no_grad():
        loss_of(scorer, 40)
        loss_of(scorer.eval(), 40)
    scorer.train()
    loss.backward()
    assert queued[0].moved == [LAYERS * 30 * HIDDEN * 4] * 2
    moved.close()


def test_what_a_layer_receives_besides_hidden_states_stays(model: str, queued: list[Queued]) -> None:
    """Hidden states that it receives twice move once; another part of the same tensor does not."""
    scorer = scorer_of(model)
    moved = ActivationOffloading(scorer, CPU)
    loss_of(scorer, 6)
    before = queued[0].moved[0]
    moved._begin(6)
    call = scorer.model.model.layers[0]._gradient_checkpointing_func
    whole = torch.randn(2, 6, HIDDEN, requires_grad=True)
    hidden, other = whole[:1], whole[1:]
    call(lambda one, two, three: (one * two * three).sum(), hidden, hidden, other).backward()
    assert queued[0].moved[0] - before == hidden.nbytes == 6 * HIDDEN * 4
    assert whole.grad is not None and torch.equal(whole.grad, torch.cat([2 * hidden * other, hidden**2]).detach())
    with pytest.raises(OptionError, match="activation_offloading=True: .* hidden states are not its first argument"):
        call(functools.partial(lambda one: one, one=hidden))
    with pytest.raises(OptionError, match="activation_offloading=True: a layer .* more than once in a pass"):
        for _ in range(LAYERS + 1):
            call(lambda one: one * 2, hidden)
    moved.close()


def test_hidden_states_return_in_any_order(model: str, queued: list[Queued]) -> None:
    scorer = scorer_of(model)
    moved = ActivationOffloading(scorer, CPU)
    moved._begin(6)
    inputs = [torch.randn(1, 6, HIDDEN, requires_grad=True) for _ in range(LAYERS)]
    outputs = [
        layer._gradient_checkpointing_func(lambda hidden: (hidden**2).sum(), each)
        for layer, each in zip(scorer.model.model.layers, inputs, strict=True)
    ]
    for number in (3, 0, 2, 1):
        outputs[number].backward()
    assert all(each.grad is not None and torch.equal(each.grad, 2 * each.detach()) for each in inputs)
    moved.close()


def test_layers_that_do_not_checkpoint_themselves_are_refused(model: str) -> None:
    scorer = scorer_of(model)
    for layer in scorer.model.model.layers:
        del layer._gradient_checkpointing_func
    with pytest.raises(OptionError, match="activation_offloading=True: the layers of LlamaForCausalLM do not"):
        ActivationOffloading(scorer, CPU)


def test_more_host_memory_than_there_is(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is loaded, and when memory is allocated."""
    monkeypatch.setattr(offloading.psutil, "virtual_memory", lambda: SimpleNamespace(available=9000, total=9000))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    with pytest.raises(OptionError, match=r"take 0.00 GB of host memory \(1 rank\), of which 0.00 GB are available"):
        trainer_of(model, tmp_path, activation_offloading=True)
    trainer_of(model, tmp_path, activation_offloading=False).close()
    monkeypatch.undo()
    scorer = scorer_of(model)
    moved = ActivationOffloading(scorer, CPU)
    needed = LAYERS * 30 * HIDDEN * 4
    for available in (needed, needed - 1):
        monkeypatch.setattr(offloading.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))  # noqa: B023
        if available < needed:
            moved._release()
            with pytest.raises(OptionError, match="of host memory"):
                loss_of(scorer, 30)
        else:
            loss_of(scorer, 30).backward()
    moved.close()


@pytest.mark.ci
def test_all_layers_are_recomputed(model: str, tmp_path: Path) -> None:
    """Although ``auto`` would recompute fewer."""
    trainer = trainer_of(model, tmp_path, activation_offloading=True)
    trainer.context.memory_plan = SimpleNamespace(
        checkpointed_layers=1, tokens=1, describe=lambda: None, planner=SimpleNamespace(gradients=lambda tokens: None)
    )  # type: ignore[assignment]
    trainer.engines.build(1)
    assert all(layer.gradient_checkpointing for layer in trainer.engines.policy.scorer.model.model.layers)
    trainer.close()
