"""Power failures: every state that a file system may leave when only what was synced is sure.

A commit is recorded: what it did to which directory, and what it synced. Then, for a failure after each step, every
choice is tried of the changes that were not synced yet and may or may not have reached the disk, as ALICE and
CrashMonkey do it. In each state `recover` has to find all of the old version or all of the new one.

The model: an entry of a directory is sure once the directory was synced, the content of a file once the file was;
before, each change of a directory may be there or not, whatever came before or after it (a rename is one change), and a
file may be empty.
"""

from __future__ import annotations

import json
import os
import random
import threading
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_atomic_dir import WAYS, beside, build, content_of, forbid_exchange

from holdfast import AtomicDir, system
from holdfast.atomicdir import cleanup

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD = {"a": "old a", "sub/b": "old b"}
NEW = {"a": "new a", "sub/c": "new c"}

Entries = dict[str, "int | None"]


class Disk:
    """Directories by inode, with what is in them, and the contents of files."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {}
        self.files: dict[int, bytes] = {}

    def scan(self, path: str) -> None:
        entries = self.folders[os.lstat(path).st_ino] = {}
        for entry in os.scandir(path):
            number = entry.stat(follow_symlinks=False).st_ino
            entries[entry.name] = number
            if entry.is_dir(follow_symlinks=False):
                self.scan(entry.path)
            else:
                self.files[number] = Path(entry.path).read_bytes()

    def write(self, number: int, path: Path, empty: set[int]) -> dict[int, int]:
        """Make the tree of a directory real. Returns the new inode number of each directory."""
        path.mkdir()
        inodes = {number: path.stat().st_ino}
        for name, child in self.folders.get(number, {}).items():
            if child in self.folders:
                inodes |= self.write(child, path / name, empty)
            else:
                (path / name).write_bytes(b"" if child in empty else self.files.get(child, b""))
        return inodes

    def state(self, number: int, empty: set[int]) -> Any:
        return {
            name: self.state(child, empty)
            if child in self.folders
            else b""
            if child in empty
            else self.files.get(child)
            for name, child in sorted(self.folders.get(number, {}).items())
        }


class Recorder:
    """Notes what is done to the file system through `os` and `system`."""

    def __init__(self, root: Path) -> None:
        self.root = os.stat(root).st_ino
        # An open file keeps its inode number after it is removed, so that no other file gets it.
        self._open = [open(path, "rb") for path in root.rglob("*") if path.is_file()]  # noqa: SIM115
        self.log: list[tuple[str, int, Entries]] = []  # ("set", directory, entries) or ("sync", inode, {})
        self.disk = Disk()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, after in (
            *((module, "rename", self._renamed) for module in (os, system)),
            *((module, "unlink", self._removed) for module in (os, system)),
            *((module, "rmdir", self._removed) for module in (os, system)),
            *((module, "mkdir", self._made) for module in (os, system)),
            (system, "exchange", self._exchanged),
            (system, "open_fd", self._opened),
            (system, "write", self._wrote),
            (system, "fsync", self._synced),
        ):
            monkeypatch.setattr(module, name, self._noted(getattr(module, name), after))

    def _noted(self, real: Any, after: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            prepared = after(*args, **options)
            next(prepared)
            result = real(*args, **options)
            try:
                prepared.send(result)
            except StopIteration:
                pass
            return result

        return call

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str]:
        folder, name = os.path.split(os.fspath(path))
        if dir_fd is not None:
            folder = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), folder)
        return os.stat(folder or ".").st_ino, name

    def _inode(self, path: Any, dir_fd: int | None = None) -> int | None:
        try:
            return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return None

    def _renamed(
        self, one: Any, other: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> Iterator[None]:
        (folder, old), (target, new) = self._place(one, src_dir_fd), self._place(other, dst_dir_fd)
        number = self._inode(one, src_dir_fd)
        yield
        if folder == target:
            self.log.append(("set", folder, {old: None, new: number}))
        else:
            self.log += [("set", target, {new: number}), ("set", folder, {old: None})]

    def _exchanged(self, one: Any, other: Any, _: Any) -> Iterator[None]:
        (folder, left), (_, right) = self._place(one), self._place(other)
        first, second = self._inode(one), self._inode(other)
        yield
        self.log.append(("set", folder, {left: second, right: first}))

    def _removed(self, path: Any, *, dir_fd: int | None = None) -> Iterator[None]:
        folder, name = self._place(path, dir_fd)
        yield
        self.log.append(("set", folder, {name: None}))

    def _made(self, path: Any, *_: Any, dir_fd: int | None = None) -> Iterator[None]:
        folder, name = self._place(path, dir_fd)
        yield
        number = self._inode(path, dir_fd)
        assert number is not None
        self.disk.folders[number] = {}
        self.log.append(("set", folder, {name: number}))

    def _opened(self, path: Any, flags: int, *_: Any, dir_fd: int | None = None) -> Iterator[None]:
        new = bool(flags & os.O_CREAT) and self._inode(path, dir_fd) is None
        yield
        if new:
            folder, name = self._place(path, dir_fd)
            number = self._inode(path, dir_fd)
            assert number is not None
            self._open.append(open(path, "rb", opener=partial(os.open, dir_fd=dir_fd)))  # noqa: SIM115
            self.disk.files[number] = b""
            self.log.append(("set", folder, {name: number}))

    def _wrote(self, fd: int, data: bytes) -> Iterator[None]:
        yield
        self.disk.files[os.fstat(fd).st_ino] = bytes(data)

    def _synced(self, fd: int) -> Iterator[None]:
        yield
        self.log.append(("sync", os.fstat(fd).st_ino, {}))

    def close(self) -> None:
        for file in self._open:
            file.close()

    def built(self, directory: Path) -> None:
        """What the block of a writer did to the new version, in one go: nothing of it is synced."""
        self.disk.scan(str(directory))
        for number, entries in list(self.disk.folders.items()):
            if entries and number in {os.stat(path).st_ino for path in [directory, *directory.rglob("*")]}:
                self.log += [("set", number, {name: child}) for name, child in entries.items()]
                self.disk.folders[number] = {}


def states(start: Disk, recorder: Recorder, rounds: int) -> Iterator[tuple[int, Disk, set[int]]]:
    """Every disk that a failure after each step may leave: the step, the disk, and the files that are empty on it."""
    chance = random.Random(7)
    log = recorder.log
    for end in range(len(log) + 1):
        past = log[:end]
        synced = {number: position for position, (what, number, _) in enumerate(past) if what == "sync"}
        sure = [(n, e) for position, (what, n, e) in enumerate(past) if what == "set" and synced.get(n, -1) > position]
        open_ = [
            (position, n, e)
            for position, (what, n, e) in enumerate(past)
            if what == "set" and synced.get(n, -1) <= position
        ]
        unsynced = {n for n in recorder.disk.files if n not in start.files and n not in synced}
        numbers = range(len(open_))
        if 2 ** len(open_) <= rounds:
            choices = [set(chosen) for many in range(len(open_) + 1) for chosen in combinations(numbers, many)]
        else:
            choices = [set(range(many)) for many in range(len(open_) + 1)]  # all in order, up to some point
            choices += [{n for n in numbers if chance.random() < 0.5} for _ in range(rounds)]
            choices += [{n for n in numbers if n != left_out} for left_out in numbers]
        for chosen in choices:
            disk = Disk()
            disk.folders = {n: dict(e) for n, e in start.folders.items()} | {
                n: {} for n in recorder.disk.folders if n not in start.folders
            }
            disk.files = {**recorder.disk.files, **start.files}
            # Sure ones and chosen ones in the order in which they were made.
            changes = [(n, e) for n, e in sure] + [(n, e) for k, (_, n, e) in enumerate(open_) if k in chosen]
            for number, entries in changes:
                for name, child in entries.items():
                    if child is None:
                        disk.folders[number].pop(name, None)
                    else:
                        disk.folders[number][name] = child
            for empty in ({n for n in unsynced if chance.random() < 0.5}, unsynced, set[int]()):
                yield end, disk, empty


def keep_inodes(state: Path, inodes: dict[int, int]) -> None:
    """Let the plan in a state file have the inode number that the directory has got."""
    if state.exists() and (text := state.read_bytes()):
        plan = json.loads(text)
        if "inode" in plan:
            state.write_text(json.dumps(plan | {"inode": inodes.get(plan["inode"], plan["inode"])}))


@pytest.mark.parametrize("inodes", ["kept", "other"])
@pytest.mark.parametrize("change", ["replace", "edit", "first", "rollback"])
@pytest.mark.parametrize("way", WAYS)
def test_a_power_failure_leaves_a_whole_version(
    way: str, change: str, inodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`other` inodes: a copy of the disk (cp -a), or a file system that numbers files anew with every mount."""
    room = tmp_path / "room"
    room.mkdir()
    site = room / "site"
    lock = AtomicDir(site, keep=1 if change == "rollback" else 0)
    if change != "first":
        contents = (NEW, OLD) if change == "rollback" else (OLD,)
        for content in contents:
            with lock.replace() as new:
                build(new, content)
    for thread in threading.enumerate():
        if thread.name.startswith("holdfast removes"):
            thread.join()  # else we would record what it does
    if way == "two renames":
        forbid_exchange(monkeypatch.setattr)
    start = Disk()
    start.scan(str(room))
    recorder = Recorder(room)
    recorder.disk.scan(str(room))
    with monkeypatch.context() as patched:
        recorder.patch(patched)
        if change == "rollback":
            lock.rollback()
        else:
            with getattr(lock, "replace" if change == "first" else change)() as new:
                patched.undo()
                if way == "two renames":
                    forbid_exchange(monkeypatch.setattr)
                build(new, NEW)
                recorder.built(new)
                recorder.patch(patched)
    monkeypatch.undo()
    recorder.close()
    new_content = OLD | NEW if change == "edit" else NEW
    assert content_of(site) == new_content
    committed = lock.version
    seen: set[str] = set()
    outcomes = set()
    allowed = (None if change == "first" else OLD, new_content)
    for number, (end, disk, empty) in enumerate(states(start, recorder, 64)):
        key = repr(disk.state(recorder.root, empty))
        if key in seen:
            continue
        seen.add(key)
        left = tmp_path / f"after-{number}"
        made = disk.write(recorder.root, left, empty)
        survivor = left / "site"
        if inodes == "kept":
            keep_inodes(left / "site.versions", made)
        with monkeypatch.context() as again:
            if way == "two renames":
                forbid_exchange(again.setattr)
            AtomicDir(survivor, keep=lock.keep, durable=False).recover()
        found = content_of(survivor) if survivor.exists() else None
        assert found in allowed, f"after step {end} of {len(recorder.log)}: {found}\n{key}\n{recorder.log[:end]}"
        assert [name for name in beside(survivor) if ".old-" not in name] == []
        if end == len(recorder.log):
            assert found == new_content, "what was committed is durable"
            assert AtomicDir(survivor).version == committed
        outcomes.add(found == new_content)
        cleanup.remove(str(left))
    assert outcomes == {True, False}


@pytest.mark.parametrize("way", WAYS)
def test_the_model_finds_a_commit_that_syncs_nothing(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the checks above can fail: they do for a commit that syncs nothing."""
    plain = AtomicDir.__init__

    def careless(self: AtomicDir, *args: Any, **options: Any) -> None:
        plain(self, *args, **(options | {"durable": False}))

    monkeypatch.setattr(AtomicDir, "__init__", careless)
    with pytest.raises((AssertionError, OSError), match=r"after step|not a state file of Holdfast"):
        test_a_power_failure_leaves_a_whole_version(way, "replace", "kept", tmp_path, pytest.MonkeyPatch())
