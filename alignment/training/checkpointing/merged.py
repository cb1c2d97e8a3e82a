"""Merge trained adapters into a full model at the end of a run (``merged_output_dir``)."""

from __future__ import annotations

from pathlib import Path

from alignment.checkpoint.old_runs import set_folder_aside
from alignment.config.errors import AlignmentError
from alignment.engines.collectives import barrier
from alignment.models.source import ModelSource
from alignment.run.activity import ACTIVITY
from alignment.training.context import RunContext


def write_merged(context: RunContext, source: ModelSource, folder: Path) -> None:
    """Merge the adapters in the output folder into their base model as stored on disk; collective.

    Args:
        context: the run, whose adapters have been saved.
        source: the base model.
        folder: the destination. A merged model of an earlier attempt is moved aside.

    Raises:
        AlignmentError: if they cannot be merged; the adapters are not affected.
    """
    if context.is_first:
        from alignment.checkpoint.export import ExportOptions, export  # imports peft

        aside = set_folder_aside(folder) if context.args.resume_from_checkpoint else None
        if aside is not None:
            context.tell(f"merged_output_dir: moved the merged model of an earlier attempt to {aside}")
        try:
            with ACTIVITY("merge"):
                revision, trust = source.init_kwargs.get("revision"), context.args.trust_remote_code
                options = ExportOptions(base=source.path, revision=revision, trust_remote_code=trust)
                report = export(context.output_dir, folder, options)
        except AlignmentError as error:
            raise type(error)(
                f"merged_output_dir: {error}; the adapters are saved in {context.output_dir}; merge them with "
                "deepspeed-alignment export"
            ) from error
        for line in report.lines():
            context.tell(line)
    barrier()
