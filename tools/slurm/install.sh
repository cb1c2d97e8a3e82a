#!/bin/sh
# Install SLURM and munge from Debian's archive, as root, without starting their daemons, now or at the next boot.
set -eu

PATH="$PATH:/usr/sbin:/sbin"
if command -v slurmctld >/dev/null && command -v sbatch >/dev/null && command -v munged >/dev/null; then
    exit 0
fi
policy=/usr/sbin/policy-rc.d # packages ask it whether they may start a daemon
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends slurm-wlm munge shellcheck
if command -v systemctl >/dev/null; then
    systemctl disable munge slurmctld slurmd
fi
