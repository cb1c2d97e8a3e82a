"""A private SLURM cluster on one machine, in a folder; an existing installation is neither read nor changed."""
