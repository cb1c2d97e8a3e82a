"""A private SLURM cluster on one machine: its daemons run in a separate folder, each node in separate namespaces.

The packages ``slurm-wlm`` and ``munge`` must be installed, and creating namespaces requires root. Nothing outside of
the folder is read or changed, and an existing SLURM installation is not affected::

    python -m tools.slurm start FOLDER     # prints the variables to set
    python -m tools.slurm stop FOLDER
"""

from tools.slurm.cluster import Cluster, why_not
from tools.slurm.settings import NODES

__all__ = ["NODES", "Cluster", "why_not"]
