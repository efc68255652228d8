#!/usr/bin/env bash
# Run the quick tests on a copy of the checkout, which has a space and an umlaut in its path and in that of its temporary
# files, on a host of another name that has just booted, in another time zone, with the C locale and a umask of 077.
# Arguments go to pytest.
set -euo pipefail

on_a_young_host() {
    local rights=() monotonic boottime
    [ "$(id -u)" = 0 ] || rights=(--map-root-user)
    read -r monotonic boottime < <("${PYTHON:-python3}" -c '
import time
print(int(time.monotonic()), int(time.clock_gettime(time.CLOCK_BOOTTIME)))')
    unshare "${rights[@]}" --uts --mount --time --monotonic="-$monotonic" --boottime="-$boottime" --fork --kill-child \
        sh -c 'hostname elsewhere && mount --bind "$0" /etc/hosts && exec "$@"' "$hosts" "$@"
}

folder=$(mktemp -d)
trap 'trap "" INT TERM; rm -rf "$folder"' EXIT  # make passes on a signal that has come here, too
hosts="$folder/hosts"
printf '127.0.0.1 localhost\n127.0.1.1 elsewhere\n' > "$hosts"  # as Debian has it
on_a_young_host true || {
    echo "Another host name and clock need UTS, mount and time namespaces, and this machine does not permit them." >&2
    exit 1
}

umask 077
copy="$folder/a copy für dlearn"
git init --quiet "$copy"
git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from=- --ignore-failed-read |
    tar --extract --no-same-permissions --directory="$copy"
cd "$copy"
make .venv/.test
# In the C locale, Python before 3.12.4 does not start if a .pth file names a path with an umlaut (cpython #77102).
for file in .venv/lib/python3*/site-packages/dlearn.pth; do echo ../../../.. > "$file"; done
mkdir "$folder/tmp für"
export TMPDIR="$folder/tmp für" TZ=Asia/Kathmandu LC_ALL=C
on_a_young_host .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
