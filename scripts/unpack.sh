#!/bin/bash
# Unpack packages that a test needs into .lab/<name>/root:   scripts/unpack.sh <name> <package> …
# Run again, it does only what is missing. Nothing is installed. Exit status 3, and one line that says why, where it
# cannot be done.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
lab=$checkout/.lab/$1
shift

cannot() { echo "$*" >&2; exit 3; }
[ "$(uname -s)" = Linux ] || cannot "needs Linux"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || cannot "needs apt-get"

mkdir -p "$lab"
exec 9>"$lab/lock"
flock 9
[ "$lab/ready" -nt "$0" ] && exit 0
rm -rf "$lab/ready" "$lab/root" "$lab/debs"
mkdir "$lab/debs"
cd "$lab/debs"
apt-get -q -o APT::Sandbox::User=root download "$@" >"$lab/apt.log" 2>&1 ||
  { apt-get -q update >>"$lab/apt.log" 2>&1 && apt-get -q download "$@" >>"$lab/apt.log" 2>&1; } ||
  cannot "the packages cannot be had; see $lab/apt.log"
for package in *.deb; do dpkg -x "$package" "$lab/root"; done
rm -rf "$lab/debs"
touch "$lab/ready"
