"""Checks that require a GPU and are not part of the table: ``python -m benchmarks.gpu_checks JOB.json RESULT.json``.

Each check is a function of the device and a folder with a model. It returns a line with results, and raises if they
are wrong.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from alignment.config.dtypes import computes_bf16
from alignment.data.batching import Batch, collate
from alignment.engines.launch_env import init_distributed
from alignment.engines.memory import free_bytes, total_bytes
from alignment.engines.offloading import ActivationOffloading
from alignment.engines.optimizers import bytes_to_come
from alignment.engines.scoring import FrozenEngine, PolicyEngine
from alignment.models.head import LogProbHead
from alignment.models.loading import enable_checkpointing, load_model
from alignment.models.scorer import CompletionScorer
from alignment.models.tiles import choice
from alignment.rollout.backend import Generation, Sampling, Work
from alignment.rollout.continuous import ContinuousBackend
from benchmarks.measure import arbitrary
from benchmarks.shapes import TINY, load_tokenizer, paired_rows, prompt_rows, unpaired_rows

_LATE = "growing segments, CUDA used before"
_PLAIN = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


class Skipped(Exception):
    """A check that cannot run on this machine, with the reason."""


class Check(NamedTuple):
    """``run``: called with device and model; ``cuda``: whether it requires a GPU."""

    run: Callable[[torch.device, str], str]
    cuda: bool


@dataclass(frozen=True)
class CheckJob:
    """The job of one process: a key of :data:`CHECKS`, the folder of a model, and whether to use the CPU."""

    name: str
    model: str
    cpu: bool


def expect(holds: bool, said: str) -> None:
    """Fail with a message unless the condition holds.

    Raises:
        RuntimeError: if it does not.
    """
    if not holds:
        raise RuntimeError(said)


def cap(where: torch.device, model: str) -> str:
    """Under a memory cap, exactly the amount reported as free can be allocated."""
    torch.cuda.set_per_process_memory_fraction(0.25, where)
    free, total = free_bytes(where), total_bytes(where)
    held = torch.empty(int(0.95 * free), dtype=torch.uint8, device=where)
    try:
        torch.empty(int(0.1 * free), dtype=torch.uint8, device=where)
    except torch.OutOfMemoryError:
        return f"{free / 1e9:.1f} of {total / 1e9:.1f} GB were free, {held.nbytes / 1e9:.1f} GB could be allocated"
    raise RuntimeError(f"more than {free / 1e9:.1f} GB could be allocated under the cap")


def segments(where: torch.device, model: str) -> str:
    """The allocator uses expandable segments unless the environment disables them."""
    held = torch.empty(2**26, dtype=torch.uint8, device=where)
    growing = [segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot()]
    expect(all(growing) and held.nbytes > 0, f"{growing.count(False)} of {len(growing)} segments are not expandable")
    return f"{len(growing)} segments, all expandable"


def pinned(where: torch.device, model: str) -> str:
    """Page-locked memory is allocated in exact sizes and returned, unless this release of torch cannot do so."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise Skipped("torch rounds page-locked memory up before 2.13")
    size = 2**27 + 2**12
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    del held
    left = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    expect((taken, left) == (size, 0), f"{taken} bytes were allocated for {size}, and {left} kept afterwards")
    return f"{taken} bytes allocated, {left} kept afterwards"


def groups(where: torch.device, model: str) -> str:
    """DeepSpeed's process groups have the same timeout as the default group."""
    import deepspeed

    found: Any = deepspeed.comm.new_group([0])
    limit = found._get_backend(where).options._timeout
    expect(limit == timedelta(hours=6), f"a process group of DeepSpeed has a timeout of {limit}")
    return f"{limit}"


def head(where: torch.device, model: str) -> str:
    """Log-probs and gradients of the head match those in fp64, with torch operations and with the Triton kernels.

    On a CPU, the kernels require Triton's interpreter (``TRITON_INTERPRET=1``). On a GPU, a run has to use them too.
    """
    dtype = torch.bfloat16 if where.type == "cpu" or computes_bf16() else torch.float16
    if where.type == "cuda":
        choice.settle(where, dtype, bool)  # prints the reason
        used = choice.tiles_for(torch.empty(0, dtype=dtype, device=where))
        expect(used == choice.fused_tiles(), "a run would not use the Triton kernels")
    kernels = where.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return "; ".join(_head_errors(where, dtype, way) for way in ("torch", "triton")[: 1 + kernels])


def _head_errors(where: torch.device, dtype: torch.dtype, way: str) -> str:
    """Return the errors of the head with tiles that are computed in this way."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(256, 8192, bias=False)
    linear.weight.data = torch.randn(8192, 256, generator=generator) / 8
    states = torch.randn(40, 256, generator=generator)
    targets = torch.randint(8192, (40,), generator=generator).to(where)
    made = LogProbHead.replacing(linear.to(where, dtype), _plain_transform(), 2**22)
    hidden = states.to(where, dtype).requires_grad_()
    with mock.patch.dict(os.environ, {choice.VARIABLE: way}):
        found, _ = made(hidden, targets)
        found.sum().backward()
    wide, weight = (part.detach().double().requires_grad_() for part in (hidden, made.weight))
    expected = (wide @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected.sum().backward()
    assert hidden.grad is not None and made.weight.grad is not None
    assert wide.grad is not None and weight.grad is not None
    off = float((found - expected).detach().abs().max())
    grads = max(_apart(hidden.grad, wide.grad), _apart(made.weight.grad, weight.grad))
    expect(off < 1e-3, f"{way}: log-probs differ by {off:.2g}")
    expect(grads < 1e-2, f"{way}: gradients have a relative error of {grads:.2g}")
    return f"{way}: log-probs within {off:.1g}, gradients within a relative error of {grads:.1g}"


def states(where: torch.device, model: str) -> str:
    """An optimizer's first step allocates the memory that was reserved for it."""
    policy = _policy(model, where, {"stage": 2}, {"bf16": {"enabled": True}}, torch.bfloat16)
    _step(policy)
    first = torch.cuda.memory_allocated(where)
    policy.close()
    policy = _policy(model, where, {"stage": 2}, {"bf16": {"enabled": True}}, torch.bfloat16)
    before, expected = torch.cuda.memory_allocated(where), bytes_to_come(policy.engine, where)
    _step(policy)
    taken = torch.cuda.memory_allocated(where) - before
    expect(abs(taken - expected) < 0.02 * expected + 2**24, f"{taken} bytes were allocated, expected {expected}")
    return f"{taken / 1e6:.0f} MB allocated, {expected / 1e6:.0f} MB expected; {first / 1e6:.0f} MB in total"


def divided(where: torch.device, model: str) -> str:
    """A live model is partitioned from host memory: the GPU holds about one parameter at a time."""
    from transformers import AutoModelForCausalLM

    live = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    sizes = [parameter.nbytes for parameter in live.parameters()]
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine = FrozenEngine(CompletionScorer(live), {**_PLAIN, "zero_optimization": zero, "bf16": {"enabled": True}})
    peak = torch.cuda.max_memory_allocated(where) - before
    engine.close()
    expect(peak < 3 * max(sizes) + 2**26, f"peak of {peak} bytes, but the largest parameter has {max(sizes)}")
    return f"peak {peak / 1e6:.0f} MB; model {sum(sizes) / 1e6:.0f} MB, largest weight {max(sizes) / 1e6:.0f} MB"


def fp16(where: torch.device, model: str) -> str:
    """The gradient norm in fp16 equals that in fp32 at stages 0, 2 and 3, after unscaling."""
    norms = {}
    for stage in (None, 0, 2, 3):
        section = {"fp16": {"enabled": True}} if stage is not None else {}
        dtype = torch.float32 if stage is None else torch.float16
        policy = _policy(model, where, {"stage": stage or 0}, section, dtype)
        norms[stage] = _step(policy)
        while not math.isfinite(norms[stage]) and policy.scales_loss and policy.lower_loss_scale():
            norms[stage] = _step(policy)
        policy.close()
    expected = norms.pop(None)
    for stage, norm in norms.items():
        expect(
            abs(norm - expected) < 0.05 * expected,
            f"stage {stage}: gradient norm {norm:.4g}, but {expected:.4g} in fp32",
        )
    return f"norm {expected:.4g} in fp32; " + ", ".join(f"stage {stage} {norm:.4g}" for stage, norm in norms.items())


def offloading(where: torch.device, model: str) -> str:
    """Gradients are the same if the hidden states of recomputed layers are offloaded."""
    scorer = CompletionScorer(load_model(model, torch.float32, ds_config=_PLAIN)).to(where).train()
    enable_checkpointing(scorer.model, None)
    batch = _batch().to(where)

    def gradients() -> Tensor:
        scorer.zero_grad(set_to_none=True)
        scorer(batch.inputs, batch.positions, batch.targets, batch.longest).scores.sum().backward()
        return torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])

    expected = gradients()
    offloaded = ActivationOffloading(scorer, where)
    worst = max(_apart(gradients(), expected) for _ in range(10))
    offloaded.close()
    expect(worst < 1e-5, f"the gradient differs by {worst:.1e}")
    return f"gradients within {worst:.1e}"


def continuous(attention: str) -> Callable[[torch.device, str], str]:
    """Continuous batching with an attention implementation: greedy tokens are the likeliest of one forward pass."""

    def run(where: torch.device, model: str) -> str:
        if attention == "flash_attention_2" and find_spec("flash_attn") is None:
            raise Skipped("flash-attn is not installed")
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        loaded = load_model(model, dtype, ds_config=_PLAIN, attn_implementation=attention).to(where).eval()
        vocabulary, longest = loaded.config.vocab_size, 300 if where.type == "cuda" else 20
        prompts = [[2 + (7 * n + place) % (vocabulary - 2) for place in range(n)] for n in (longest, 5, longest // 2)]
        parts = [[Work(0, prompts[0], 2), Work(1, prompts[1], 2)], [Work(2, prompts[2], 3)]]
        sampling = Sampling(max_new_tokens=longest, eos_token_ids=(1,), pad_token_id=0, top_k=1)
        backend, generation = ContinuousBackend(), Generation(loaded, sampling, where)
        worst, tokens = 0.0, 0
        with torch.no_grad(), backend.session(parts, generation):
            for part in parts:
                for work, answers in zip(part, backend.generate(part, generation)):
                    for answer in answers:
                        worst = max(worst, _off(loaded, work.ids, answer.ids))
                        tokens += len(answer.ids)
        expect(
            worst < (0.1 if dtype == torch.bfloat16 else 1e-3),
            f"tokens are {worst:.3g} below the likeliest on average",
        )
        pages = backend.page_tokens(loaded)
        return f"{tokens} tokens in two chunks, pages of {pages}, within {worst:.2g} of the likeliest"

    return run


def every_method(**weights: Any) -> Callable[[torch.device, str], str]:
    """Every method loads a model with these options and takes a step; the gradient is finite and not zero."""

    def run(where: torch.device, model: str) -> str:
        from alignment.config.registry import METHODS

        pairs = paired_rows(TINY, 4)
        completions = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
        rows = {"kto": unpaired_rows(TINY, 4), "online_dpo": prompt_rows(TINY, 4), "sft": completions}
        norms = {}
        for method in ("kto", "cpo", "dpo", "online_dpo", "sft", "reward"):
            online = {"max_new_tokens": 8} if method == "online_dpo" else {}
            with tempfile.TemporaryDirectory() as folder:
                args = METHODS[method](
                    output_dir=folder,
                    use_cpu=where.type == "cpu",
                    max_steps=1,
                    per_device_train_batch_size=2,
                    gradient_accumulation_steps=2,
                    logging_steps=1,
                    save_strategy="no",
                    disable_tqdm=True,
                    **online,
                    **weights,
                )
                trainer = METHODS.trainer(args)(
                    model=model,
                    args=args,
                    train_dataset=rows.get(method, pairs),
                    processing_class=load_tokenizer(model),
                    **({"reward_funcs": arbitrary} if online else {}),
                )
                trainer.train()
                norm = norms[method] = trainer.state.log_history[0]["grad_norm"]
                trainer.close()
            expect(0 < norm < math.inf, f"{method}: the gradient norm is {norm}")
        return "gradient norms: " + ", ".join(f"{method} {norm:.3g}" for method, norm in norms.items())

    return run


def _off(model: Any, prompt: Any, answer: tuple[int, ...]) -> float:
    """Return by how much a completion's tokens are less likely than the likeliest ones, as a mean of log-probs."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return float((logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]).mean())


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _plain_transform() -> Any:
    from transformers import LlamaConfig

    from alignment.models.head import logit_transform

    return logit_transform(LlamaConfig())


def _policy(
    model: str, where: torch.device, zero: dict[str, Any], more: dict[str, Any], dtype: torch.dtype
) -> PolicyEngine:
    config = {**_PLAIN, "zero_optimization": zero, "zero_allow_untested_optimizer": True, **more}
    torch.manual_seed(0)
    scorer = CompletionScorer(load_model(model, dtype, ds_config=config))
    scorer.eval()
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-6, fused=True)
    return PolicyEngine(scorer, config, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))


def _batch() -> Batch:
    return collate([(tuple(range(2, 12)), tuple(range(20, 60))), (tuple(range(2, 8)), tuple(range(30, 50)))], 60)


def _step(policy: PolicyEngine) -> float:
    """Take a step on a mean log-prob; return the gradient norm."""
    policy.backward(-policy.forward(_batch().to(policy.device)).scores.sum() / 60, last=True)
    return policy.step()


CHECKS: dict[str, Check] = {
    "memory cap": Check(cap, True),
    "growing segments": Check(segments, True),
    _LATE: Check(segments, True),
    "page-locked memory": Check(pinned, True),
    "limits of groups": Check(groups, False),
    "head": Check(head, False),
    "states to come": Check(states, True),
    "live model under ZeRO-3": Check(divided, True),
    "fp16": Check(fp16, True),
    "activation offloading": Check(offloading, False),
    "a step of every method": Check(every_method(), True),
    "a step of every method, LoRA": Check(every_method(use_peft=True), True),
    "a step of every method, QLoRA": Check(every_method(use_peft=True, load_in_4bit=True), False),
    "continuous batching, sdpa": Check(continuous("sdpa"), False),
    "continuous batching, flash_attention_2": Check(continuous("flash_attention_2"), True),
}


def run(job: CheckJob) -> str:
    """Return the line of a check.

    Raises:
        RuntimeError: if results are wrong.
    """
    if job.name == _LATE and not job.cpu:
        torch.cuda.init()
    init_distributed(use_cpu=job.cpu)
    where = torch.device("cpu") if job.cpu else torch.device("cuda", torch.cuda.current_device())
    try:
        return CHECKS[job.name].run(where, job.model)
    except Skipped as reason:
        return f"skipped: {reason}"


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    found = run(CheckJob(**json.loads(job_file.read_text(encoding="utf-8"))))
    result_file.write_text(json.dumps(found), encoding="utf-8")
