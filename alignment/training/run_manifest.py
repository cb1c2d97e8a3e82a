"""What the checkpoints of a run record of it, most of which must be the same when the run is resumed."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from alignment.checkpoint.fingerprints import adapter_fingerprint, fingerprint, model_fingerprint
from alignment.checkpoint.manifest import Manifest
from alignment.config.compatibility.verdicts import judged_names
from alignment.config.fields import words
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.data.prepare import describe_tokenizer
from alignment.models.source import ModelSource
from alignment.planning.engines import EnginePlan
from alignment.run.ranks import world_size
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData, total_steps

_LIBRARIES = ("deepspeed-alignment", "torch", "transformers", "deepspeed", "peft", "bitsandbytes")
# Options that do not affect results or only change rounding (where and how fast they are computed), that fingerprints
# cover (what is read), or that set the length of the run. All others must not change on resume.
MAY_CHANGE = frozenset(
    words(
        """
        adapter_name_or_path bf16 column_map dataset_config dataset_mixture dataset_name dataset_test_split
        dataset_train_split dtype fp16 judge max_eval_samples max_train_samples model_name_or_path
        ref_model_name_or_path reward_funcs reward_model_path strict_data trust_remote_code
        activation_offloading auto_find_batch_size dataloader_num_workers dataset_num_proc deepspeed
        ds3_gather_for_generation gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
        max_tokens_per_batch per_device_eval_batch_size per_device_train_batch_size precompute_ref_batch_size
        ref_deepspeed ref_placement reward_batch_size reward_deepspeed reward_placement use_cpu use_liger_loss
        max_steps num_train_epochs
        eval_packing packing packing_strategy shuffle_dataset
        hang_factor hang_timeout hang_timeout_first loss_spike_factor max_bad_steps on_bad_step peer_timeout retries
        retry_pause
        generate_during_eval
        disable_tqdm dry_run eval_delay eval_on_start eval_steps eval_strategy include_num_input_tokens_seen
        include_tokens_per_second log_completions logging_first_step logging_steps logging_strategy
        max_windows_without_pairs num_completions_to_log report_to run_name
        hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token load_best_model_at_end
        merged_output_dir output_dir overwrite_output_dir push_to_hub resume_anyway resume_from_checkpoint
        save_only_model save_steps save_strategy save_total_limit
        """
    )
)


def run_manifest(
    context: RunContext, plan: EnginePlan, reference: ModelSource | None, resources: Resources
) -> Manifest:
    """Return a manifest without the name of the run, step and files; collective if a live model is partitioned.

    ``reference`` is None if there is none, or if it is the policy as given.
    """
    args, sampler = context.args, context.data.sampler
    assert sampler is not None and context.data.train is not None
    found = {"data": _data(context.data.train)}
    for name, data in context.data.eval.items():
        found[f"evaluation data {name}".rstrip()] = _data(data)
    found["tokenizer"] = fingerprint(describe_tokenizer(context.processing_class))
    found["model"] = model_fingerprint(plan.source)
    found["computing dtype"] = plan.dtypes.compute
    if plan.adapters is not None:
        found["adapters"] = adapter_fingerprint(plan.adapters)
    if reference is not None:
        found["reference"] = model_fingerprint(reference)
    found |= {f"reward source {name}": text for name, text in resources.fingerprints().items()}
    return Manifest(
        run="",
        step=0,
        method=args.method,
        world_size=world_size(),
        stage=int(plan.policy["zero_optimization"]["stage"]),
        window=sampler.window,
        total_steps=total_steps(args, sampler),
        resumable=True,
        versions=library_versions(),
        fingerprints=found,
        options=compared_options(args),
        files={},
    )


def _data(data: PreparedData) -> str:
    rows = "rows" if data.packs is None else f"packs by {data.packs.packing.strategy}"
    return f"{len(data.table)} {rows}, {data.key} ({data.where})"


def compared_options(args: AlignmentConfig) -> dict[str, Any]:
    """Return the options that must not change on resume."""
    left_out = MAY_CHANGE | judged_names(args)
    if isinstance(args, SequenceOptions):  # only limits completions at evaluation; in Online DPO, those trained on
        left_out |= {"max_new_tokens"}
    compared = {name: value for name, value in args.to_dict().items() if name not in left_out}
    as_read: dict[str, Any] = json.loads(json.dumps(compared, default=str))  # as read back from a manifest
    return as_read


def library_versions() -> dict[str, str]:
    """Return the versions of the relevant libraries by name."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # an optional library, or a checkout without installation
            found[name] = version(name)
    return found
