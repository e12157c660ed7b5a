#!/bin/bash
# usage: unshare --mount --net sshfs.sh WORK COMMAND …     (WORK: an empty directory)
# Runs COMMAND where WORK/a and WORK/b are sshfs mounts of WORK/source, through an sshd on loopback.
# Mounts, network and the changes to /etc belong to this process and its children.
set -euo pipefail
work=$1
shift
root=$(cd "$(dirname "$0")/../../.lab/netfs/root" && pwd)
export PATH="$root/usr/sbin:$root/usr/bin:$PATH:/usr/sbin:/sbin"
lab="env LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu"

mkdir "$work"/{source,a,b,run}
# sshd wants a user of its own and a root account that is not locked.
{ cat /etc/passwd; echo sshd:x:391:65534::/run/sshd:/usr/sbin/nologin; } >"$work/passwd"
sed 's/^root:[^:]*:/root:*:/' /etc/shadow >"$work/shadow"
mount --bind "$work/passwd" /etc/passwd
mount --bind "$work/shadow" /etc/shadow
mount --bind "$work/run" /run
mkdir /run/sshd
$lab ip link set lo up

$lab ssh-keygen -q -t ed25519 -N '' -f "$work/key"
cat >"$work/sshd_config" <<CONF
Port 22
ListenAddress 127.0.0.1
HostKey $work/key
AuthorizedKeysFile $work/key.pub
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
CONF
$lab "$(command -v sshd)" -D -e -f "$work/sshd_config" 2>"$work/sshd.log" & # it wants to know its own full path
server=$!
trap 'umount -l "$work/a" "$work/b" 2>/dev/null; kill $server; wait' EXIT
until grep -qs listening "$work/sshd.log"; do
  kill -0 $server || { cat "$work/sshd.log" >&2; exit 1; }
  sleep 0.05
done
for mount in a b; do
  $lab sshfs -o IdentityFile="$work/key",StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR \
    "root@127.0.0.1:$work/source" "$work/$mount"
done
"$@"
