#!/bin/sh
# Install packages from Debian's archive, as root, without starting their daemons.
# usage: install_debian.sh PACKAGE...
set -eu

policy=/usr/sbin/policy-rc.d # packages ask it whether they may start a daemon
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "$@"
