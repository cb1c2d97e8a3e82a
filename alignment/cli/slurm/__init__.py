"""Jobs of SLURM: what is asked for, whether the cluster has it, and the batch script that comes of it."""
