"""`AtomicDir` among mounts, other users, full disks, interrupts, forks, and people with names like ours."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import LoopClock, Peer, survives, until
from test_atomic_dir import (
    NEW,
    OLD,
    beside,
    build,
    content_of,
    forbid_exchange,
    put,
    site,
    way,
)

import holdfast
from holdfast import AtomicDir, system
from holdfast.atomicdir import cleanup, commit, copying, directory
from holdfast.paths import follow_links

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["site", "way"]  # fixtures

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.name == "nt" or os.geteuid() != 0, reason="needs root: mounts something or becomes another user"
)


@pytest.fixture
def shared_room(in_memory: Path) -> Path:
    """A directory that somebody else can go into."""
    in_memory.chmod(0o755)
    return in_memory


def as_nobody(work: Callable[[], object]) -> bool:
    def become_and_work() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        work()

    return survives(become_and_work)


def in_own_mounts(code: str, **names: Any) -> str:
    """What the code prints that runs with mounts of its own."""
    head = "import os, holdfast\nfrom holdfast import AtomicDir\nfrom holdfast.atomicdir import cleanup\n"
    head += "def sh(line):\n    if os.system(line):\n        raise OSError(line)\n"
    head += "".join(f"{name} = {str(value)!r}\n" for name, value in names.items())
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Mounts.


@as_root
@pytest.mark.parametrize("when", ["before", "meanwhile", "in the new one"])
def test_a_mount_in_the_directory_is_refused(when: str, tmp_path: Path) -> None:
    """Also one of the same device, which no stat shows: it would be emptied with the old version."""
    (tmp_path / "site" / "up loads").mkdir(parents=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").write_text("precious")
    code = """
def mount(where):
    sh(f"mount --bind '{room}/precious' '{where}'")
if when == "before":
    mount(room + "/site/up loads")
try:
    with AtomicDir(room + "/site").replace() as new:
        print("entered")
        if when == "meanwhile":
            mount(room + "/site/up loads")
        elif when == "in the new one":
            (new / "m").mkdir()
            mount(new / "m")
except OSError as error:
    print(error.errno, "is mounted in it" in error.strerror)
"""
    entered = "" if when == "before" else "entered\n"
    assert in_own_mounts(code, room=tmp_path, when=when) == f"{entered}{errno.EBUSY} True\n"
    assert (tmp_path / "precious" / "a").read_text() == "precious"
    assert os.listdir(tmp_path / "site") == ["up loads"]


@as_root
def test_a_mount_of_the_same_device_on_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    code = """
sh(f"mount --bind {room}/site {room}/site")
try:
    AtomicDir(room + "/site").replace().__enter__()
except OSError as error:
    print(error.strerror, os.listdir(room))
"""
    said = in_own_mounts(code, room=tmp_path)
    assert said == "a mount point cannot be replaced; use a directory in it ['site']\n"


@as_root
def test_removing_enters_no_mount(tmp_path: Path) -> None:
    build(tmp_path / "precious", OLD)
    for name in ("tree/a/b/m", "mount"):
        (tmp_path / name).mkdir(parents=True)
    code = """
for place, tree in (("tree/a/b/m", "tree"), ("mount", "mount")):
    sh(f"mount --bind {room}/precious {room}/{place}")
    try:
        cleanup.remove(f"{room}/{tree}")
    except OSError as error:
        print(error.strerror)
"""
    assert in_own_mounts(code, room=tmp_path) == "Device or resource busy\n" * 2
    assert content_of(tmp_path / "precious") == OLD


@as_root
def test_a_lower_layer_of_an_overlay_is_refused_and_left(in_memory: Path) -> None:
    for name in ("lower/site", "upper", "work", "m"):
        (in_memory / name).mkdir(parents=True)
    (in_memory / "lower/site/a").write_text("from the image")
    code = """
sh(f"mount -t overlay overlay -o lowerdir={room}/lower,upperdir={room}/upper,workdir={room}/work {room}/m")
for name in ("site", "fresh", "fresh"):
    try:
        with AtomicDir(f"{room}/m/{name}").edit() as new:
            (new / "b").write_text("b")
    except OSError as error:
        print("lower layer" in error.strerror, sorted(os.listdir(f"{room}/m")))
    print(os.listdir(f"{room}/m/{name}"))
"""
    said = in_own_mounts(code, room=in_memory)
    assert said == "True ['site', 'site.versions']\n['a']\n['b']\n['b']\n"


# Content.


@pytest.mark.parametrize("way", ["in the kernel", "through this process"])
def test_a_copy_is_whole_where_the_system_takes_only_a_part_at_a_time(
    way: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(site, OLD)
    parts: list[int] = []

    def copy_file_range(reader: int, writer: int, count: int, start: int, at: int) -> int:
        parts.append(real_copy(reader, writer, min(count, 100), start, at))
        return parts[-1]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        parts.append(real_write(fd, data[:100], at))
        return parts[-1]

    real_copy, real_write = system.copy_file_range, system.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(system, "clone", system.common._unsupported)
        patched.setattr(system, "pwrite", pwrite)
        patched.setattr(
            system, "copy_file_range", copy_file_range if way == "in the kernel" else system.common._unsupported
        )
        change = AtomicDir(site, durable=False).edit()
        new = change.__enter__()
    assert content_of(new) == OLD and len(parts) >= len(OLD["sub/deep/c"]) // 100
    change.__exit__(None, None, None)


@as_root
def test_a_disk_that_is_full_when_a_small_file_is_copied(tmp_path: Path) -> None:
    code = """
sh(f"mount -t tmpfs -o size=128k none {room}")
os.mkdir(room + "/site")
for name, size in (("site/data", 60000), ("ballast", 20480)):
    with open(f"{room}/{name}", "wb") as file:
        file.write(b"x" * size)
try:
    with AtomicDir(room + "/site").edit():
        print("entered")
except OSError as error:
    print(error.strerror, os.path.getsize(room + "/site/data"))
"""
    assert in_own_mounts(code, room=tmp_path) == "No space left on device 60000\n"


def test_a_file_that_becomes_a_symlink_while_it_is_copied_is_an_error(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The symlink is not followed."""
    build(site, {"x": "x"})
    real = copying.Copier._copy_file

    def swap(self: copying.Copier, name: str, *args: Any) -> None:
        (site / "x").unlink()
        (site / "x").symlink_to("/etc/passwd")
        real(self, name, *args)

    monkeypatch.setattr(copying.Copier, "_copy_file", swap)
    with pytest.raises(OSError, match="symbolic link"), AtomicDir(site).edit():
        pass
    assert beside(site) == []


def test_a_symlink_put_in_the_place_of_a_directory_is_not_followed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program puts a symlink in the place of a directory for a moment."""
    build(site, {"sub/deep/c": "mine"})
    build(site.parent / "elsewhere", {"deep/c": "secret"})
    real = copying.Copier._copy_folder

    def swap(self: copying.Copier, path: str, source: int, target: int) -> None:
        if not path.endswith("/sub"):
            real(self, path, source, target)
            return
        os.rename(site / "sub", site / "moved")
        (site / "sub").symlink_to("../elsewhere")
        try:
            real(self, path, source, target)
        finally:
            (site / "sub").unlink()
            os.rename(site / "moved", site / "sub")

    monkeypatch.setattr(copying.Copier, "_copy_folder", swap)
    with AtomicDir(site).edit() as new:
        assert content_of(new) == {"sub/deep/c": "mine"}


def dig(directory: Path, levels: int) -> None:
    """Make directories in directories."""
    fd = os.open(directory, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


def test_a_deep_tree_is_copied_and_removed(in_memory: Path) -> None:
    deep = in_memory / "site"
    with AtomicDir(deep).replace() as new:
        dig(new, 200)
    with AtomicDir(deep).edit():
        pass
    assert os.path.exists(f"{deep}{'/d' * 200}/bottom")
    put(deep, NEW)
    assert beside(deep) == []


def test_a_tree_that_is_too_deep_to_remove_is_left_and_logged(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = in_memory / "site"
    put(deep, OLD)
    dig(deep, 1100)
    put(deep, NEW)
    until(lambda: bool(caplog.records) or not [name for name in os.listdir(in_memory) if ".gone-" in name])
    if sys.version_info < (3, 13):
        assert "is left; the next writer tries to remove it again" in caplog.text
    assert content_of(deep) == NEW
    put(deep, OLD)
    assert content_of(deep) == OLD
    subprocess.run(f"rm -rf {in_memory}/site.gone-*", shell=True, check=True)


def test_the_mode_that_the_block_asks_for_is_the_mode(site: Path) -> None:
    for change in (AtomicDir(site).replace, AtomicDir(site).edit):
        with change() as new:
            os.chmod(new, 0o700)
        assert stat.S_IMODE(site.stat().st_mode) == 0o700
        os.chmod(site, 0o755)


def test_other_users_cannot_read_a_version_that_is_being_built(site: Path) -> None:
    put(site, OLD)
    os.chmod(site, 0o777)
    with AtomicDir(site).edit() as new:
        assert not new.stat().st_mode & 0o077
    assert stat.S_IMODE(site.stat().st_mode) == 0o777


@as_root
def test_the_owner_carries_over_unless_the_block_sets_it(site: Path) -> None:
    put(site, OLD)
    os.chown(site, 123, 456)
    for change in (AtomicDir(site).replace, AtomicDir(site).edit):
        with change() as new:
            assert new.stat().st_uid == 0, "nor does the old owner change what is being built"
        assert (site.stat().st_uid, site.stat().st_gid) == (123, 456)
    with AtomicDir(site).replace() as new:
        os.chown(new, 7, 8)
    assert (site.stat().st_uid, site.stat().st_gid) == (7, 8)


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize("change", ["replace", "edit"])
def test_the_parents_default_acl_stays_out(change: str, site: Path) -> None:
    build(site, OLD)
    nobody = 0xFFFFFFFF
    value = acl((1, 7, nobody), (2, 7, 1234), (4, 5, nobody), (16, 7, nobody), (32, 5, nobody))
    try:
        os.setxattr(site.parent, "system.posix_acl_default", value)
    except OSError:
        pytest.skip("no access control lists here")
    os.chmod(site / "a", 0o640)
    with getattr(AtomicDir(site), change)():
        pass
    for path in [site, *site.rglob("*")]:
        assert [name for name in os.listxattr(path) if "acl" in name] == [], path
    os.setxattr(site, "system.posix_acl_access", value)
    with getattr(AtomicDir(site), change)():
        pass
    assert os.getxattr(site, "system.posix_acl_access") == value, "the directory's own stays"


# Other users.


@as_root
def test_the_owner_of_a_directory_can_commit_after_root_has(shared_room: Path) -> None:
    """Also in a sticky directory, where nobody but root can replace root's files."""
    room = shared_room / "room"
    room.mkdir()
    room.chmod(0o1777)
    path = room / "site"
    build(path, OLD)
    os.chown(path, NOBODY, NOBODY)
    with AtomicDir(path).replace() as new:
        build(new, OLD)

    def work() -> None:
        with AtomicDir(path).replace() as new:
            build(new, NEW)
        assert content_of(path) == NEW and AtomicDir(path).version == 3

    assert as_nobody(work)


@as_root
def test_root_changes_no_file_behind_a_symlink_that_the_owner_puts_in_the_way(
    shared_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the directory above replaces the new state file and the new version as soon as they appear."""
    victim = shared_room / "victim"
    victim.write_text("root's")
    victim.chmod(0o640)
    swapped = []

    def swap(name: str) -> None:
        os.rename(name, f"{name}.away")
        os.symlink(victim, name)
        swapped.append(name)

    open_fd, mkdir = system.open_fd, system.mkdir

    def open_and_swap(name: Any, flags: int, *rest: Any, **options: Any) -> int:
        fd = open_fd(name, flags, *rest, **options)
        if flags == system.O_NEW and ".versions." in str(name):
            swap(str(name))
        return fd

    def make_and_swap(name: str, *rest: Any) -> None:
        mkdir(name, *rest)
        if ".new-" in name:
            swap(name)

    for call, replacement in (("open_fd", open_and_swap), ("mkdir", make_and_swap)):
        path = shared_room / call
        build(path, OLD)
        os.chown(path, NOBODY, NOBODY)
        with monkeypatch.context() as patched, suppress(OSError):
            patched.setattr(system, call, replacement)
            with AtomicDir(path).replace() as new:
                build(new, NEW)
    st = victim.stat()
    assert len(swapped) == 2 and (st.st_uid, stat.S_IMODE(st.st_mode)) == (0, 0o640)
    assert victim.read_text() == "root's"


@as_root
@pytest.mark.parametrize("mode", [0o311, 0o000, 0o500])
@pytest.mark.parametrize("durable", [True, False])
def test_an_unprivileged_owner_replaces_files_it_may_not_read(mode: int, durable: bool, shared_room: Path) -> None:
    room = shared_room / "room"
    room.mkdir(mode=0o755)
    os.chown(room, NOBODY, NOBODY)
    path = room / "site"

    def work() -> None:
        build(path, OLD)
        path.chmod(mode)
        with AtomicDir(path, durable=durable).replace() as new:
            build(new, NEW)
            (new / "sub").chmod(0o300)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.chmod(0o700)
        assert stat.S_IMODE((path / "sub").stat().st_mode) == 0o300
        (path / "sub").chmod(0o700)
        assert content_of(path) == NEW
        with pytest.raises(ValueError, match="mine"), AtomicDir(path).replace() as new:  # noqa: PT012
            new.chmod(0)
            raise ValueError("mine")
        assert beside(path) == []

    assert as_nobody(work)
    assert stat.S_IMODE(room.stat().st_mode) == 0o755, "what is above it is not ours to change"


@as_root
def test_an_unprivileged_owner_edits_files_that_are_read_only(shared_room: Path) -> None:
    os.chown(shared_room, NOBODY, NOBODY)
    path = shared_room / "site"

    def work() -> None:
        build(path, OLD)
        os.setxattr(path / "a", "user.mine", b"x")
        (path / "a").chmod(0o444)
        (path / "sub").chmod(0o500)
        path.chmod(0o555)
        lock = AtomicDir(path, keep=1)
        for number in range(2, 5):
            with lock.edit() as new:
                (new / "more").write_text("x")
            assert stat.S_IMODE(path.stat().st_mode) == 0o555
            assert lock.versions() == [number - 1, number]
        assert stat.S_IMODE((path / "a").stat().st_mode) == 0o444
        assert os.getxattr(path / "a", "user.mine") == b"x"

    assert as_nobody(work)


@as_root
def test_a_copy_with_another_owner_loses_setuid_and_setgid(shared_room: Path) -> None:
    os.chown(shared_room, NOBODY, NOBODY)
    path = shared_room / "site"
    build(path, {"tool": "x", "mine": "x", "group": "x"})
    os.chown(path, NOBODY, NOBODY)
    os.chmod(path / "tool", 0o6755)
    os.chown(path / "mine", NOBODY, NOBODY)
    os.chmod(path / "mine", 0o6755)
    os.chown(path / "group", 0, 1234)
    os.chmod(path / "group", 0o2755)

    def work() -> None:
        os.setgroups([1234])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with AtomicDir(path).edit():
            pass

    assert survives(work)
    modes = {name: stat.S_IMODE((path / name).stat().st_mode) for name in os.listdir(path)}
    assert modes == {"tool": 0o755, "mine": 0o6755, "group": 0o2755}
    assert (path / "group").stat().st_gid == 1234


@as_root
def test_a_state_file_of_another_user_in_a_sticky_directory_is_not_obeyed(shared_room: Path) -> None:
    shared_room.chmod(0o1777)
    path = shared_room / "site"
    put(path, OLD, keep=1)
    name = "site.new-0123456789abcdef"

    def plant() -> None:
        (shared_room / name).mkdir()
        (shared_room / "site.old-7").mkdir()
        plan = {"version": 8, "old": [7], "new": name[5:], "inode": 1, "replaced": "old-1"}
        (shared_room / "site.versions").write_text(json.dumps(plan))

    os.unlink(f"{path}.versions")
    assert as_nobody(plant)
    lock = AtomicDir(path)
    for use in USES.values():
        with pytest.raises(PermissionError, match="user 65534 made this file"):
            use(lock)
    os.unlink(f"{path}.versions")
    (shared_room / "site.versions").write_text('{"version": 8, "old": [7]}')
    assert lock.versions() == [8], "there is no rollback to a directory that another user made"
    assert content_of(path) == OLD and (shared_room / name).is_dir()


USES: dict[str, Callable[[AtomicDir], object]] = {
    "replace": lambda lock: lock.replace().__enter__(),
    "edit": lambda lock: lock.edit().__enter__(),
    "read": lambda lock: lock.read().__enter__(),
    "snapshot": lambda lock: lock.snapshot().__enter__(),
    "recover": AtomicDir.recover,
    "rollback": AtomicDir.rollback,
    "version": lambda lock: lock.version,
    "versions": AtomicDir.versions,
}


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o1755])
@pytest.mark.parametrize("where", ["at the end", "on the way", "at the lock"])
def test_a_symlink_of_another_user_is_refused(mode: int, where: str, shared_room: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    build(victim / "site", OLD)
    link, target = {
        "at the end": (shared_room / "site", victim / "site"),
        "on the way": (shared_room / "data", victim),
        "at the lock": (shared_room / "site.lock", victim / "new.lock"),
    }[where]
    lock = AtomicDir(shared_room / "data" / "site" if where == "on the way" else shared_room / "site")
    shared_room.chmod(0o1777)
    assert as_nobody(lambda: link.symlink_to(target))
    shared_room.chmod(mode)
    if where == "at the lock":
        (shared_room / "site").mkdir()
    takes_no_lock = where == "at the lock" and {"snapshot", "version", "versions"}
    for name, use in USES.items():
        if takes_no_lock and name in takes_no_lock:
            continue
        said = f"{link} is a symlink that user {NOBODY} made .* not followed. Remove"
        with pytest.raises(holdfast.UnsafePath, match=said):
            use(lock)
    assert os.listdir(victim) == ["site"] and content_of(victim / "site") == OLD


@as_root
@pytest.mark.parametrize("why", ["ours", "of the parent's owner", "nobody else can write there"])
def test_a_symlink_that_can_be_trusted_is_followed(why: str, shared_room: Path, tmp_path: Path) -> None:
    put(tmp_path / "site", OLD)
    shared_room.chmod(0o755 if why == "nobody else can write there" else 0o1777)
    link = shared_room / "site"
    link.symlink_to(tmp_path / "site")
    if why != "ours":
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    if why == "of the parent's owner":
        os.chown(shared_room, NOBODY, NOBODY)
    put(link, NEW)
    assert content_of(tmp_path / "site") == NEW and link.is_symlink()


def test_symlinks_lead_where_the_system_says(site: Path) -> None:
    """Relative and absolute, `..` behind a link, a target that does not exist yet, and a loop."""
    (site.parent / "one" / "two").mkdir(parents=True)
    (site.parent / "deep").symlink_to("one/two")
    for name, target in (("a", "deep/../x"), ("b", site.parent / "a"), ("c", "./deep//./y"), ("d", "/../")):
        (site.parent / name).symlink_to(target)
        assert follow_links(f"{site.parent}/{name}/z") == os.path.realpath(site.parent / name / "z")
    (site.parent / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        AtomicDir(site.parent / "loop").recover()


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_siblings_of_another_user_are_left_alone(mode: int, shared_room: Path, tmp_path: Path) -> None:
    """Root would remove what the user could not, for instance another user's files below such a name."""
    build(tmp_path / "victim", OLD)
    path = shared_room / "site"
    put(path, OLD, keep=1)
    number = "0123456789abcdef"

    def plant() -> None:
        for name in ("new", "gone"):
            (shared_room / f"site.{name}-{number}").mkdir(0o777)
            (shared_room / f"site.{name}-{number[::-1]}").symlink_to(tmp_path / "victim")
        (shared_room / "site.old-7").mkdir()
        (shared_room / f"site.versions.{number}.tmp").write_text("{}")

    shared_room.chmod(0o1777)
    assert as_nobody(plant)
    shared_room.chmod(mode)
    planted = {entry.name for entry in shared_room.iterdir()} - {"site", "site.versions"}
    for name in ("new", "gone"):
        build(shared_room / f"site.{name}-{number}", NEW)  # root's, in a directory of the other user
    lock = AtomicDir(path)
    lock.recover()
    put(path, NEW)
    put(path, OLD)
    assert lock.versions() == [3], "no version of the other user counts"
    assert set(beside(path, in_use=2)) == planted
    assert all(content_of(shared_room / f"site.{name}-{number}") == NEW for name in ("new", "gone"))
    assert content_of(path) == OLD and content_of(tmp_path / "victim") == OLD


@as_root
def test_root_keeps_versions_of_a_directory_that_it_does_not_own(shared_room: Path) -> None:
    shared_room.chmod(0o1777)
    path = shared_room / "site"
    put(path, {"n": "1"})
    os.chown(path, NOBODY, NOBODY)
    for number in range(2, 5):
        lock = put(path, {"n": str(number)}, keep=1)
    assert lock.versions() == [3, 4] and path.stat().st_uid == NOBODY
    assert beside(path) == ["site.old-3"]


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_a_state_file_that_is_no_regular_file_is_refused(kind: str, site: Path) -> None:
    build(site, OLD)
    make: dict[str, Callable[[str], object]] = {
        "symlink": lambda path: os.symlink("elsewhere", path),
        "fifo": os.mkfifo,
        "directory": os.mkdir,
    }
    make[kind](f"{site}.versions")
    with pytest.raises(OSError, match="symbolic link" if kind == "symlink" else "not a state file of Holdfast"):
        AtomicDir(site).recover()
    assert content_of(site) == OLD and os.path.lexists(f"{site}.versions")


# Names like ours.


def test_a_directory_of_the_user_with_the_name_of_a_version_is_left_alone(site: Path, way: str) -> None:
    build(site, OLD)
    build(f"{site}.old-2024", {"backup": "made by hand"})
    Path(f"{site}.old-1").write_text("a file")
    Path(f"{site}.old-3").symlink_to("elsewhere")
    subprocess.run(["cp", "-a", site, f"{site}.old-77"], check=True)
    for number in range(4):
        put(site, {"n": str(number)}, keep=1)
    lock = AtomicDir(site, keep=1)
    current = lock.version
    assert lock.versions() == [current - 1, current]
    assert lock.rollback() == current + 1 and content_of(site) == {"n": "2"}
    put(site, NEW)
    assert lock.versions() == [lock.version]
    assert beside(site) == ["site.old-1", "site.old-2024", "site.old-3", "site.old-77"]
    assert content_of(f"{site}.old-2024") == {"backup": "made by hand"}


def test_an_earlier_version_comes_back_by_its_number(site: Path, way: str) -> None:
    for number in range(1, 5):
        put(site, {"n": str(number)}, keep=2)
    lock = AtomicDir(site, keep=2)
    assert lock.versions() == [2, 3, 4]
    assert lock.rollback(to=2) == 5 and lock.versions() == [3, 4, 5]
    put(site, NEW)
    assert beside(site) == []


# Interrupts and crashes.


def test_an_interrupt_after_the_exchange_keeps_the_replaced_version(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = AtomicDir(site, keep=5)
    put(site, OLD, keep=5)
    real = system.fsync

    def fsync(fd: int) -> None:
        real(fd)
        if os.readlink(f"/proc/self/fd/{fd}") == str(site.parent) and content_of(site) == NEW:
            raise KeyboardInterrupt

    with lock.snapshot() as snap:
        monkeypatch.setattr(system, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt), lock.replace() as new:
            build(new, NEW)
        monkeypatch.undo()
        assert content_of(snap.path) == OLD
    assert content_of(site) == NEW
    assert content_of(f"{site}.old-1") == OLD


def die_before_rename(to: str) -> None:
    real = system.rename

    def rename(one: str, other: str) -> None:
        if other == to:
            os.kill(os.getpid(), signal.SIGKILL)
        real(one, other)

    setattr(system, "rename", rename)  # noqa: B010


def test_a_crash_after_the_exchange_keeps_the_replaced_version(site: Path) -> None:
    put(site, OLD, keep=3)

    def work() -> None:
        die_before_rename(f"{site}.old-1")
        put(site, NEW, keep=3)

    with AtomicDir(site).snapshot() as snap:
        assert not survives(work)
        AtomicDir(site).recover()
        assert content_of(snap.path) == OLD
    assert content_of(site) == NEW and AtomicDir(site).versions() == [1, 2]


def test_a_version_that_a_snapshot_uses_is_not_removed_under_any_name(site: Path) -> None:
    put(site, OLD)
    left = Path(f"{site}.new-0123456789abcdef")
    build(left, OLD)
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    AtomicDir(site).recover()
    assert sorted(os.listdir(fd)) == ["a", "sub"]
    os.close(fd)
    AtomicDir(site).recover()
    assert beside(site) == []


def test_a_rollback_that_was_killed_is_finished(site: Path, way: str) -> None:
    lock = AtomicDir(site, keep=5, durable=False)
    for number in range(1, 6):
        put(site, {"n": str(number)}, keep=5)

    def work() -> None:
        die_before_rename(f"{site}.old-5" if way == "exchange" else str(site))
        lock.rollback(to=2)

    assert not survives(work)
    lock.recover()
    assert content_of(site) == {"n": "2"} and lock.versions() == [1, 3, 4, 5, 6]
    assert all(content_of(f"{site}.old-{number}") == {"n": str(number)} for number in (1, 3, 4, 5))
    assert lock.rollback() == 7 and content_of(site) == {"n": "5"}


@pytest.mark.parametrize("fails", ["first", "second"])
def test_a_plan_that_fails_does_not_happen_later(
    fails: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(site, OLD)
    forbid_exchange(monkeypatch.setattr)
    real = system.rename

    def rename(one: str, other: str) -> None:
        if (".old-" in other and fails == "first") or (other == str(site) and ".new-" in one):
            raise OSError(errno.EBUSY, "not now")
        real(one, other)

    monkeypatch.setattr(system, "rename", rename)
    with pytest.raises(OSError, match="not now"), AtomicDir(site).replace() as new:
        build(new, NEW)
    monkeypatch.undo()
    assert content_of(site) == OLD and beside(site) == []
    with AtomicDir(site).read() as path:
        assert content_of(path) == OLD, "it does not happen later"


@pytest.mark.parametrize("meanwhile", [{}, {"log": "of a service"}])
def test_a_directory_that_another_program_makes_between_two_renames_is_moved_aside(
    meanwhile: dict[str, str],
    site: Path,
) -> None:
    put(site, OLD, keep=3)

    def work() -> None:
        forbid_exchange()
        die_before_rename(str(site))
        put(site, NEW, keep=3)

    assert not survives(work)
    site.mkdir()
    build(site, meanwhile)
    with AtomicDir(site).read() as path:
        assert content_of(path) == NEW
    assert AtomicDir(site).versions() == [1, 2] and content_of(f"{site}.old-1") == OLD
    assert beside(site) == (["site.old-1", "site.old-2"] if meanwhile else ["site.old-1"])
    put(site, NEW)
    assert beside(site) == (["site.old-2"] if meanwhile else []), "it is the user's, and no version"
    assert not meanwhile or content_of(f"{site}.old-2") == meanwhile


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_that_takes_the_place_of_the_directory_is_left(what: str, site: Path, way: str) -> None:
    put(site, OLD)
    with pytest.raises(NotADirectoryError, match="left untouched"), AtomicDir(site).replace() as new:  # noqa: PT012
        build(new, NEW)
        cleanup.remove(str(site))
        if what == "file":
            site.write_text("somebody's")
        else:
            site.symlink_to(site.parent)
    assert site.is_symlink() if what == "link" else site.read_text() == "somebody's"
    assert beside(site) == []


@pytest.mark.parametrize("error", [None, SystemExit()])
def test_a_forked_child_leaves_its_parents_block_alone(error: BaseException | None, site: Path) -> None:
    change = AtomicDir(site).replace()
    new = change.__enter__()
    build(new, NEW)
    assert survives(lambda: change.__exit__(error and type(error), error, None))
    assert content_of(new) == NEW and not site.exists()
    change.__exit__(None, None, None)
    assert content_of(site) == NEW


def test_a_forked_child_does_not_pin_a_version(site: Path, start_peer: Callable[..., Peer]) -> None:
    put(site, OLD)
    parent = start_peer(site=str(site))
    parent.do("snap = holdfast.AtomicDir(site).snapshot().__enter__()")
    child = parent.do("idle_child()")
    try:
        put(site, NEW)
        assert parent.do("sorted(os.listdir(snap.fd))") == ["a", "sub"]
        parent.do("snap.close()")
        assert beside(site) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_program_that_was_given_the_descriptor_keeps_the_version(site: Path) -> None:
    put(site, OLD)
    with AtomicDir(site).snapshot() as snap:
        command = ["sh", "-c", f"read line; cat /proc/self/fd/{snap.fd}/a"]
        program = subprocess.Popen(command, pass_fds=[snap.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    put(site, NEW)
    AtomicDir(site).recover()
    assert program.communicate(b"go on\n")[0] == b"old a" and program.returncode == 0
    AtomicDir(site).recover()
    assert beside(site) == []


def test_a_parent_that_dies_leaves_no_version_to_its_child(site: Path, start_peer: Callable[..., Peer]) -> None:
    put(site, OLD)
    parent = start_peer(site=str(site))
    parent.do("snap = holdfast.AtomicDir(site).snapshot().__enter__()")
    child = parent.do("idle_child()")
    try:
        parent.kill()
        put(site, NEW)
        assert beside(site) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_leaves_its_parents_snapshot_alone(site: Path) -> None:
    """It has none itself, closes nothing that it opened since, and unlocks nothing."""
    lock = put(site, OLD)
    snapshot = lock.snapshot().__enter__()
    number = snapshot.fd

    def work() -> None:
        with pytest.raises(holdfast.NotLocked, match="not open here"):
            snapshot.fd  # noqa: B018
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        os.dup2(os.open("/dev/null", os.O_RDONLY), number)
        snapshot.close()
        os.fstat(number)
        with lock.snapshot() as own:
            assert sorted(os.listdir(own.fd)) == ["a", "sub"]

    assert survives(work)
    assert survives(snapshot.close)  # where the number of the descriptor is not in use again
    put(site, NEW)
    lock.recover()
    assert content_of(snapshot.path) == OLD
    snapshot.close()
    assert beside(site) == []


# What cannot be removed.


def test_a_leftover_that_cannot_be_removed_does_not_stop_writers(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(site, OLD)
    for name in ("new", "gone"):
        Path(f"{site}.{name}-0123456789abcdef").mkdir()
    real = cleanup.remove

    def remove(directory: str) -> None:
        if "-0123456789abcdef" in directory or ".gone-" in directory:
            raise PermissionError(errno.EPERM, "immutable", directory)
        real(directory)

    monkeypatch.setattr(cleanup, "remove", remove)
    monkeypatch.setattr(directory, "GRACE_S", 0.0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for content in (NEW, OLD, NEW):
            put(site, content)
            assert content_of(site) == content
        AtomicDir(site).recover()
    assert "immutable" in caplog.text
    monkeypatch.undo()
    AtomicDir(site).recover()
    assert beside(site) == []


def test_the_removal_goes_on_after_any_error(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(site, OLD)
    real, failed = cleanup.remove, threading.Event()

    def remove(path: str) -> None:
        if not failed.is_set() and path.startswith(str(site)):  # not a version that an earlier test has left
            failed.set()
            raise RecursionError("too deep")
        real(path)

    monkeypatch.setattr(cleanup, "remove", remove)
    for content in (NEW, OLD, NEW):
        put(site, content)
    assert failed.wait(30)
    until(lambda: sum(".gone-" in name for name in os.listdir(site.parent)) == 1)
    put(site, OLD)
    until(lambda: sum(".gone-" in name for name in os.listdir(site.parent)) == 0)
    assert "too deep" in caplog.text


# Cancellation that knows no shield.


class Slow:
    """A copy that takes until it is told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.began.set()
            assert self.may_end.wait(30)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task in the middle, more than once, and let it end a moment later."""
        await asyncio.to_thread(self.began.wait, 30)
        for _ in range(3):
            task.cancel()
            for _ in range(10):  # it arrives, and the task waits again
                await asyncio.sleep(0)
            assert not task.done(), "the work is not done"
        self.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_task_cancelled_while_it_copies_leaves_nothing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, OLD)
    slow = Slow(monkeypatch, copying.Copier, "copy")

    async def change() -> None:
        async with AtomicDir(site).edit():
            pytest.fail("entered")

    async def main() -> None:
        await slow.cancel(asyncio.create_task(change()))
        assert beside(site) == [], "neither a copy nor the lock"

    asyncio.run(main())
    put(site, NEW, timeout=0)


def test_a_task_cancelled_while_it_commits_has_committed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, OLD)
    slow = Slow(monkeypatch, commit.Site, "commit")

    async def change() -> None:
        async with AtomicDir(site).replace() as new:
            build(new, NEW)

    async def main() -> None:
        await slow.cancel(asyncio.create_task(change()))
        assert content_of(site) == NEW

    asyncio.run(main())
    assert beside(site) == []


def test_a_task_that_times_out_leaves_nothing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, OLD)
    slow = Slow(monkeypatch, copying.Copier, "copy")

    async def change() -> None:
        async with AtomicDir(site).edit():
            pytest.fail("entered")

    async def main() -> None:
        clock = LoopClock()
        task = asyncio.create_task(asyncio.wait_for(change(), 60))
        assert await asyncio.to_thread(slow.began.wait, 30)
        await clock.forward(120)
        assert not task.done(), "the work is not done"
        slow.may_end.set()
        with pytest.raises(asyncio.TimeoutError):
            await task
        assert beside(site) == []

    asyncio.run(main())


# Readers.


@pytest.mark.parametrize("timeout", [0, 60])
def test_a_snapshot_of_a_directory_that_another_program_has_locked_is_busy(timeout: float, site: Path) -> None:
    put(site, OLD)
    fd = os.open(site, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with (
        pytest.raises(holdfast.Busy, match="exclusive lock on the directory"),
        AtomicDir(site).snapshot(timeout=timeout),
    ):
        pass

    async def snapshot() -> None:
        async with AtomicDir(site).snapshot(timeout=timeout):
            pass

    with pytest.raises(holdfast.Busy):
        asyncio.run(snapshot())
    os.close(fd)
    with AtomicDir(site).snapshot(timeout=timeout):
        pass


def test_a_snapshot_is_left_whatever_became_of_the_directory(site: Path) -> None:
    put(site, OLD)
    with AtomicDir(site).snapshot() as snap:
        fd = snap.fd
        os.rename(site, f"{site}-moved")
        site.write_text("a file")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_no_version_is_listed_twice(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = put(site, OLD, keep=3)
    real, looks = commit.Site._read, iter([True])

    def read(self: commit.Site) -> Any:
        state = real(self)
        if next(looks, False):
            put(site, NEW, keep=3)  # another writer commits after the state was read
        return state

    monkeypatch.setattr(commit.Site, "_read", read)
    assert lock.versions() == [1]
    assert lock.versions() == [1, 2]


# Misuse.


def test_misuse_raises_at_once(site: Path) -> None:
    for bad in ("./", "../", "a/../", "/", "//", "a/./"):
        with pytest.raises(ValueError, match="names no directory that can be replaced"):
            AtomicDir(bad)
    lock = put(site, OLD)
    for block in (lock.replace(), lock.edit(), lock.read()):
        with pytest.raises(holdfast.NotLocked, match="only inside the block"):
            block.__exit__(None, None, None)
    with lock.read() as path, pytest.raises(holdfast.WouldDeadlock, match=r"site\.lock"):
        lock.rollback()
    reading = lock.read()
    with reading:
        with pytest.raises(holdfast.HoldfastError, match="entered already"):
            reading.__enter__()
        with pytest.raises(holdfast.WouldDeadlock, match=r"site\.lock"), lock.replace():
            pass
        assert reading.hold.lock.path == f"{site}.lock"
    assert path == site and beside(site) == []


@pytest.mark.parametrize("name", ["replace", "edit", "read"])
def test_a_block_is_not_a_path(name: str, site: Path) -> None:
    block = getattr(AtomicDir(site), name)()
    with pytest.raises(TypeError, match="Block"):
        block / "index.html"
    with pytest.raises(TypeError, match="Block"):
        os.stat(block)


# The command.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_command_leaves_nothing_when_it_is_ended_while_it_copies(number: int, site: Path) -> None:
    put(site, {str(n): "x" for n in range(5000)})
    command = [sys.executable, "-m", "holdfast", "dir", "edit", str(site), "-c", "sleep 30"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        until(lambda: any(".new-" in name for name in os.listdir(site.parent)))
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert beside(site) == [] and len(os.listdir(site)) == 5000


def test_the_command_does_not_wait_for_itself(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from holdfast.cli import main, progress

    put(site, OLD)
    monkeypatch.setattr(progress, "_PIPE_LOOK", 0.01)
    real = copying.Copier.copy

    def slow(self: copying.Copier, source: str, target: str) -> None:
        # Who would say that it waits has said it, or has been stopped.
        until(lambda: not any("_show" in thread.name for thread in threading.enumerate()))
        real(self, source, target)

    monkeypatch.setattr(copying.Copier, "copy", slow)
    assert main(["dir", "edit", str(site), "--", "true"]) == 0
    assert "waiting" not in capsys.readouterr().err


def test_the_command_names_the_lock_behind_a_link(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start_peer: Callable[..., Any],
) -> None:
    from holdfast.cli import main, progress

    put(site, OLD)
    link = site.parent / "link"
    link.symlink_to(site.name)
    peer = start_peer(site=str(site))
    peer.do("change = holdfast.AtomicDir(site).replace(); new = change.__enter__()")
    monkeypatch.setattr(progress, "_PIPE_LOOK", 0.01)
    assert main(["dir", "edit", "-w", "0.5", str(link), "--", "true"]) == 1
    assert "waiting for site.lock" in capsys.readouterr().err
    peer.do("change.__exit__(None, None, None)")
