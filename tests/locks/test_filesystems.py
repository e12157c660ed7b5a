"""The same promises on every file system that can be had here: what tmp is on, tmpfs, xfs, btrfs, overlay."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support import assert_nothing_left, begin_together

import holdfast
from holdfast import AtomicDir, Lock, LockFile, Semaphore, paths, system

# Making a file system may mean installing its tools first.
pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="no mount table on this platform"),
    pytest.mark.timeout(300),
]


def run(*command: str, seconds: float = 60) -> None:
    """Run a command; skip, with what it said, if it cannot be done here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]}: {error}")
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        pytest.skip(f"{' '.join(command[:3])} failed: {said[-200:]}")


def need_tool(tool: str, package: str) -> None:
    if shutil.which(tool) is None:
        if shutil.which("apt-get") is None:
            pytest.skip(f"no {tool} here, and no apt-get to install {package} with")
        os.environ.setdefault("DEBIAN_FRONTEND", "noninteractive")
        install = ("apt-get", "install", "-y", "--no-install-recommends", package)
        if subprocess.run(install, capture_output=True, timeout=120, check=False).returncode:
            run("apt-get", "update", seconds=120)
            run(*install, seconds=120)


@contextmanager
def mounted(where, *arguments: str):
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    where.mkdir()
    run("mount", *arguments, str(where))
    try:
        yield where
    finally:
        if subprocess.run(["umount", where], capture_output=True, check=False).returncode:
            subprocess.run(["umount", "--lazy", where], check=True)


@contextmanager
def on_image(base, kind: str, package: str):
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    need_tool(f"mkfs.{kind}", package)
    image = base / "image"
    with open(image, "wb") as file:
        file.truncate(512 << 20)  # sparse; xfs wants more than 300 MB
    run(f"mkfs.{kind}", "-q", str(image))
    with mounted(base / "mount", "-t", kind, "-o", "loop", str(image)) as where:
        yield where
    image.unlink()


@contextmanager
def on_tmp(base):
    yield base


@contextmanager
def on_tmpfs(base):
    with mounted(base / "mount", "-t", "tmpfs", "tmpfs") as where:
        yield where


@contextmanager
def on_shm(base):
    where = f"/dev/shm/holdfast-{os.getpid()}"
    try:
        os.mkdir(where)
    except OSError as error:
        pytest.skip(f"no tmpfs at /dev/shm: {error}")
    try:
        yield where
    finally:
        shutil.rmtree(where)


@contextmanager
def on_xfs(base):
    with on_image(base, "xfs", "xfsprogs") as where:
        yield where


@contextmanager
def on_btrfs(base):
    with on_image(base, "btrfs", "btrfs-progs") as where:
        yield where


@contextmanager
def on_subvolume(base):
    """Its device number is in no mount table."""
    with on_btrfs(base) as where:
        run("btrfs", "subvolume", "create", str(where / "sub"))
        yield where / "sub"


@contextmanager
def on_overlay(base):
    """In a tmpfs of its own, because an overlay cannot lie on another one, as in a container."""
    with on_tmpfs(base) as room:
        for name in ("lower", "upper", "work"):
            (room / name).mkdir()
        (room / "lower" / "from-below.lock").touch()
        options = f"lowerdir={room}/lower,upperdir={room}/upper,workdir={room}/work"
        with mounted(room / "merged", "-t", "overlay", "-o", options, "overlay") as where:
            yield where


MAKERS = {
    "tmp": on_tmp,
    "tmpfs": on_shm,
    "xfs": on_xfs,
    "btrfs": on_btrfs,
    "subvolume": on_subvolume,
    "overlay": on_overlay,
}
EXPECTED = {"tmpfs": "tmpfs", "xfs": "xfs", "btrfs": "btrfs", "subvolume": "btrfs", "overlay": "overlay"}


@pytest.fixture(scope="module", params=MAKERS)
def place(request, tmp_path_factory):
    """A directory on each file system in turn."""
    with ExitStack() as stack:
        where = stack.enter_context(MAKERS[request.param](tmp_path_factory.mktemp(request.param)))
        yield request.param, os.path.realpath(where)


@pytest.fixture
def path(place):
    path = os.path.join(place[1], "x.lock")
    yield path
    assert_nothing_left(path)


def test_the_test_directory_is_on_the_intended_file_system(place, path):
    kind, where = place
    with open("/proc/self/mountinfo") as table:
        mount = paths.find_mount(table.read(), os.stat(where).st_dev, where)
    assert mount.kind == EXPECTED.get(kind, mount.kind)
    assert not mount.ranged and mount.refusal is None and mount.events


def test_two_processes_exclude_each_other(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")
    assert Lock(path).try_acquire() is None
    assert Lock(path, shared=True).try_acquire() is None
    peer.do("hold.release()")
    assert not os.path.exists(path)
    with Lock(path, timeout=0):
        assert peer.do("Lock(path).try_acquire()") is None


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
def test_nothing_is_lost(path, start_peer, tmp_path, keep):
    record = tmp_path / "record"
    record.write_text("0")
    peers = [start_peer(path=path, record=str(record), keep=keep) for _ in range(3)]
    begin_together(peers, "count_up(path, record, 100, keep=keep)")
    for peer in peers:
        peer.answer()
    assert record.read_text() == "300"
    assert os.path.exists(path) is keep
    if keep:
        os.unlink(path)


def test_the_next_holder_removes_the_file_of_a_killed_holder(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path).acquire()")
    peer.kill()
    assert os.path.exists(path)
    with Lock(path, timeout=0):
        pass


def test_sharers_share_and_the_last_one_removes_the_file(path, start_peer):
    peer = start_peer(path=path)
    peer.do("hold = Lock(path, shared=True).acquire()")
    with Lock(path, shared=True, timeout=0):
        assert Lock(path).try_acquire() is None
    assert os.path.exists(path)
    peer.do("hold.release()")


def test_the_status_names_holders_and_waiters(path, start_peer):
    holder, sharer, waiter = (start_peer(path=path) for _ in range(3))
    holder.do("hold = Lock(path, shared=True).acquire()")
    sharer.do("hold = Lock(path, shared=True).acquire()")
    waiter.begin("hold = Lock(path).acquire()")
    waiter.until_waiting(path)

    status = Lock(path).status()
    assert {(found.pid, found.shared) for found in status.holders} == {(holder.pid, True), (sharer.pid, True)}
    assert [found.pid for found in status.waiters] == [waiter.pid]

    sharer.do("hold.release()")
    holder.do("hold.release()")
    waiter.answer()
    status = Lock(path).status()
    assert [(found.pid, found.shared) for found in status.holders] == [(waiter.pid, False)]
    assert status.held and status.waiters == ()
    waiter.do("hold.release()")
    assert not Lock(path).status().held


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
def test_an_event_hands_the_lock_over(path, start_peer, keep):
    waiter = start_peer(path=path, keep=keep)
    waiter.do("look_only_when_told()")
    with Lock(path, keep=keep):
        waiter.begin("hold = Lock(path, keep=keep, timeout=30).acquire()")
        waiter.until_waiting(path)
    waiter.answer()
    waiter.do("hold.release()")
    if keep:
        os.unlink(path)


def test_a_killed_waiter_does_not_block_the_others(path, start_peer):
    head, second = start_peer(path=path), start_peer(path=path)
    second.do("look_only_when_told()")
    with Lock(path):
        for peer in (head, second):
            peer.begin("hold = Lock(path).acquire()")
            peer.until_waiting(path)
        head.kill()
    second.answer()
    second.do("hold.release()")


def test_a_semaphore_admits_as_many_as_it_has_permits(path, start_peer):
    peers = [start_peer(path=path) for _ in range(2)]
    for peer in peers:
        peer.do("hold = Semaphore(path, 2).acquire()")
    assert Semaphore(path, 2).try_acquire() is None
    assert {found.pid for found in Semaphore(path, 2).status().holders} == {peer.pid for peer in peers}

    waiter = start_peer(path=path)
    waiter.do("look_only_when_told()")
    waiter.begin("hold = Semaphore(path, 2).acquire(timeout=30)")
    waiter.until_waiting(path)
    peers[0].kill()
    waiter.answer()
    assert Semaphore(path, 2).try_acquire() is None

    waiter.do("hold.release()")
    peers[1].do("hold.release()")


@pytest.mark.parametrize("durable", [False, True], ids=["quick", "durable"])
def test_lock_files_lose_nothing(path, start_peer, tmp_path, durable):
    record = tmp_path / "record"
    record.write_text("0")
    peers = [start_peer(path=path, record=str(record), durable=durable) for _ in range(3)]
    begin_together(peers, "count_up(path, record, 60, kind=holdfast.LockFile, durable=durable)")
    for peer in peers:
        peer.answer()
    assert record.read_text() == "180"


def test_a_waiter_for_a_lock_file_wakes_after_a_release_and_after_a_kill(path, start_peer):
    holder, waiter = start_peer(path=path), start_peer(path=path)
    waiter.do("look_only_when_told()")
    for end in (lambda: holder.do("hold.release()"), holder.kill):
        holder.do("hold = holdfast.LockFile(path).acquire()")
        waiter.begin("hold = holdfast.LockFile(path).acquire()")
        waiter.until_waiting(path)
        end()
        waiter.answer()
        waiter.do("hold.release()")


@pytest.fixture
def layered(tmp_path):
    with on_overlay(tmp_path) as where:
        yield os.path.realpath(where)


def test_a_file_from_the_lower_layer_is_one_lock_before_and_after_it_is_copied_up(layered, start_peer):
    path = os.path.join(layered, "from-below.lock")
    assert not Lock(path).status().held
    peer = start_peer(path=path)
    peer.do("hold = Lock(path, keep=True).acquire()")
    assert Lock(path, keep=True).try_acquire() is None
    assert [found.pid for found in Lock(path).status().holders] == [peer.pid]
    peer.do("hold.release()")
    Lock(path, keep=True).acquire(timeout=0).release()


def test_a_directory_is_replaced_as_a_whole(place):
    room = Path(place[1]) / "atomic"
    room.mkdir()
    site = AtomicDir(room / "site", keep=1)
    with site.replace() as new:
        (new / "a").write_bytes(b"1" * 100_000)
        (new / "sub").mkdir()
        (new / "sub" / "b").write_text("b")
    with site.snapshot() as snap:
        with site.edit() as new, open(new / "a", "r+b") as file:
            file.write(b"2")
        with site.replace() as new:
            (new / "c").write_text("c")
        assert sorted(os.listdir(snap.fd)) == ["a", "sub"]
        assert (snap.path / "a").read_bytes() == b"1" * 100_000, "the edit wrote through"
    with site.read() as path:
        assert os.listdir(path) == ["c"]
    assert site.versions() == [2, 3]
    site.rollback()
    assert (room / "site" / "a").read_bytes() == b"2" + b"1" * 99_999
    assert sorted(os.listdir(room)) == ["site", "site.old-3", "site.versions"]
    shutil.rmtree(room)


def test_an_open_lock_file_whose_attributes_are_gone_counts_as_removed(path, monkeypatch):
    """On sshfs fstat fails with ENOENT for an open file that another machine has removed."""
    real = system.fstat

    def fstat(fd):
        st = real(fd)
        if st.st_nlink == 0 and stat.S_ISREG(st.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return st

    def remove_after_opening(*arguments, **options):
        fd = open_fd(*arguments, **options)
        if arguments[1] == system.O_EXISTING and os.path.exists(path):
            os.unlink(path)
        return fd

    open_fd = system.open_fd
    monkeypatch.setattr(system, "fstat", fstat)
    monkeypatch.setattr(system, "open_fd", remove_after_opening)
    for use in (
        lambda lock: lock.acquire(timeout=5).release(),
        lambda lock: lock.try_acquire().release(),
        lambda lock: lock.wait_until_free(timeout=5),
        lambda lock: lock.clean(),
    ):
        Path(path).write_text(f"pid={os.getpid()}\ntimestamp={int(time.time())}\n")
        use(LockFile(path, stale="old"))
        assert not os.path.exists(path)
    Path(path).write_text(f"pid={os.getpid()}\ntimestamp={int(time.time())}\n")
    assert not LockFile(path).status().held
    with pytest.raises(holdfast.NotLocked):
        LockFile(path).break_()
