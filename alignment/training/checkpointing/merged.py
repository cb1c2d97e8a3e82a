"""The end of a run that trained adapters: a full model beside them, if one was asked for."""

from __future__ import annotations

from pathlib import Path

from alignment.config.errors import AlignmentError
from alignment.engines.checkpoints.old_runs import set_folder_aside
from alignment.engines.collectives import barrier
from alignment.models.source import ModelSource
from alignment.reporting.activity import ACTIVITY
from alignment.training.context import RunContext


def write_merged(context: RunContext, source: ModelSource, folder: Path) -> None:
    """Merge the adapters in the output folder into their base as it is on disk; collective.

    Args:
        context: the run, whose adapters have been saved.
        source: the base.
        folder: where to. What an attempt before this one merged is set aside.

    Raises:
        AlignmentError: they cannot be merged; the adapters stay.
    """
    if context.is_first:
        from alignment.engines.exporting.adapter import merge_adapter  # imports peft

        aside = set_folder_aside(folder) if context.args.resume_from_checkpoint else None
        if aside is not None:
            context.tell(f"merged_output_dir: what an attempt before this one merged is in {aside}")
        try:
            with ACTIVITY("merge"):
                report = merge_adapter(
                    context.output_dir,
                    folder,
                    base=source.path,
                    revision=source.init_kwargs.get("revision"),
                    trust_remote_code=context.args.trust_remote_code,
                )
        except AlignmentError as error:
            raise type(error)(
                f"merged_output_dir: {error}; the adapters are in {context.output_dir}: deepspeed-alignment export "
                "merges them"
            ) from error
        for line in report.lines():
            context.tell(line)
    barrier()
