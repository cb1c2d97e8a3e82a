"""The DeepSpeed JSON and the dtype plan: "auto", contradictions, refusals, and how DeepSpeed reads the result."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

from alignment.config.deepspeed import LoadedConfig, load_deepspeed_config, policy_config
from alignment.config.deepspeed_keys import TOP_LEVEL
from alignment.config.dtypes import plan_dtypes
from alignment.config.elsewhere import without_sections
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.engines.optimizers import build_optimizer, build_scheduler
from alignment.engines.placement import FrozenPlan, plan_frozen
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.kto_options import KTOConfig

pytestmark = pytest.mark.usefixtures("one_process")
POLICIES = ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
HIDDEN = 1024
STAGE2 = {"zero_optimization": {"stage": 2}}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
MASTERS = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def build(base: dict[str, Any], world_size: int = 1, **options: Any) -> dict[str, Any]:
    config = KTOConfig("out", **options)
    return policy_config(config, base, plan_dtypes(config, base), world_size, HIDDEN)


def refused(base: dict[str, Any], **options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        build(base, **options)
    assert "\n" not in str(caught.value) and not str(caught.value).startswith("None")
    return str(caught.value)


def frozen(placement: str | None, base: Any = None, layer: int = 0, **options: Any) -> FrozenPlan:
    config: AlignmentConfig = KTOConfig("out", **options)
    given: dict[str, Any] = {"placement": placement, "deepspeed": base, "dtypes": plan_dtypes(config, {})}
    return plan_frozen(config, "ref", **given, world_size=1, hidden_size=HIDDEN, micro_batch=4, layer=layer)


def autos(value: Any) -> bool:
    return any(map(autos, value.values())) if isinstance(value, dict) else value == "auto"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("options", [{}, {"bf16": True, "max_grad_norm": 0, "gradient_accumulation_steps": 4}])
def test_deepspeed_reads_the_policy_config(name: str, options: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    base = load_deepspeed_config(name, "zero2")
    before = copy.deepcopy(base)
    config = build(base, **options)
    assert base == before, "the input was changed"
    assert not autos(config) and json.loads(json.dumps(config)) == config
    read = DeepSpeedConfig(copy.deepcopy(config))
    accumulation = options.get("gradient_accumulation_steps", 1)
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (8, accumulation)
    assert read.train_batch_size == 8 * accumulation
    assert read.gradient_clipping == options.get("max_grad_norm", 1.0)
    assert read.bfloat16_config.enabled is bool(options.get("bf16")) and not read.float16_config.enabled
    zero = read.zero_config
    assert zero.stage == int(name[4]) and zero.gather_16bit_weights_on_model_save
    assert read.zero_allow_untested_optimizer and not read.wall_clock_breakdown and read.steps_per_print >= 10**9
    offloaded = zero.offload_optimizer is not None
    assert offloaded == name.endswith("_offload") and read.zero_force_ds_cpu_optimizer == (not offloaded)
    if zero.stage == 3:
        assert zero.prefetch_bucket_size == 12 * HIDDEN**2 and zero.max_live_parameters == 36 * HIDDEN**2
        assert zero.param_persistence_threshold == 10_000
    if name == "zero3_offload":
        assert zero.offload_param.device == "cpu" and zero.offload_param.pin_memory is False


@pytest.mark.parametrize(
    ("name", "world", "overlaps", "robin"),
    [("zero1", 2, False, False), ("zero2", 1, False, False), ("zero2", 2, True, False), ("zero3", 1, True, False),
     ("zero2_offload", 1, False, False), ("zero2_offload", 2, True, True), ("zero3_offload", 1, True, False)],
)  # fmt: skip
def test_overlap_and_round_robin_need_several_ranks(name: str, world: int, overlaps: bool, robin: bool) -> None:
    """Stage 3 overlaps weight prefetching as well."""
    zero = build(load_deepspeed_config(None, name), world_size=world)["zero_optimization"]
    assert (zero["overlap_comm"], zero.get("round_robin_gradients", False)) == (overlaps, robin)
    base = load_deepspeed_config(None, name)
    assert build(base, world_size=world, gradient_accumulation_steps=2)["train_batch_size"] == 16 * world


@pytest.mark.parametrize(
    ("hidden", "bucket", "prefetch", "live"),
    [
        (64, 10**6, 49_152, 10**6),
        (1000, 10**6, 12 * 10**6, 36 * 10**6),
        (4096, 4096**2, 5 * 10**7, 603_979_776),
        (8192, 5 * 10**7, 5 * 10**7, 2_415_919_104),
    ],
)
def test_sizes_by_hidden_size(hidden: int, bucket: int, prefetch: int, live: int) -> None:
    """One decoder layer has about 12 h^2 parameters."""
    sizes = {
        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": prefetch,
        "stage3_param_persistence_threshold": 10 * hidden, "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live, "sub_group_size": 10**8,
    }  # fmt: skip
    base: dict[str, Any] = {"zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")}}
    options = KTOConfig("out")
    found = policy_config(options, base, plan_dtypes(options, base), 1, hidden)["zero_optimization"]
    assert {name: found[name] for name in sizes} == sizes


@pytest.mark.parametrize(
    ("layer", "prefetch", "live"),
    [
        (0, 12 * HIDDEN**2, 36 * HIDDEN**2),  # unknown
        (14 * HIDDEN**2, 14 * HIDDEN**2, 28 * HIDDEN**2),
        (37 * HIDDEN**2, 12 * HIDDEN**2, 36 * HIDDEN**2),  # experts
    ],
)
def test_one_layer_of_a_frozen_model_is_fetched_ahead(layer: int, prefetch: int, live: int) -> None:
    zero = frozen("offload", layer=layer).ds_config["zero_optimization"]
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_max_live_parameters"]) == (prefetch, live)
    assert zero["stage3_max_reuse_distance"] == live


def test_deepspeeds_throughput_timer_is_off_by_default() -> None:
    from deepspeed.utils.config import get_timers_config

    for given in ({}, {"timers": {}}, {"timers": {"throughput": {"synchronized": True}}}):
        assert not get_timers_config(build(given)).enabled
    assert get_timers_config(build({"timers": {"throughput": {"enabled": True}}})).enabled


CRAMPED = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}
SLOW_ADAM = {**OFFLOADED, "zero_force_ds_cpu_optimizer": True}


@pytest.mark.parametrize(
    ("base", "options", "said"),
    [
        # Contradictions, which name both sides.
        ({"train_micro_batch_size_per_gpu": 2}, {}, ["per_gpu=2", "per_device_train_batch_size=8"]),
        ({"train_batch_size": 9}, {}, ["train_batch_size=9", "per_device_train_batch_size=8", "1 ranks"]),
        ({"bf16": {"enabled": False}}, {"bf16": True}, ["bf16.enabled=False", "bf16=True"]),
        (CRAMPED, {}, ["=False", "full weights"]),
        (SLOW_ADAM, {}, ["zero_force_ds_cpu_optimizer=True", "optim='adamw_"]),
        # Keys and values.
        ({"zero_optimisation": {"stage": 3}}, {}, ["zero_optimisation=", "did you mean 'zero_optimization'"]),
        ({"_comment": "hello"}, {}, ["_comment='hello'", "no such key"]),
        ({"prescale_gradients": True}, {}, ["prescale_gradients=True", "not supported"]),
        ({"zero_optimization": {"zenflow": {}}}, {}, ["zero_optimization.zenflow={}", "not supported"]),
        ({"zero_optimization": {"stag": 3}}, {}, ["zero_optimization.stag=3", "did you mean 'stage'"]),
        ({"zero_optimization": {"prefetch_bucket_size": 3}}, {}, ["did you mean 'stage3_prefetch_bucket_size'"]),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, {}, ["offload_param.devise='cpu'", "'device'"]),
        ({"zero_optimization": {"stage": True}}, {}, ["zero_optimization.stage=True"]),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, ["offload_param", "stage=2"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}, ["offload_optimizer", "stage=0"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, {}, ["device='nvme'", "supported"]),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": -1}}, {}, ["max_live_parameters=-1: "]),
        ({"fp16": {"initial_scale_power": "high"}}, {}, ["fp16.initial_scale_power='high': "]),
        # Dtypes.
        ({"bf16": {"enabled": True}}, {"bf16": False}, ["bf16.enabled=True", "bf16=False"]),
        ({"fp16": {"enabled": True}}, {"fp16": False}, ["fp16.enabled=True", "float32"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, ["bf16.enabled=true", "fp16.enabled=True"]),
        ({**STAGE2, **MASTERS}, {"bf16": True}, ["bf16_master_weights_and_grads", "learning_rate=1e-06"]),
        (MASTERS, {"bf16": True}, ["bf16_master_weights_and_grads", "stage 1, 2 or 3"]),
        ({"bf16": {"bf16_optimizer_states": True}}, {"bf16": True}, ["bf16_optimizer_states"]),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, {}, ["fp16_master_weights_and_grads", "CPU Adam"]),
        ({**OFFLOADED, **MASTERS}, {"bf16": True, "learning_rate": 1e-3}, ["bf16_master_weights", "offload"]),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"bf16": True}, ['grad_accum_dtype="fp32"', "stage 0"]),
    ],
)
def test_refused_configurations(base: dict[str, Any], options: dict[str, Any], said: list[str]) -> None:
    message = refused(base, **options)
    assert [part for part in said if part not in message] == [], message


@pytest.mark.parametrize(
    ("placement", "base", "said"),
    [
        ("sharded", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["has no optimizer"]),
        ("replica", {"zero_optimization": {"stage": 3}}, ["stage=3", "ref_placement='replica'"]),
        ("offload", {"zero_optimization": {"stage": 3}}, ["'sharded'", "ref_placement='offload'"]),
        ("replica", {"gradient_clipping": 1.0}, ["gradient_clipping=1.0", "without optimizer steps"]),
        ("replica", {"train_batch_size": 3}, ["train_batch_size=3", "4 rows"]),
    ],
)
def test_refused_references(placement: str, base: dict[str, Any] | None, said: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        frozen(placement, base)
    for part in said:
        assert part in str(caught.value)


def test_placement_of_the_reference() -> None:
    assert frozen(None).placement.name == "replica"
    assert frozen("sharded").placement.name == "sharded"
    assert frozen(None, "ref_offload").placement.name == "offload"
    assert frozen(None, {"zero_optimization": {"stage": 3}}).placement.name == "sharded"
    on_the_device = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
    assert frozen(None, on_the_device).placement.name == "sharded"


def test_messages_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"optimizer": {}}', encoding="utf-8")
    assert refused(load_deepspeed_config(str(path), "zero2")).startswith(f"{path}: optimizer=")
    assert refused(load_deepspeed_config({"optimizer": {}}, "zero2")).startswith("DeepSpeed mapping: optimizer=")
    with pytest.raises(OptionError, match="'zero4.json': no such file.*did you mean"):
        load_deepspeed_config("zero4.json", "zero2")


# --- the dtype plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "base", "expected"),
    [
        ({}, {}, ("float32", "float32", "float32")),
        ({"bf16": True}, {}, ("bfloat16", "float32", "bfloat16")),
        ({"dtype": "bfloat16"}, {}, ("bfloat16", "float32", "bfloat16")),
        ({"dtype": "auto"}, {}, ("float32", "float32", "float32")),
        ({"dtype": "float32", "bf16": False}, {}, ("float32", "float32", "float32")),
        ({}, {"bf16": {"enabled": True}}, ("bfloat16", "float32", "bfloat16")),
        ({"bf16": True}, {"bf16": {"enabled": "auto"}}, ("bfloat16", "float32", "bfloat16")),
        ({"bf16": True}, {**STAGE2, "data_types": {"grad_accum_dtype": "fp32"}}, ("bfloat16", "float32", "float32")),
        ({"bf16": True, "learning_rate": 1e-4}, {**STAGE2, **MASTERS}, ("bfloat16", "bfloat16", "bfloat16")),
    ],
)
def test_plan(options: dict[str, Any], base: dict[str, Any], expected: tuple[str, str, str]) -> None:
    plan = plan_dtypes(KTOConfig("out", **options), base)
    assert (plan.compute, plan.master, plan.accumulate) == expected
    assert plan.ds["bf16"] == {"enabled": expected[0] == "bfloat16"} and plan.ds["fp16"] == {"enabled": False}


def test_fp16_requires_a_supporting_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(OptionError, match="fp16=True: the accelerator 'cpu' does not support fp16; set bf16=true"):
        plan_dtypes(KTOConfig("out", fp16=True), {})
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    assert plan_dtypes(KTOConfig("out", fp16=True), {}).compute == "float16"


def test_the_top_level_keys_are_read_by_deepspeed() -> None:
    from deepspeed.runtime import config as ds

    class Recorder(dict[str, Any]):
        """A mapping that records which keys are read."""

        asked: set[str] = set()

        def get(self, key: str, default: Any = None) -> Any:
            self.asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            self.asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    ds.DeepSpeedConfig(Recorder({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}))
    assert TOP_LEVEL.keys() - Recorder.asked <= {"datastates_ckpt"}


def test_names_match_transformers() -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    from alignment.config.fields import choices_of
    from alignment.config.options_training import Optimizer, Schedule

    on_metrics, own = {"reduce_lr_on_plateau", "greedy"}, {"deepspeed_cpu_adam", "deepspeed_fused_adam"}
    assert {*choices_of(Schedule)} == {member.value for member in SchedulerType} - on_metrics
    assert {*choices_of(Optimizer)} - own <= {member.value for member in OptimizerNames}


ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
LOG = {"warmup_type": "log"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


def optimizer(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "optimizer": {"type": kind, "params": {"lr": "auto", **parameters}}}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "scheduler": {"type": kind, "params": {**WARMUP, **parameters}}}


@pytest.mark.parametrize(
    ("base", "given"),
    [
        (optimizer("AdamW", **ADAMW), {"learning_rate": 3e-5}),
        (
            optimizer("adam", lr=3e-5, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.1),
            {"learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "weight_decay": 0.1},
        ),
        (optimizer("AdamW", betas=(0.9, 0.999)), {"optim": "deepspeed_cpu_adam"}),
        (optimizer("FusedAdam"), {"optim": "deepspeed_fused_adam"}),
        (optimizer("SGD", momentum=0.9), {"optim": "sgd", "optim_args": "momentum=0.9"}),
        (scheduler("WarmupLR"), {"lr_scheduler_type": "constant_with_warmup"}),
        (
            scheduler("WarmupLR", warmup_num_steps=4),
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4, "lr_scheduler_kwargs": LOG},
        ),
        (
            scheduler("WarmupDecayLR", warmup_type="linear", warmup_max_lr=1e-3, total_num_steps=9),
            {"lr_scheduler_type": "linear", "max_steps": 9, "warmup_ratio": 0.1, "learning_rate": 1e-3},
        ),
    ],
)
def test_sections_that_agree_with_the_options(base: dict[str, Any], given: dict[str, Any]) -> None:
    options = CPOConfig("out", deepspeed=base, **given)
    assert {name: getattr(options, name) for name in given if name != "optim_args"}.items() <= given.items()


@pytest.mark.parametrize(
    ("base", "given", "said", "option"),
    [
        (optimizer("AdamW", lr=1e-4), {}, "optimizer.params.lr=0.0001", "learning_rate"),
        (optimizer("AdamW", betas=[0.9, 0.95]), {}, "params.betas=", "adam_beta1 and adam_beta2"),
        (optimizer("AdamW"), {"optim": "sgd"}, "optimizer.type='AdamW'", "optim"),
        (optimizer("OneBitAdam"), {}, "optimizer.type='OneBitAdam'", "optim"),
        (optimizer("AdamW", torch_adam=True), {}, "params.torch_adam=True", "optim_args"),
        ({"optimizer": {"type": "AdamW"}}, {}, "optimizer.params.lr=None", "learning_rate"),
        (scheduler("WarmupLR"), {}, "type='WarmupLR'", "lr_scheduler_type"),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"max_steps": 8}, "total_num_steps=9", "max_steps"),
        (scheduler("WarmupDecayLR", warmup_min_lr=1e-7), {}, "warmup_min_lr=1e-07", "lr_scheduler_kwargs"),
        (scheduler("WarmupDecayLR"), {"warmup_steps": 3}, "warmup_type='log'", "lr_scheduler_kwargs"),
    ],
)
def test_sections_that_differ_from_the_options(
    base: dict[str, Any], given: dict[str, Any], said: str, option: str
) -> None:
    with pytest.raises(OptionError) as caught:
        CPOConfig("out", **{"lr_scheduler_type": "linear", **given}, deepspeed=base)
    assert "DeepSpeed mapping: " in str(caught.value) and said in str(caught.value)
    assert f"does not agree with the option {option}, which gives" in str(caught.value)


def test_sections_set_after_construction() -> None:
    base = optimizer("SGD")
    options = CPOConfig("out")
    options.deepspeed = base
    with pytest.raises(OptionError, match=r"optimizer.type='SGD' does not agree with the option optim"):
        options.sealed()
    assert without_sections(LoadedConfig(base, "x")) == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("kind", "theirs"), [("WarmupLR", WarmupLR), ("WarmupDecayLR", WarmupDecayLR)])
def test_learning_rates_match_deepspeed(kind: str, theirs: type, warmup_type: str) -> None:
    """DeepSpeed's are a step late: its schedules return 0 again after the first step."""
    length: dict[str, Any] = {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    base = scheduler(kind, warmup_num_steps=4, warmup_max_lr=8.0, warmup_type=warmup_type, **length)
    ours = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    same = {"lr_scheduler_type": "linear" if length else "constant_with_warmup", "warmup_steps": 4, "max_steps": 10}
    shape = LOG if warmup_type == "log" else None
    options = CPOConfig("out", deepspeed=base, learning_rate=8.0, lr_scheduler_kwargs=shape, **same)
    schedule = build_scheduler(ours, options, 10)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    length = {"total_num_steps": 10} if length else {}
    reference = theirs(other, warmup_max_lr=8.0, warmup_num_steps=4, warmup_type=warmup_type, **length)
    for _ in range(11):
        ours.step()
        reference.step()
        assert schedule.get_last_lr() == pytest.approx(reference.get_last_lr(), rel=1e-12)
        schedule.step()


@pytest.mark.parametrize(("base", "decays"), [(optimizer("SGD"), [0.1, 0.1]), (None, [0.1, 0.0])])
def test_weight_decay_with_a_section_applies_to_biases_and_norms(
    base: dict[str, Any] | None, decays: list[float]
) -> None:
    options = CPOConfig("out", optim="sgd", weight_decay=0.1, deepspeed=base)
    made = build_optimizer(torch.nn.Linear(2, 2), options)
    assert [group["weight_decay"] for group in made.param_groups] == decays


def test_sections_are_not_passed_to_deepspeed() -> None:
    """With them, DeepSpeed would build its own optimizer and schedule."""
    from support.helpers import tiny_config

    from alignment.models.source import ModelSource
    from alignment.planning.engines import plan_engines

    base = {**optimizer("AdamW", **ADAMW), **scheduler("WarmupLR")}
    options = CPOConfig("out", deepspeed=base, use_cpu=True, lr_scheduler_type="constant_with_warmup")
    plan = plan_engines(options, ModelSource("model", None, tiny_config("tied"), {}), None)
    assert plan.policy["zero_optimization"]["stage"] == 2
    assert {"optimizer", "scheduler"}.isdisjoint(plan.policy)
