#!/bin/bash
# Everything that tests/test_network_filesystems.py needs, put into .lab/netfs; run again, it does only what is missing.
# Nothing is installed: packages are downloaded and unpacked, so that no server starts on this machine.
#
#   .lab/netfs/root        the unpacked packages: qemu, sshd, sshfs, NFS and SMB servers, and a kernel with its modules
#   .lab/netfs/vmlinuz     that kernel
#   .lab/netfs/initrd.gz   mounts this machine's files and above them `root`, both read-only 9p shares, and above them
#                          some memory; then runs $guest, which the kernel's command line names
#   .lab/netfs/ready       made last
#
# Exit status 3, and one line that says why, where it cannot be done.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
lab=$checkout/.lab/netfs
root=$lab/root

cannot() { echo "$*" >&2; exit 3; }
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "needs Linux on x86_64"
[ "$(id -u)" = 0 ] || cannot "needs root"
command -v apt-get >/dev/null || cannot "needs apt-get"

mkdir -p "$lab"
exec 9>"$lab/lock"
flock 9
[ "$lab/ready" -nt "$0" ] && exit 0
rm -rf "$lab/ready" "$root" "$lab/debs" "$lab/initrd"

apt() { apt-get -q -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=120 "$@"; }
packages=(qemu-system-x86 busybox-static kmod cpio iproute2 e2fsprogs openssh-server openssh-client sshfs
  nfs-common nfs-kernel-server rpcbind cifs-utils samba)
download() {
  mkdir -p "$lab/debs/partial"
  apt install -y --download-only --no-install-recommends -o Dir::Cache::archives="$lab/debs" "${packages[@]}" &&
    (cd "$lab/debs" && apt download "$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2 }')")
}
download >"$lab/apt.log" 2>&1 || { apt update && download; } >>"$lab/apt.log" 2>&1 ||
  cannot "apt-get cannot download the packages: $(tail -n 1 "$lab/apt.log")"

# Packages still say /bin, /sbin and /lib, which are links.
mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
for deb in "$lab"/debs/*.deb; do
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --keep-directory-symlink
done
rm -rf "$lab/debs"

# The unpacked programs, or this machine's own where it has them.
export PATH="$root/usr/sbin:$root/usr/bin:$PATH:/usr/sbin:/sbin" LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu"
called() { (exec -a "$1" kmod "${@:2}"); } # kmod goes by several names, which are links to the wrong root here
version=$(ls "$root/usr/lib/modules")
ln -f "$root/boot/vmlinuz-$version" "$lab/vmlinuz"
called depmod -b "$root" "$version"

initrd=$lab/initrd
mkdir -p "$initrd"/{bin,modules,proc,sys,dev,machine,packages,memory,newroot}
cp "$(command -v busybox)" "$initrd/bin/busybox"
for module in virtio_pci 9pnet_virtio 9p overlay; do
  called modprobe -d "$root" -S "$version" --show-depends "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$initrd/order"
while read -r file; do cp "$file" "$initrd/modules/"; done <"$initrd/order"
sed -i 's|.*/|/modules/|' "$initrd/order"
cat >"$initrd/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read module; do insmod \$module; done </order
for share in machine packages; do
  mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose \$share /\$share
done
mount -t tmpfs memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/packages:/machine,upperdir=/memory/upper,workdir=/memory/work overlay /newroot
for name in proc sys dev; do mount --move /\$name /newroot/\$name; done
exec switch_root /newroot /bin/bash \$guest
INIT
chmod +x "$initrd/init"
(cd "$initrd" && find . | cpio -o -H newc --quiet | gzip -1) >"$lab/initrd.gz"
rm -rf "$initrd"
touch "$lab/ready"
