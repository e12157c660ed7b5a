#!/bin/bash
# The first process of the guest: a server and two hosts, `a` and `b`, each with its own network, mounts and name.
# Runs netfs/checks.py, whose answers go to the second serial port, and switches the machine off.
#
#   $checkout, $python   from the kernel's command line; $mounts too: those to check, all if there are none
#   /srv/export          on the server, exported by NFS and SMB
#   /mnt/<name>          the same on the hosts, by each of the mounts below
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root PYTHONPATH=$checkout/src
exec </dev/null >/dev/ttyS0 2>&1
trap 'sync; echo o >/proc/sysrq-trigger; sleep 60' EXIT

mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for directory in /dev/shm /run; do mount -t tmpfs tmpfs $directory; done
for module in veth loop ext4 nfsd nfsv4 nfsv3 cifs; do modprobe $module || echo "no module $module"; done
modprobe -a lockd && echo 2 >/proc/sys/fs/nfs/nlm_grace_period
grep -q ^_rpc: /etc/passwd || echo _rpc:x:390:65534::/run/rpcbind:/usr/sbin/nologin >>/etc/passwd
hostname server
ip link set lo up

mkdir -p /srv/export
truncate -s 200M /srv/disk
mkfs.ext4 -q /srv/disk
mount -o loop /srv/disk /srv/export
rmdir /srv/export/lost+found
chmod 777 /srv/export

for host in a b; do
  unshare --mount --uts --net sleep infinity &
  on="nsenter -t $! -m -u -n"
  printf '#!/bin/sh\nexec %s %s "$@"\n' "$on" "$python" >/srv/python-$host
  printf '#!/bin/sh\nexec %s "$@"\n' "$on" >/srv/on-$host
  chmod +x /srv/*-$host
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
  [ $host = a ] && net=10.9.1 || net=10.9.2
  ip link add server-$host type veth peer name eth0 netns $!
  ip addr add $net.1/24 dev server-$host
  ip link set server-$host up
  $on hostname $host
  $on ip link set lo up
  $on ip addr add $net.2/24 dev eth0
  $on ip link set eth0 up
done

mkdir -p /var/lib/nfs/{sm,sm.bak,v4recovery,rpc_pipefs} /run/rpcbind /run/sendsigs.omit.d
for file in etab rmtab xtab state; do [ -e /var/lib/nfs/$file ] || : >/var/lib/nfs/$file; done
echo '/srv/export *(rw,sync,no_root_squash,fsid=0,insecure,no_subtree_check)' >/etc/exports
mount -t nfsd nfsd /proc/fs/nfsd
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
rpcbind -w
rpc.statd
exportfs -a
rpc.nfsd 4
rpc.mountd
echo Y >/proc/fs/nfsd/v4_end_grace

mkdir -p /srv/smb/{state,lock,private,cache,pid,ncalrpc}
cat >/srv/smb/smb.conf <<CONF
[global]
  server role = standalone server
  interfaces = server-a server-b
  bind interfaces only = yes
  disable netbios = yes
  load printers = no
  disable spoolss = yes
  server min protocol = SMB2_02
  state directory = /srv/smb/state
  lock directory = /srv/smb/lock
  private dir = /srv/smb/private
  cache directory = /srv/smb/cache
  pid directory = /srv/smb/pid
  ncalrpc dir = /srv/smb/ncalrpc
  log file = /srv/smb/log.%m
  passdb backend = tdbsam:/srv/smb/private/passdb.tdb
[store]
  path = /srv/export
  read only = no
CONF
printf 'secret\nsecret\n' | smbpasswd -c /srv/smb/smb.conf -s -a root
setsid smbd -F --no-process-group -s /srv/smb/smb.conf --debug-stdout >/srv/smb/out 2>&1 &
until ss -ltn | grep -q :445; do sleep 0.2; done

for host in a b; do
  on=/srv/on-$host
  [ $host = a ] && server=10.9.1.1 || server=10.9.2.1
  $on mount -t tmpfs tmpfs /run
  $on mount -t tmpfs tmpfs /var/lib/nfs
  $on mkdir -p /run/rpcbind /var/lib/nfs/{sm,sm.bak,rpc_pipefs}
  $on rpcbind -w
  $on rpc.statd
  put() { # name, type, what, options
    [ $2 = cifs ] && from=//$server$3 || from=$server:$3
    $on mkdir -p /mnt/$1 && $on mount -t $2 -o $4 $from /mnt/$1 || echo "no mount $1 on $host"
  }
  put nfs4 nfs4 / vers=4.2,nosharecache
  put nfs3 nfs /srv/export vers=3,nosharecache
  for option in nolock local_lock={all,posix,flock}; do
    put nfs3-$option nfs /srv/export vers=3,nosharecache,$option
  done
  smb=vers=3.1.1,username=root,password=secret,nosharesock
  put cifs cifs /store $smb
  put cifs-nolease cifs /store $smb,nolease
  put cifs-nobrl cifs /store $smb,nobrl
  $on grep -E ' (nfs|cifs)' /proc/self/mountinfo
done

cd "$checkout/tests" && "$python" -W error -m netfs.checks ${mounts//,/ } >/dev/ttyS1
status=$?
echo "{\"mount\": \"\", \"check\": \"exit status\", \"outcome\": $status}" >/dev/ttyS1
