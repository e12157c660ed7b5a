"""File systems of other machines: a lock excludes the other host, or says that it cannot.

The hosts are network namespaces of a virtual machine, with a kernel that knows NFS and CIFS; what happens there is in
netfs/checks.py. sshfs needs no other kernel. scripts/netfs.sh fetches what both need.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from netfs.checks import PLAN

if TYPE_CHECKING:
    from typing import Any

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHECKOUT = Path(__file__).parents[1]
NETFS = Path(__file__).parent / "netfs"
PATIENCE_WITH_GUEST = 1000.0  # emulated: some minutes on an idle machine


@pytest.fixture(scope="module")
def lab() -> Path:
    """Where scripts/netfs.sh has put things."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network file systems: needs Linux")
    done = subprocess.run([CHECKOUT / "scripts/netfs.sh"], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(f"network file systems: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return CHECKOUT / ".lab/netfs"


@pytest.fixture(scope="module")
def guest(lab: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What the guest found, by mount and check."""
    packages = lab / "root"
    libraries = packages / "usr/lib/x86_64-linux-gnu"
    console, results = lab / "console.txt", lab / "results.txt"
    qemu = shutil.which("qemu-system-x86_64", path=f"{packages}/usr/bin:{os.environ['PATH']}")
    assert qemu is not None
    share = "local,security_model=none,readonly=on,multidevs=remap"
    command = [
        *(qemu, "-L", packages / "usr/share/qemu", "-L", packages / "usr/share/seabios"),
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-m", "2G", "-smp", "2"),
        *("-nodefaults", "-nographic", "-no-reboot", "-serial", f"file:{console}", "-serial", f"file:{results}"),
        *("-virtfs", f"{share},path=/,mount_tag=machine", "-virtfs", f"{share},path={packages},mount_tag=packages"),
        *("-kernel", lab / "vmlinuz", "-initrd", lab / "initrd.gz", "-append"),
        f"console=ttyS0 quiet loglevel=1 panic=1 checkout={CHECKOUT} python={sys.executable} guest={NETFS}/guest.sh "
        f"mounts={os.environ.get('NETFS_MOUNTS', '')}",
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "QEMU_MODULE_DIR": str(libraries / "qemu")}
    for file in (console, results):
        file.write_bytes(b"")
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False, timeout=PATIENCE_WITH_GUEST)
    assert ended.returncode == 0
    lines = [json.loads(line) for line in results.read_text().splitlines() if line.strip()]
    assert lines, f"nothing came from the guest, whose console said:\n{console.read_text(errors='replace')}"
    return {(line["mount"], line["check"]): line for line in lines}


@pytest.mark.parametrize(
    ("mount", "check"), [(mount, check.__name__) for mount, checks in PLAN.items() for check in checks]
)
def test_in_the_guest(guest: dict[tuple[str, str], dict[str, Any]], mount: str, check: str) -> None:
    found = guest.get((mount, check))
    assert found is not None, "the guest did not get so far; see .lab/netfs/console.txt"
    assert found["outcome"] == "ok", found["outcome"]


def test_the_guest_ended_without_an_error(guest: dict[tuple[str, str], dict[str, Any]], lab: Path) -> None:
    found = guest.get(("", "exit status"))
    assert found is not None and found["outcome"] == 0, (lab / "console.txt").read_text(errors="replace")[-5000:]


ASK_BOTH_MOUNTS = """
import fcntl, json, sys
import holdfast

def flock(path):
    file = open(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file

def refusal(lock):
    try:
        return repr(lock.try_acquire())
    except holdfast.Unsupported as error:
        return str(error)

a, b = sys.argv[1:]
with flock(a + "/x"), flock(b + "/x"):
    pass
print(json.dumps([refusal(lock) for lock in (holdfast.Lock(a + "/l"), holdfast.Semaphore(b + "/s", 2))]))
"""


def on_two_mounts(code: str, tmp_path: Path) -> Any:
    """Run a program with two sshfs mounts of one directory as its arguments; what it printed."""
    command = [sys.executable, "-W", "error", "-c", code, tmp_path / "a", tmp_path / "b"]
    done = subprocess.run(
        ["unshare", "--mount", "--net", NETFS / "sshfs.sh", tmp_path, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOCK_FILES_ON_BOTH_MOUNTS = """
import json, os, signal, sys, time, traceback
import holdfast

def count(mount):
    for _ in range(20):
        with holdfast.LockFile(mount + "/x.lock", retry=0.005), open(mount + "/record", "r+") as file:
            number = int(file.read())
            file.seek(0)
            file.write(str(number + 1))

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def join(*pids):
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), "a child has failed; its traceback is above"

a, b = sys.argv[1:]
with open(a + "/record", "w") as file:
    file.write("0")
join(*[child(lambda: count(mount)) for mount in (a, b, a)])
with open(a + "/record") as file:
    counted = int(file.read())

ready, say = os.pipe()
def hold_on():
    hold = holdfast.LockFile(a + "/y.lock").acquire()
    os.write(say, b"1")
    signal.pause()
holder = child(hold_on)
os.read(ready, 1)
lock = holdfast.LockFile(b + "/y.lock", retry=0.005)
refused = lock.try_acquire() is None
os.kill(holder, signal.SIGKILL)
os.waitpid(holder, 0)
lock.acquire(timeout=10).release()
# FUSE hides a file that was removed while it was open, and removes it some time after it was closed.
deadline = time.monotonic() + 60
while any(name.startswith(".fuse_hidden") for name in os.listdir(a)) and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([counted, refused, sorted(os.listdir(a))]))
"""


def test_lock_files_on_sshfs(lab: Path, tmp_path: Path) -> None:
    assert on_two_mounts(LOCK_FILES_ON_BOTH_MOUNTS, tmp_path) == [60, True, ["record"]]


def test_sshfs_which_grants_a_flock_twice_is_refused(lab: Path, tmp_path: Path) -> None:
    refusals = on_two_mounts(ASK_BOTH_MOUNTS, tmp_path)
    assert len(refusals) == 2
    for text in refusals:
        assert "fuse.sshfs" in text and "Use holdfast.LockFile" in text
