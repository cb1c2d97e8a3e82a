"""A real SLURM on one machine: its daemons in a folder of their own, each node in namespaces of its own.

The packages ``slurm-wlm`` and ``munge`` have to be installed, and only root may unshare namespaces. Nothing outside
the folder is read or changed, and a SLURM that the machine already has is left alone::

    python -m tools.slurm start FOLDER     # prints the variables to set
    python -m tools.slurm stop FOLDER
"""

from tools.slurm.cluster import Cluster, why_not
from tools.slurm.settings import NODES

__all__ = ["NODES", "Cluster", "why_not"]
