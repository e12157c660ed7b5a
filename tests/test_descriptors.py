"""Every descriptor has one owner, which closes it once; a forked child has none of its parent's."""

from __future__ import annotations

import ast
import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import descriptors, in_child

import holdfast
from holdfast import files, process, system
from holdfast.events.log.store_lock import StoreLock
from holdfast.files import InheritedFd, OwnedFd

SOURCE = Path(holdfast.__file__).parent
OWNERS = {"files.py", "process.py"}  # and system/, which makes the calls
FORBIDDEN = {("os", "close"), ("os", "closerange"), ("system", "close"), ("os", "register_at_fork")}

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this platform")


def forbidden_names(source: str) -> list[str]:
    """The lines that name one of the functions, also in `from os import close` and `f = os.close`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {(node.value.id, node.attr)}
        elif isinstance(node, ast.ImportFrom):
            names = {((node.module or "").rpartition(".")[2], name.name) for name in node.names}
        else:
            continue
        found += [f"line {node.lineno}: {module}.{name}" for module, name in names & FORBIDDEN]
    return found


def test_only_owners_close_descriptors_and_there_is_one_fork_hook() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in OWNERS or name.startswith("system/"):
            continue
        if lines := forbidden_names(path.read_text()):
            found[name] = lines
    assert not found, "use files.OwnedFd, or process.after_fork_in_child"
    hooks = [line for line in forbidden_names((SOURCE / "process.py").read_text()) if "fork" in line]
    assert len(hooks) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.close(3)",
        "from os import close\nclose(3)",
        "from . import system\ntry: pass\nfinally: system.close(fd)",
        "from ..system import close",
        "import os\nshut = os.close",
        "os.register_at_fork(after_in_child=print)",
        "os.closerange(3, 10)",
    ],
)
def test_the_scan_finds_what_it_looks_for(source: str) -> None:
    assert len(forbidden_names(source)) == 1


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def open_as(path: str, number: int) -> None:
    """Open a file under this number."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    if fd != number:
        os.dup2(fd, number)
        os.close(fd)


def test_exactly_one_of_two_threads_closes_a_descriptor(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT))
    number = file.fd
    real, closed = system.close, []
    in_close, go_on = threading.Event(), threading.Event()

    def close(fd: int) -> None:
        closed.append(fd)
        in_close.set()
        assert go_on.wait(30)
        real(fd)

    monkeypatch.setattr(system, "close", close)
    first = threading.Thread(target=file.close)
    first.start()
    assert in_close.wait(30)
    file.close()  # while the first thread is in the middle of it
    go_on.set()
    first.join()
    file.close()
    assert closed == [number] and not is_open(number) and not file.is_open and file.fd == -1


def test_many_threads_close_each_descriptor_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed = system.close, []
    monkeypatch.setattr(system, "close", lambda fd: (closed.append(fd), real(fd)))
    owned = [OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT)) for _ in range(200)]
    numbers = sorted(file.fd for file in owned)
    begin = threading.Barrier(4)

    def close_all() -> None:
        begin.wait(30)
        for file in owned:
            file.close()

    threads = [threading.Thread(target=close_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(closed) == numbers


def test_a_descriptor_is_closed_by_its_block_by_collection_and_not_after_it_was_detached(path: str) -> None:
    with OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT)) as file:
        assert is_open(file.fd) and file.is_open
        number = file.fd
    assert not is_open(number) and file.fd == -1
    number = OwnedFd(os.open(path, os.O_RDWR)).fd
    gc.collect()
    assert not is_open(number)
    file = OwnedFd(os.open(path, os.O_RDWR))
    other = OwnedFd(file.detach())
    del file
    gc.collect()
    assert other.is_open and is_open(other.fd)
    other.close()


@needs_fork
@pytest.mark.parametrize("way", ["close", "with", "del", "detach"])
def test_an_owned_descriptor_is_inert_in_a_forked_child(path: str, tmp_path: Path, way: str) -> None:
    """The child opens a file of its own under the same number, which must survive."""
    file = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT))
    box = [file]
    number = file.fd

    def child() -> list[object]:
        nonlocal file
        was_closed = not is_open(number)
        open_as(str(tmp_path / "own"), number)
        seen = [was_closed, file.is_open]
        if way == "close":
            file.close()
        elif way == "with":
            with pytest.raises(KeyError), file:
                raise KeyError
        elif way == "detach":
            assert file.detach() == -1
        box.clear()
        del file
        gc.collect()
        os.write(number, b"mine")
        return [*seen, (tmp_path / "own").read_text()]

    assert in_child(child) == [True, False, "mine"]
    assert file.is_open
    os.write(number, b"still here")
    file.close()
    assert not is_open(number)


@needs_fork
def test_a_child_forked_in_the_middle_of_a_block_unwinds_it_without_harm(path: str, tmp_path: Path) -> None:
    def child() -> str:
        os.write(number, b"mine")
        return (tmp_path / "own").read_text()

    with OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT)) as file:
        number = file.fd
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            open_as(str(tmp_path / "own"), number)
    if pid == 0:  # behind the block
        try:
            os.write(writer, child().encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"mine"
    os.close(reader)


@needs_fork
def test_an_inherited_descriptor_is_of_use_in_a_forked_child_and_closed_separately(path: str) -> None:
    Path(path).write_text("content")
    file = InheritedFd(os.open(path, os.O_RDONLY))

    def child() -> list[object]:
        seen = [os.pread(file.fd, 100, 0).decode(), file.is_open]
        file.close()
        file.close()
        return [*seen, file.is_open, is_open(file.fd)]

    assert in_child(child) == ["content", True, False, False]
    assert file.is_open and os.pread(file.fd, 100, 0) == b"content"
    file.close()
    assert not is_open(file.fd)
    assert in_child(lambda: is_open(file.fd)) is False


@needs_fork
def test_a_child_keeps_its_end_of_a_pipe_and_closes_the_other() -> None:
    reader, writer = files.pipe(writer=InheritedFd)

    def child() -> bool:
        os.write(writer.fd, b"x")
        return is_open(reader.fd)

    with reader:
        with writer:
            assert in_child(child) is False
        assert os.read(reader.fd, 10) == b"x"
        assert os.read(reader.fd, 10) == b"", "nobody has the writer any more"


GARBAGE_IN_THE_HOOK = """
import gc, os, sys
import holdfast
from holdfast.files import OwnedFd

class Node:
    pass

holds = [holdfast.Lock(f"{sys.argv[1]}/{number}").acquire() for number in range(40)]
kept = 0
for allocated in range(0, 700, 5):
    gc.collect()
    node = Node()
    node.itself, node.file = node, OwnedFd(os.open(os.devnull, os.O_RDONLY))
    del node
    ballast = [[] for _ in range(allocated)]
    pid = os.fork()
    if pid == 0:
        numbers = [hold._grant.fd for hold in holds]
        os._exit(any(os.path.exists(f"/proc/self/fd/{number}") for number in numbers))
    kept += os.waitpid(pid, 0)[1] != 0
    del ballast
print(kept)
"""


@needs_fork
def test_garbage_that_is_collected_in_the_fork_hook_keeps_no_descriptor_open(tmp_path: Path) -> None:
    """In a program of its own, where a collection does come in the middle of the hook."""
    command = [sys.executable, "-c", GARBAGE_IN_THE_HOOK, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


@needs_fork
def test_a_descriptor_that_was_handed_over_by_an_inherited_one_is_closed_in_a_forked_child() -> None:
    reader, writer = files.pipe(writer=InheritedFd)
    with reader, OwnedFd(writer.detach()) as mine:
        assert in_child(lambda: is_open(mine.fd)) is False


def test_a_hold_and_its_store_lock_in_one_cycle_are_closed(path: str) -> None:
    gc.collect()  # garbage of other tests
    lock = StoreLock(path, timeout=None, mode=0o644)
    cycle: list[object] = [lock, lock.acquire()]
    cycle.append(cycle)
    del cycle, lock
    assert path in descriptors().values()
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert not [name for name in descriptors().values() if name.startswith(os.path.dirname(path))]


@pytest.mark.parametrize("kind", [holdfast.Lock, holdfast.LockFile])
def test_an_interrupt_while_a_dropped_hold_is_released_leaves_no_lock(
    path: str, kind: type[holdfast.Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = kind(path).acquire()
    grant = type(hold._grant)
    real, calls = grant.release, iter([True])

    def interrupted(self: object) -> bool:
        if next(calls, False):
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(grant, "release", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    del hold
    gc.collect()
    with kind(path, timeout=0):
        pass


EARLY_HOOK = """
import os, sys

early = []

def take():
    # The hook of another module, which runs before ours.
    early.append(Lock(sys.argv[1]).acquire(timeout=10))

os.register_at_fork(after_in_child=take)

from holdfast import Lock, process
from support import descriptors

resets = []
process.after_fork_in_child(lambda: resets.append(os.getpid()))
parents = Lock(sys.argv[2]).acquire()
told, tell = os.pipe()
go_on, let_go = os.pipe()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        os.close(let_go)
        [hold] = early
        assert resets == [os.getpid()], resets
        hold.check()
        assert not hold.released and not hold.lost
        assert parents.released
        assert sys.argv[2] not in descriptors().values()
        os.write(tell, b"1")
        os.read(go_on, 1)
        hold.release()
        os.write(tell, b"2")
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
os.close(tell)
os.close(go_on)
assert os.read(told, 1) == b"1"
assert Lock(sys.argv[1]).try_acquire() is None
os.close(let_go)
assert os.read(told, 1) == b"2"
Lock(sys.argv[1]).acquire(timeout=10).release()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert resets == []
parents.check()
parents.release()
"""


@needs_fork
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_a_lock_that_an_earlier_fork_hook_took_is_kept(path: str) -> None:
    command = [sys.executable, "-W", "error", "-c", EARLY_HOOK, path, path + ".parent"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@needs_fork
def test_functions_for_forked_children_run_once_in_each_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process, "_in_child", [*process._in_child])
    for name in "abc":
        process.after_fork_in_child(lambda name=name: calls.append(name))
    assert in_child(lambda: [*calls, in_child(lambda: calls)]) == ["a", "b", "c", ["a", "b", "c", "a", "b", "c"]]
    assert calls == []


# Whole files.


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_a_file_is_read_as_a_whole(path: str, size: int) -> None:
    files.create_file(path, b"x" * size, 0o600)
    assert files.read_all(path) == b"x" * size


def test_a_file_is_created_once_and_published_once(path: str) -> None:
    files.create_file(path, b"first", 0o600, sync=True)
    for write in (files.create_file, files.publish_file):
        with pytest.raises(FileExistsError):
            write(path, b"second", 0o600)
    assert files.read_all(path) == b"first" and os.listdir(os.path.dirname(path)) == ["x.lock"]
    files.replace_file(path, b"third", 0o600, sync=True)
    assert files.read_all(path) == b"third" and os.listdir(os.path.dirname(path)) == ["x.lock"]
    files.remove(path)
    files.remove(path)
    files.publish_file(path, b"fourth", 0o600)
    assert files.read_all(path) == b"fourth" and os.listdir(os.path.dirname(path)) == ["x.lock"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "link"])
def test_a_file_that_could_not_be_written_leaves_nothing(path: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files.create_file(path, b"old", 0o600)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(system, call, full)
    write, target = (files.publish_file, path + ".new") if call == "link" else (files.replace_file, path)
    with pytest.raises(OSError, match="No space"):
        write(target, b"new", 0o600, sync=True)
    assert files.read_all(path) == b"old" and os.listdir(os.path.dirname(path)) == ["x.lock"]


def test_short_writes_are_continued(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_pwrite = system.write, system.pwrite
    monkeypatch.setattr(system, "write", lambda fd, text: real_write(fd, text[:3]))
    monkeypatch.setattr(system, "pwrite", lambda fd, text, at: real_pwrite(fd, text[:3], at))
    files.create_file(path, b"0123456789", 0o600)
    with OwnedFd(system.open_fd(path, system.O_EXISTING)) as file:
        files.write_at(file.fd, b"abcdefgh", 2)
    assert files.read_all(path) == b"01abcdefgh"
