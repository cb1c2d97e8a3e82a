#!/bin/sh
# Install SLURM and munge from Debian's archive, as root, without starting their daemons now or at the next boot.
set -eu

PATH="$PATH:/usr/sbin:/sbin"
if command -v slurmctld >/dev/null && command -v sbatch >/dev/null && command -v munged >/dev/null; then
    exit 0
fi
"$(dirname "$0")/../install_debian.sh" slurm-wlm munge shellcheck
if command -v systemctl >/dev/null; then
    systemctl disable munge slurmctld slurmd
fi
