"""`AtomicDir`: all of the old or all of the new, whatever happens."""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support import Peer, all_in_children, die_before_call, survives, until

import holdfast
from holdfast import AtomicDir, system
from holdfast.atomicdir import cleanup

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("exchange", "two renames")
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
OLD = {"a": "old a", "sub/b": "old b", "sub/deep/c": "old c" * 1000}
NEW = {"a": "new a", "sub/b": "new b", "other/d": "new d" * 1000}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        forbid_exchange(monkeypatch.setattr)
    return str(request.param)


def forbid_exchange(set_attribute: Callable[[Any, str, Any], object] = setattr) -> None:
    """As on NFS and overlay: two names cannot be exchanged in one step."""

    def exchange(*_: object) -> None:
        raise OSError(errno.EINVAL, "no exchange here")

    set_attribute(system, "exchange", exchange)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def build(directory: Path | str, content: dict[str, str]) -> None:
    for name, text in content.items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def content_of(directory: Path | str) -> dict[str, str]:
    root = Path(directory)
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def put(site: Path, content: dict[str, str], **options: Any) -> AtomicDir:
    lock = AtomicDir(site, durable=False, **options)
    with lock.replace() as new:
        build(new, content)
    return lock


def beside(site: Path, in_use: int = 0) -> list[str]:
    """The siblings of the directory, without its state file, when the old versions that nothing uses are removed."""
    until(lambda: sum(".gone-" in name for name in os.listdir(site.parent)) <= in_use)
    return sorted({*os.listdir(site.parent)} - {site.name, f"{site.name}.versions"})


# The face.


def test_a_directory_is_replaced_as_a_whole(site: Path, way: str) -> None:
    lock = AtomicDir(site)
    with lock.replace() as new:
        assert isinstance(new, Path) and new.parent == site.parent and os.listdir(new) == []
        assert new.stat().st_mode & 0o777 == 0o700, "nobody else looks into what is being built"
        build(new, OLD)
        assert not site.exists()
    assert content_of(site) == OLD and beside(site) == []
    before = site.stat().st_ino
    with lock.replace() as new:
        assert os.listdir(new) == []
        build(new, NEW)
        assert content_of(site) == OLD
    assert content_of(site) == NEW and beside(site) == []
    assert site.stat().st_ino != before


def test_an_edit_begins_with_a_copy_of_the_directory(site: Path, way: str) -> None:
    lock = put(site, OLD)
    with lock.edit() as new:
        assert content_of(new) == OLD
        (new / "a").write_text("changed")
        (new / "sub/b").unlink()
        assert content_of(site) == OLD
    assert content_of(site) == {"a": "changed", "sub/deep/c": OLD["sub/deep/c"]}
    assert beside(site) == []


def test_an_edit_without_a_directory_begins_empty(site: Path) -> None:
    with AtomicDir(site).edit() as new:
        assert os.listdir(new) == []
    assert os.listdir(site) == []


@pytest.mark.parametrize("change", ["replace", "edit"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_removes_the_new_version(
    change: str, error: type[BaseException], site: Path, way: str
) -> None:
    lock = put(site, OLD)
    with pytest.raises(error), getattr(lock, change)() as new:  # noqa: PT012
        build(new, NEW)
        raise error
    assert content_of(site) == OLD and beside(site) == []


def test_the_new_version_has_the_mode_of_the_old_one_or_of_the_block(site: Path, way: str) -> None:
    umask = os.umask(0o027)
    try:
        lock = put(site, OLD)
        assert stat.S_IMODE(site.stat().st_mode) == 0o750
        os.chmod(site, 0o2711)
        put(site, NEW)
        assert stat.S_IMODE(site.stat().st_mode) == 0o2711
        with lock.replace() as new:
            os.chmod(new, 0o755)
        assert stat.S_IMODE(site.stat().st_mode) == 0o755
    finally:
        os.umask(umask)


def test_writers_exclude_each_other_and_readers(site: Path) -> None:
    lock = put(site, OLD)
    impatient = AtomicDir(site, timeout=0)
    with lock.replace():
        for attempt in (impatient.replace, impatient.edit, impatient.read):
            with pytest.raises(holdfast.Busy), attempt():
                pass
    with lock.read(), impatient.read() as path:
        assert path == site
        for attempt in (impatient.replace, impatient.edit):
            with pytest.raises(holdfast.Busy), attempt():
                pass
        with pytest.raises(holdfast.WouldDeadlock), lock.replace(timeout=0.05):
            pass
    assert beside(site) == []


def test_a_reader_of_a_missing_directory_gets_an_error(site: Path) -> None:
    for attempt in (AtomicDir(site).read, AtomicDir(site).snapshot):
        with pytest.raises(FileNotFoundError, match="no version"), attempt():
            pass
    assert beside(site) == []


def test_a_symlink_stands_for_its_target(tmp_path: Path, way: str) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "v"
    link = tmp_path / "link"
    link.symlink_to("real/v")
    put(link, OLD)
    put(link, NEW)
    assert link.is_symlink() and content_of(target) == NEW
    assert beside(target) == [] and sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_path_that_is_no_directory_is_refused_and_left(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("data")
    for attempt in ("replace", "edit", "read", "snapshot"):
        with pytest.raises(NotADirectoryError, match="left untouched"), getattr(AtomicDir(file), attempt)():
            pass
    with pytest.raises(FileNotFoundError, match="make it first"), AtomicDir(tmp_path / "no" / "x").replace():
        pass
    assert file.read_text() == "data" and os.listdir(tmp_path) == ["file"]
    for bad in ("", ".", "..", "x/.."):
        with pytest.raises(ValueError, match="ends in a name"):
            AtomicDir(bad)
    with pytest.raises(ValueError, match="keep"):
        AtomicDir("x", keep=-1)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts something")
def test_a_mount_point_is_refused(tmp_path: Path) -> None:
    code = f"""
import os, holdfast, subprocess
os.mkdir({str(tmp_path / "m")!r})
subprocess.run("mount -t tmpfs none {tmp_path / "m"}", shell=True, check=True)
try:
    with holdfast.AtomicDir({str(tmp_path / "m")!r}).replace():
        print("entered")
except OSError as error:
    print(error.strerror, os.listdir({str(tmp_path)!r}))
"""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "a mount point cannot be replaced; use a directory in it ['m']\n", done


def test_relative_paths_do_not_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = AtomicDir("site", durable=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with lock.replace() as new:
        build(new, OLD)
    assert content_of(tmp_path / "site") == OLD and os.listdir(tmp_path / "elsewhere") == []


def test_a_lost_lock_commits_nothing(site: Path, way: str) -> None:
    lock = put(site, OLD)
    with pytest.raises(holdfast.LockLost), lock.replace() as new:  # noqa: PT012
        build(new, NEW)
        os.unlink(f"{site}.lock")
    assert content_of(site) == OLD and beside(site) == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_all_methods_work_in_an_event_loop(backend: str, site: Path, way: str) -> None:
    async def work() -> None:
        lock = AtomicDir(site, keep=1)
        async with lock.replace() as new:
            build(new, OLD)
        async with lock.edit() as new:
            build(new, {"a": "edited"})
        async with lock.read() as path:
            assert content_of(path)["a"] == "edited"
        async with lock.snapshot() as snap:
            assert sorted(os.listdir(snap.fd)) == ["a", "sub"]
        with pytest.raises(ValueError, match="no"):
            async with lock.replace() as new:
                raise ValueError("no")
        assert await lock.arollback() == 3
        await lock.arecover()
        with pytest.raises(holdfast.WouldDeadlock):
            async with lock.read(), AtomicDir(site).replace():
                pass

    anyio.run(work, backend=backend)
    assert content_of(site) == OLD and beside(site) == ["site.old-2"]


# Versions.


def test_versions_are_kept_and_come_back(site: Path, way: str) -> None:
    lock = AtomicDir(site, keep=2, durable=False)
    assert (lock.version, lock.versions()) == (0, [])
    for number in range(1, 6):
        with lock.replace() as new:
            build(new, {"n": str(number)})
        assert lock.version == number
    assert lock.versions() == [3, 4, 5]
    assert beside(site) == ["site.old-3", "site.old-4"]
    assert content_of(f"{site}.old-3") == {"n": "3"}
    assert lock.rollback() == 6 and content_of(site) == {"n": "4"} and lock.versions() == [3, 5, 6]
    assert lock.rollback(to=3) == 7 and content_of(site) == {"n": "3"} and lock.versions() == [5, 6, 7]
    with pytest.raises(FileNotFoundError, match=r"no earlier version 4.*kept: 5, 6"):
        lock.rollback(to=4)
    assert AtomicDir(site, keep=0).versions() == [5, 6, 7]
    put(site, NEW)
    assert beside(site) == [] and content_of(site) == NEW
    with pytest.raises(FileNotFoundError, match="no earlier version"):
        lock.rollback()


@pytest.mark.parametrize("change", ["replace", "edit"])
def test_a_commit_lists_the_directory_above_once(
    site: Path, way: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(site, OLD, keep=2)
    lock = put(site, NEW, keep=2)
    listed: list[str] = []
    real = system.listdir

    def count(path: str) -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(system, "listdir", count)
    monkeypatch.setattr(os, "listdir", count)
    with getattr(lock, change)() as new:
        build(new, OLD)
    assert listed.count(str(site.parent)) == 1
    monkeypatch.undo()
    assert lock.versions() == [1, 2, 3]


def test_only_a_commit_removes_kept_versions(site: Path, way: str) -> None:
    for number in range(1, 4):
        put(site, {"n": str(number)}, keep=2)
    plain = AtomicDir(site)
    plain.recover()
    with plain.snapshot() as snap:
        assert snap.version == 3
        put(site, {"n": "4"}, keep=2)
    with plain.read():
        pass
    assert plain.versions() == [2, 3, 4]
    assert plain.rollback() == 5 and plain.versions() == [2, 4, 5]
    assert beside(site) == ["site.old-2", "site.old-4"]
    put(site, {"n": "6"})
    assert beside(site) == []


@pytest.mark.parametrize("instead", ["link", "file", "nothing"])
def test_a_new_version_that_is_no_directory_is_not_committed(site: Path, way: str, instead: str) -> None:
    put(site, OLD)
    with pytest.raises(OSError, match="was left as it was"), AtomicDir(site).replace() as new:  # noqa: PT012
        new.rmdir()
        if instead == "link":
            new.symlink_to("elsewhere")
        elif instead == "file":
            new.write_text("no directory")
    assert content_of(site) == OLD and beside(site) == []


def test_a_snapshot_that_is_not_open_has_no_descriptor(site: Path) -> None:
    snap = put(site, OLD).snapshot()
    for _ in range(2):
        for look in ("fd", "path"):
            with pytest.raises(holdfast.NotLocked, match="not open"):
                getattr(snap, look)
        with pytest.raises(holdfast.NotLocked, match="not open"):
            snap.fileno()
        with snap:
            assert os.listdir(snap.fd)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_reader_that_may_not_write_closes_its_snapshot_without_an_error(in_memory: Path) -> None:
    in_memory.chmod(0o755)
    site = in_memory / "site"
    put(site, OLD)

    def look() -> None:
        os.setresuid(65534, 65534, 0)
        with pytest.raises(KeyError), AtomicDir(site).snapshot():  # noqa: PT012
            os.setresuid(-1, 0, 0)
            put(site, NEW)
            os.setresuid(65534, 65534, 65534)
            raise KeyError

    assert survives(look)


def test_a_directory_made_by_the_user_becomes_version_1(site: Path, way: str) -> None:
    build(site, OLD)
    lock = AtomicDir(site, keep=1)
    assert lock.versions() == [1]
    put(site, NEW, keep=1)
    assert lock.versions() == [1, 2]
    lock.rollback()
    assert content_of(site) == OLD


def test_a_large_old_version_is_removed_in_the_end(site: Path, way: str) -> None:
    lock = put(site, {str(number): "x" for number in range(300)})
    put(site, NEW)
    assert content_of(site) == NEW
    until(lambda: beside(site) == [])
    put(site, {str(number): "x" for number in range(300)})
    put(site, OLD)
    put(site, NEW)  # who comes next removes what it finds, too
    until(lambda: beside(site) == [])
    assert lock.versions() == [lock.version]


# Snapshots.


def test_a_snapshot_stays_while_writers_go_on(site: Path, way: str) -> None:
    lock = put(site, OLD)
    with lock.snapshot() as snap:
        fd = snap.fd
        for number in range(3):
            put(site, {"n": str(number)})
        assert content_of(snap.path) == OLD
        assert os.listdir(snap.fd) and snap.fileno() == fd
        with open("a", opener=lambda name, flags: os.open(name, flags, dir_fd=fd)) as file:
            assert file.read() == OLD["a"]
        assert len(beside(site, in_use=1)) == 1, "only the version that is used"
        with lock.snapshot() as later:
            assert content_of(later.path) == {"n": "2"}
    assert beside(site) == [] and content_of(site) == {"n": "2"}
    with pytest.raises(holdfast.NotLocked):
        _ = snap.path


def test_a_snapshot_does_not_wait_for_a_writer(site: Path) -> None:
    lock = put(site, OLD)
    with lock.replace() as new:
        build(new, NEW)
        with AtomicDir(site, timeout=0).snapshot() as snap:
            assert content_of(snap.path) == OLD
    assert content_of(site) == NEW


def test_the_snapshot_of_a_dead_process_is_removed(site: Path, start_peer: Callable[..., Peer]) -> None:
    put(site, OLD)
    peer = start_peer(site=str(site))
    peer.do("snap = holdfast.AtomicDir(site).snapshot(); snap.__enter__()")
    put(site, NEW)
    assert len(beside(site, in_use=1)) == 1
    peer.kill()
    put(site, OLD)
    AtomicDir(site).recover()
    assert beside(site) == []


def test_a_forgotten_snapshot_is_closed(site: Path) -> None:
    lock = put(site, OLD)
    snap = lock.snapshot()
    snap.__enter__()
    fd = snap.fd
    del snap
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# What a copy keeps.


def test_an_edit_keeps_everything(site: Path, way: str) -> None:
    put(site, OLD)
    (site / "link").symlink_to("a")
    (site / "dangling").symlink_to("/no/where")
    (site / "empty").mkdir(mode=0o711)
    (site / "read-only").write_text("x")
    os.chmod(site / "read-only", 0o400)
    os.chmod(site / "sub", 0o555)
    os.link(site / "a", site / "same")
    os.mkfifo(site / "fifo", 0o640)
    with open(site / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"in the middle")
    if os.geteuid() == 0:
        os.chown(site / "a", 12345, 54321)
        os.lchown(site / "link", 23456, 23456)
        os.chmod(site / "a", 0o4755)
    for path in (site / "a", site / "sub", site / "link", site):
        os.utime(path, ns=(1_000_000_000_000_000_001, 1_100_000_000_000_000_002), follow_symlinks=False)
    attributes = True
    try:
        os.setxattr(site / "a", "user.mine", b"\0value")
        os.setxattr(site / "sub", "user.dir", b"1")
    except OSError:
        attributes = False
    before = {path.name: path.lstat() for path in [*site.rglob("*"), site]}
    with AtomicDir(site).edit():
        pass
    after = {path.name: path.lstat() for path in [*site.rglob("*"), site]}
    assert before.keys() == after.keys()
    for name, st in before.items():
        new = after[name]
        assert new.st_ino != st.st_ino, f"{name} would be written through"
        assert (new.st_mode, new.st_uid, new.st_gid, new.st_size) == (st.st_mode, st.st_uid, st.st_gid, st.st_size), (
            name
        )
        assert new.st_mtime_ns == st.st_mtime_ns, name
    assert after["a"].st_ino == after["same"].st_ino and after["a"].st_nlink == 2
    assert os.readlink(site / "link") == "a" and os.readlink(site / "dangling") == "/no/where"
    assert after["sparse"].st_blocks <= before["sparse"].st_blocks + 16
    with open(site / "sparse", "rb") as file:
        file.seek(32 << 20)
        assert file.read(13) == b"in the middle"
    if attributes:
        assert os.getxattr(site / "a", "user.mine") == b"\0value"
        assert os.getxattr(site / "sub", "user.dir") == b"1"
    os.chmod(site / "sub", 0o755)


def test_an_edit_copies_files_that_cannot_be_cloned(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, OLD)

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(system, "clone", refuse)
    with AtomicDir(site).edit():
        pass
    assert content_of(site) == OLD


# Failures.


@pytest.mark.parametrize("what", ["file", "folder", "parent"])
def test_a_failed_fsync_is_a_failed_commit(what: str, site: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, OLD)
    real = system.fsync

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        kind = "parent" if path == str(site.parent) else "folder" if os.path.isdir(path) else "file"
        if kind == what:
            raise OSError(errno.EIO, "no disk")
        real(fd)

    monkeypatch.setattr(system, "fsync", fsync)
    with pytest.raises(OSError, match="no disk"), AtomicDir(site).replace() as new:
        build(new, NEW)
    assert content_of(site) == OLD and beside(site) == []


def test_a_failed_fsync_after_the_swap_keeps_the_new_version_and_its_number(
    site: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers may have seen the new version under its number by then."""
    lock = put(site, OLD, keep=1)
    real = system.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(site.parent) and content_of(site) == NEW:
            raise OSError(errno.EIO, "no disk")
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(system, "fsync", fsync)
        with pytest.raises(OSError, match="no disk"), AtomicDir(site, keep=1).replace() as new:
            build(new, NEW)
    assert content_of(site) == NEW and content_of(f"{site}.old-1") == OLD and lock.versions() == [1, 2]
    put(site, OLD, keep=1)
    assert lock.versions() == [2, 3] and beside(site) == ["site.old-2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tiny tmpfs")
def test_a_full_disk_leaves_the_old_version(tmp_path: Path) -> None:
    code = f"""
import os, holdfast, subprocess
room = {str(tmp_path)!r}
subprocess.run("mount -t tmpfs -o size=256k none " + room, shell=True, check=True)
site = holdfast.AtomicDir(room + "/site")
with site.replace() as new:
    (new / "a").write_bytes(b"x" * 100_000)
for change in (site.replace, site.edit):
    try:
        with change() as new:
            (new / "b").write_bytes(b"y" * 500_000)
    except OSError as error:
        print(error.strerror, sorted(os.listdir(room)), os.listdir(room + "/site"), os.path.getsize(room + "/site/a"))
"""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "No space left on device ['site', 'site.versions'] ['a'] 100000\n" * 2, done


def test_a_terminated_program_that_handles_it_leaves_nothing(site: Path, start_peer: Callable[..., Peer]) -> None:
    put(site, OLD)
    code = f"""
import signal, sys, holdfast
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with holdfast.AtomicDir({str(site)!r}).edit() as new:
    (new / "a").write_text("half")
    print("here", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.terminate()
        assert process.wait(30) == 3
    assert content_of(site) == OLD and beside(site) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2, "new": "../victim", "inode": 1, "replaced": "old-1"}',
        '{"version": 2, "new": "new-0123456789abcdef/..", "inode": 1, "replaced": "old-1"}',
        '{"version": 2, "new": "new-0123456789abcdef", "inode": 1, "replaced": "/tmp/x"}',
        '{"version": "2"}',
        '{"version": -1}',
        '{"version": true}',
        '{"old": 7}',
        '{"old": ["1"]}',
        '{"new": 1}',
        '{"of another program": 1}',
        "[]",
        "garbage",
        "",
    ],
)
def test_a_state_file_of_another_program_is_refused_and_left(text: str, site: Path) -> None:
    put(site, OLD)
    (site.parent / "victim").mkdir()
    file = Path(f"{site}.versions")
    file.write_text(text)
    lock = AtomicDir(site)
    for use in (lock.recover, lock.versions, lock.rollback, lambda: lock.version, lock.replace().__enter__):
        with pytest.raises(OSError, match="not a state file of Holdfast"):
            use()
    assert content_of(site) == OLD and file.read_text() == text
    assert beside(site) == ["victim"]


def test_leftovers_of_dead_writers_are_removed_and_other_files_are_left(site: Path) -> None:
    put(site, OLD)
    Path(f"{site}.new-0123456789abcdef").mkdir()
    (Path(f"{site}.new-0123456789abcdef") / "x").write_text("half")
    not_ours = ["site.new-x", "site.newer", "site.old", "site.old-x", "site2.new-0123456789abcdef", "site.commit.bak"]
    for name in not_ours:
        (site.parent / name).mkdir()
    AtomicDir(site).recover()
    assert beside(site) == sorted(not_ours)


def test_a_living_writers_directory_is_left_alone(site: Path, start_peer: Callable[..., Peer]) -> None:
    put(site, OLD)
    peer = start_peer(site=str(site))
    peer.do("change = holdfast.AtomicDir(site).replace(); new = change.__enter__()")
    with pytest.raises(holdfast.Timeout):
        AtomicDir(site).recover(timeout=0.1)
    assert any(".new-" in name for name in beside(site))
    peer.do("(new / 'a').write_text('new'); change.__exit__(None, None, None)")
    assert content_of(site) == {"a": "new"}


# Killed at every call.

_CALLS = {
    os: ("mkdir", "unlink", "rmdir", "open", "close", "scandir", "stat", "lstat"),  # of `build` and shutil.rmtree
    system: (
        *("open_fd", "close", "fsync", "rename", "exchange", "unlink", "rmdir", "lock", "fstat", "stat", "write"),
        *("listdir", "pread", "scandir", "mkdir", "chmod", "chown", "fchmod", "utime", "clone", "copy_file_range"),
        *("getxattr", "setxattr", "listxattr", "removexattr"),
    ),
}
FIRST = {"a": "first"}
USERS = {"backup": "made by hand"}


def recover_after_kill(site: Path, way: str, keep: int, number: int) -> None:
    """Kill one process in its recovery, too, then recover."""

    def recover() -> None:
        if way == "two renames":
            forbid_exchange()
        die_before_call(number, _CALLS)
        AtomicDir(site, keep=keep).recover()

    survives(recover)
    AtomicDir(site, keep=keep).recover()


@pytest.mark.parametrize(
    ("change", "keep"),
    [
        ("replace", 0),
        ("edit", 1),
        ("rollback", 1),
        ("first", 0),
        pytest.param("replace", 1, marks=SLOW),
        pytest.param("edit", 0, marks=SLOW),
        pytest.param("rollback", 0, marks=SLOW),
        pytest.param("first", 1, marks=SLOW),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_process_killed_at_any_call_leaves_a_whole_version_with_its_number(
    way: str, keep: int, change: str, in_memory: Path
) -> None:
    """A version number means one content: before the kill, after it, and after the next commit."""
    number = 0
    outcomes = set()
    while True:
        room = in_memory / str(number)
        room.mkdir()
        site = room / "site"
        build(room / "site.old-2024", USERS)
        known = {}  # the content of each version
        for old in () if change == "first" else (FIRST, NEW, OLD):
            known[put(site, old, keep=2).version] = old
        before = len(known)

        def work(site: Path = site, number: int = number) -> None:
            if way == "two renames":
                forbid_exchange()
            lock = AtomicDir(site, keep=keep)
            die_before_call(number, _CALLS)
            if change == "rollback":
                lock.rollback()
                return
            with getattr(lock, "replace" if change == "first" else change)() as new:
                if change == "edit":
                    cleanup.remove(str(new / "sub"))
                build(new, NEW)

        finished = survives(work)
        recover_after_kill(site, way, keep, number % 7 * 3)
        lock = AtomicDir(site, keep=keep)
        found = content_of(site) if site.exists() else None
        old_content = None if change == "first" else OLD
        assert found in (old_content, NEW), f"neither old nor new after call {number}"
        outcomes.add(found == NEW)
        versions = lock.versions()
        assert versions == sorted(set(versions)) and lock.version == (versions[-1] if found else 0)
        # A plan that was written may have used up the number, even if its directory was lost.
        assert lock.version in ((before + 1,) if found == NEW else (before, before + 1)), f"after call {number}"
        if found == NEW:
            known[before + 1] = NEW
        for old_version in versions[:-1] if found else versions:
            assert content_of(f"{site}.old-{old_version}") == known[old_version], f"after call {number}"
        # A version that was kept is there, unless a commit with a smaller `keep` has succeeded.
        lost = set(known) - set(versions)
        if found != NEW:
            assert lost == set(), f"after call {number}"
        elif change == "rollback":
            assert lost == {2}, "it has another number now"
        else:
            assert before not in lost or keep == 0, f"after call {number}"
        expected = {f"site.old-{n}" for n in versions if n != lock.version} | {"site.old-2024"}
        assert set(beside(site)) == expected, f"left behind after call {number}"
        assert content_of(room / "site.old-2024") == USERS
        put(site, FIRST, keep=keep, timeout=0)
        assert lock.version > before and len(lock.versions()) <= keep + 1, f"after call {number}"
        cleanup.remove(str(room))
        if finished:
            break
        number += 1
    assert outcomes == {True, False} and number > 20


# Many at once.


@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_readers_beside_writers_see_one_version(way: str, seconds: int, site: Path) -> None:
    """4 writers, 8 readers. Every file of a version has the same text; some versions have more files than others."""
    put(site, {str(n): "0" for n in range(8)})
    deadline = time.monotonic() + seconds

    def write(seed: int) -> None:
        if way == "two renames":
            forbid_exchange()
        lock = AtomicDir(site, durable=False, keep=seed % 2)
        count = 0
        while time.monotonic() < deadline:
            count += 1
            text = f"{seed}-{count}"
            with lock.edit() if count % 3 == 0 else lock.replace() as new:
                for n in range(8 + count % 3):
                    (new / str(n)).write_text(text)
                for path in new.iterdir():
                    path.write_text(text)

    def texts(directory: Any, fd: int | None = None) -> set[str]:
        found = set()
        for name in os.listdir(directory):
            with open(name, opener=lambda name, flags: os.open(name, flags, dir_fd=fd or directory)) as file:
                found.add(file.read())
        return found

    def read(seed: int) -> None:
        lock = AtomicDir(site)
        seen = 0
        while time.monotonic() < deadline or seen < 4:
            if seed % 3 == 0:
                with lock.read() as path:
                    fd = os.open(path, os.O_RDONLY)
                    names = os.listdir(path)
                    found = {(path / name).read_text() for name in names}
                    os.close(fd)
            elif seed % 3 == 1 or way == "two renames":
                with lock.snapshot() as snap:
                    found = texts(snap.fd)
            else:  # no lock at all: opened once, it stays one version
                began = time.monotonic()
                fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    found = texts(fd)
                except FileNotFoundError:
                    found = set()
                os.close(fd)
                if time.monotonic() - began > 0.2:  # who takes no lock has that long
                    continue
            assert len(found) == 1, f"mixed: {found}"
            seen += 1

    all_in_children([partial(work, seed) for work, many in ((write, 4), (read, 8)) for seed in range(many)])
    AtomicDir(site).recover()
    with AtomicDir(site).replace():
        pass
    assert beside(site) == []


def test_processes_that_recover_at_the_same_time_agree(site: Path) -> None:
    for _ in range(20):
        put(site, OLD)
        new = Path(f"{site}.new-0123456789abcdef")
        build(new, NEW)
        plan = {
            "version": 8,
            "old": [7],
            "new": "new-0123456789abcdef",
            "inode": new.stat().st_ino,
            "replaced": "old-7",
        }
        Path(f"{site}.versions").write_text(json.dumps(plan))
        os.rename(site, f"{site}.old-7")
        threads = [threading.Thread(target=AtomicDir(site).recover) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert content_of(site) == NEW and beside(site) == ["site.old-7"]
        put(site, NEW)
        assert beside(site) == []
