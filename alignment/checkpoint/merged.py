"""Merge trained adapters into a full model at the end of a run (``merged_output_dir``)."""

from __future__ import annotations

from pathlib import Path

from alignment.checkpoint.run_folder import set_aside
from alignment.config.errors import AlignmentError
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import barrier
from alignment.models.source import ModelSource
from alignment.run.activity import ACTIVITY
from alignment.run.console import tell
from alignment.run.ranks import rank


def write_merged(args: AlignmentConfig, source: ModelSource) -> None:
    """Merge the adapters in ``output_dir`` into their base model ``source`` as stored on disk; collective.

    A merged model of an earlier attempt is moved aside. If they cannot be merged, the adapters are not affected.
    """
    if rank() == 0:
        from alignment.checkpoint.export import ExportOptions, export  # imports peft

        adapters, folder = Path(args.output_dir or ""), Path(args.merged_output_dir or "")
        stays = not args.resume_from_checkpoint or not folder.is_dir() or not any(folder.iterdir())
        if (aside := set_aside(folder.absolute().parent, [] if stays else [folder])) is not None:
            tell(f"merged_output_dir: moved the merged model of an earlier attempt to {aside}")
        revision = source.init_kwargs.get("revision")
        options = ExportOptions(base=source.path, revision=revision, trust_remote_code=args.trust_remote_code)
        try:
            with ACTIVITY("merge"):
                report = export(adapters, folder, options)
        except AlignmentError as error:
            advice = f"the adapters are saved in {adapters}; merge them with deepspeed-alignment export"
            raise type(error)(f"merged_output_dir: {error}; {advice}") from error
        for line in report.lines():
            tell(line)
    barrier()
