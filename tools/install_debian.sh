#!/bin/sh
# Unless these programs are there, install packages from Debian's archive, as root, without starting their services now
# or at the next boot.
# usage: install_debian.sh "PROGRAM..." "SERVICE..." PACKAGE...
set -eu

PATH="$PATH:/usr/sbin:/sbin"
missing='' services=''
for program in $1; do
    command -v "$program" >/dev/null || missing=$program
done
if [ -z "$missing" ]; then
    exit 0
fi
for service in $2; do # those of an earlier installation stay as they are
    systemctl cat "$service" >/dev/null 2>&1 || services="$services $service"
done
shift 2
policy=/usr/sbin/policy-rc.d # packages ask it whether they may start a daemon
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "$@"
if [ -n "$services" ] && command -v systemctl >/dev/null; then
    # shellcheck disable=SC2086
    systemctl disable $services
fi
