"""Fork ranks from a process that has already imported the libraries, so that runs do not pay for imports.

Importing torch, transformers, datasets and DeepSpeed takes about 9 s of CPU time per process. :mod:`.server` does so
once; :mod:`.client` requests it to run a script on several ranks and returns their output.
"""

from tools.ranks.client import RankServer, RanksFailed
from tools.ranks.job import Job, Outcome, RankOutcome

__all__ = ["Job", "Outcome", "RankOutcome", "RankServer", "RanksFailed"]
