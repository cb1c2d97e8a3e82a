"""Ranks forked from a process that has already imported the libraries, so that a run costs only its own work.

Importing torch, transformers, datasets and DeepSpeed takes about 9 s of CPU per process. :mod:`.server` pays for that
once; :mod:`.client` asks it to run a script on several ranks and returns what they printed.
"""

from tools.ranks.client import RankServer, RanksFailed
from tools.ranks.job import Job, Outcome, RankOutcome

__all__ = ["Job", "Outcome", "RankOutcome", "RankServer", "RanksFailed"]
