"""A private SLURM cluster on one machine: its daemons run in a separate folder, each node in separate namespaces.

The packages ``slurm-wlm`` and ``munge`` must be installed, and creating namespaces requires root. Nothing outside of
the folder is read or changed, and an existing SLURM installation is not affected.
"""
