"""What use has found: each of these went wrong once, with lock files of ours beside other users, tools and kinds."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from support import in_child

from holdfast import LockFile

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDS_ROOT = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can be several users")
STRANGER, USER = 12345, 23456  # user ids
LONG_AGO = 1_000_000_000


def as_user(uid: int, work: Any) -> Any:
    """The value of `work()` in a process of another user, or the name of the error that it raised."""

    def change_and_work() -> Any:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return work()

    return in_child(change_and_work)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Where several users can be; the path that pytest makes is closed to others."""
    with TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


# Directories that others can write to.


@NEEDS_ROOT
@pytest.mark.parametrize("content", [b"", b"my thesis\n"], ids=["empty", "text"])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_a_symlink_of_another_user_in_a_sticky_directory_is_not_followed(
    chain: bool, durable: bool, content: bytes, shared_directory: Path, tmp_path: Path
) -> None:
    os.chmod(shared_directory, 0o1777)
    target = tmp_path / "thesis.txt"
    target.write_bytes(content)
    os.utime(target, (LONG_AGO, LONG_AGO))
    path = shared_directory / "x.lock"
    path.symlink_to(target)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    if chain:
        (shared_directory / "first").symlink_to(path)
        path = shared_directory / "first"
    lock = LockFile(path, durable=durable)
    for call in (lock.try_acquire, lambda: lock.acquire(timeout=0), lock.clean, lock.break_, lock.status):
        with pytest.raises(ValueError, match=f"user {STRANGER}"):
            call()
    assert target.read_bytes() == content and os.listdir(tmp_path) == ["thesis.txt"]


@NEEDS_ROOT
@pytest.mark.parametrize(("mode", "maker"), [(0o1777, 0), (0o777, 0), (0o755, STRANGER), (0o1777, USER)])
def test_a_symlink_that_is_trusted_is_followed(mode: int, maker: int, shared_directory: Path, tmp_path: Path) -> None:
    os.chown(shared_directory, USER, USER)  # the owner of the directory
    path = shared_directory / "x.lock"
    path.symlink_to(tmp_path / "target")
    os.chown(path, maker, maker, follow_symlinks=False)
    os.chmod(shared_directory, mode)
    with LockFile(path, durable=False):
        assert os.listdir(tmp_path) == ["target"]
