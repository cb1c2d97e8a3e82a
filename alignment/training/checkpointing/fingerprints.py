"""Fingerprints of data, models and rewards, compared when a run is resumed.

A model is sampled, not read completely: its configuration, the size of every weight file and pieces of each. That
distinguishes models that were trained differently; it does not detect damage.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedModel

from alignment.config.compatibility.verdicts import judged_names
from alignment.config.fields import words
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.data.prepare import describe_tokenizer
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.planning.engines import EnginePlan
from alignment.references.content import hub_commit
from alignment.training.context import RunContext
from alignment.training.data import PreparedData

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
        retry_pause rewind_windows
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
_WEIGHTS = ("*.safetensors", "*.bin")
_PIECES, _PIECE = 16, 1 << 16  # pieces of a weight file, evenly spaced, and bytes per piece
_ELEMENTS = 1024  # leading elements of a live parameter


def fingerprints(
    context: RunContext, plan: EnginePlan, reference: ModelSource | None, rewards: Mapping[str, str]
) -> dict[str, str]:
    """Return the fingerprints of a run by name; collective if a live model is partitioned.

    Args:
        context: the run.
        plan: its models.
        reference: the reference model; None if there is none, or if it is the policy as given.
        rewards: fingerprints of reward sources by name.
    """
    assert context.data.train is not None
    found = {"data": _data(context.data.train)}
    for name, data in context.data.eval.items():
        found[f"evaluation data {name}".rstrip()] = _data(data)
    found["tokenizer"] = _short(describe_tokenizer(context.processing_class))
    found["model"] = model_fingerprint(plan.source)
    found["computing dtype"] = plan.dtypes.compute
    if plan.adapters is not None:
        found["adapters"] = _adapters(plan.adapters)
    if reference is not None:
        found["reference"] = model_fingerprint(reference)
    return found | {f"reward source {name}": text for name, text in rewards.items()}


def _data(data: PreparedData) -> str:
    rows = "rows" if data.packs is None else f"packs by {data.packs.packing.strategy}"
    return f"{len(data.table)} {rows}, {data.key} ({data.where})"


def identity(fingerprint: str | None) -> str | None:
    """Return the part of a fingerprint that is compared: all but the path, which may change."""
    return None if fingerprint is None else fingerprint.partition(" (")[0]


def compared_options(args: AlignmentConfig) -> dict[str, Any]:
    """Return the options that must not change on resume."""
    left_out = MAY_CHANGE | judged_names(args)
    if isinstance(args, SequenceOptions):  # only limits completions at evaluation; in Online DPO, those trained on
        left_out |= {"max_new_tokens"}
    compared = {name: value for name, value in args.to_dict().items() if name not in left_out}
    as_read: dict[str, Any] = json.loads(json.dumps(compared, default=str))  # as read back from a manifest
    return as_read


def _short(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def model_fingerprint(source: ModelSource) -> str:
    """Return a fingerprint of a model's content, independent of its path; collective if live and partitioned."""
    if source.live is not None:
        short = _short({"config": _configuration(source), "parameters": _live(source.live)})
        return f"{short} (a live model)"
    content = _stored(str(source.path), source.init_kwargs)
    return f"{_short({'config': _configuration(source), 'content': content})} ({source.path})"


def code_fingerprint(code: Any) -> str:
    """Return a fingerprint of a user's function or object: its name, and a hash of its source if available.

    For this package's own objects, ``identity`` replaces the source.
    """
    while isinstance(code, functools.partial):
        code = code.func
    named = code if hasattr(code, "__qualname__") else type(code)
    own = getattr(code, "identity", None)
    if isinstance(own, Mapping):
        return f"{named.__qualname__} {_short(own)}"
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):
        return str(named.__qualname__)
    return f"{named.__qualname__} {_short(source)}"


def _configuration(source: ModelSource) -> dict[str, Any]:
    """Return the configuration without its origin and the version that wrote it."""
    content = source.config.to_dict()
    return {name: value for name, value in content.items() if name not in ("_name_or_path", "transformers_version")}


def _adapters(adapters: Adapters) -> str:
    config = {name: value for name, value in adapters.config.to_dict().items() if name != "base_model_name_or_path"}
    config = {n: sorted(map(str, v)) if isinstance(v, (set, list)) else v for n, v in config.items()}
    return _short({"config": config, "content": None if adapters.path is None else _stored(adapters.path, {})})


def _stored(path: str, kwargs: Mapping[str, Any]) -> Any:
    """Sample the weight files of a folder; for a Hub model, return name, revision and commit."""
    folder = Path(path) / kwargs.get("subfolder", "")
    if not folder.is_dir():
        file = "/".join(part for part in (kwargs.get("subfolder", ""), "config.json") if part)
        return [path, kwargs.get("revision"), hub_commit(path, file, kwargs)]
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    return {file.name: [file.stat().st_size, _sampled(_pieces(file))] for file in files}


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        for number in range(_PIECES):
            opened.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
            yield opened.read(_PIECE)


def _live(model: PreTrainedModel) -> str:
    """Sample a live model's parameters, gathering each one if partitioned."""

    def pieces() -> Iterator[bytes]:
        for name, parameter in model.named_parameters():
            yield f"{name} {parameter.dtype}".encode()
            with deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter)):
                flat = parameter.detach().reshape(-1)[:_ELEMENTS].contiguous()
                yield flat.view(torch.uint8).cpu().numpy().tobytes()

    return _sampled(pieces())


def _sampled(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
