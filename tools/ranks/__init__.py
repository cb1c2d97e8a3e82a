"""Fork ranks from a process that has already imported the libraries, so that runs do not pay 9 s of CPU time for them.

:mod:`.server` imports them once; :mod:`.client` requests it to run a script on several ranks and returns their output.
"""

from tools.ranks.client import RankServer, RanksFailed
from tools.ranks.job import Job, Outcome, RankOutcome

__all__ = ["Job", "Outcome", "RankOutcome", "RankServer", "RanksFailed"]
