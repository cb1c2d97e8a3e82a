"""SLURM jobs: the request, its check against the cluster, and the batch script."""
