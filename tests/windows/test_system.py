"""The system calls of Windows: where they differ from POSIX, `system.windows` makes up for it."""

from __future__ import annotations

import errno
import os
import stat
import time

import pytest
from peers import ALL, close_handle, lock_whole_file, open_sharing

from holdfast import system
from holdfast.system import windows

SLOTS = 1 << 20


@pytest.fixture
def two(path):
    """Two descriptors of one file."""
    fds = [windows.open_fd(path, windows.O_LOCK) for _ in range(2)]
    yield fds
    for fd in fds:
        windows.close(fd)
    assert not windows._locked


def is_busy(fd, op=windows.EX_NB):
    try:
        windows.lock(fd, op)
    except BlockingIOError:
        return True
    windows.lock(fd, windows.UN)
    return False


def test_both_ways_to_look_at_a_file_see_the_same_one(path, two):
    named, opened = windows.stat(path), windows.fstat(two[0])
    assert (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
    assert opened.st_ino != 0


def test_touching_sets_the_modification_time(path, two):
    os.utime(path, (1, 1))
    assert windows.fstat(two[0]).st_mtime == 1
    windows.touch(two[0])
    assert abs(windows.fstat(two[0]).st_mtime - time.time()) < 60


def test_children_do_not_inherit_the_descriptor(two):
    assert not os.get_inheritable(two[0])


def test_locking_twice_is_locking_once(two, monkeypatch):
    mine, other = two
    windows.lock(mine, windows.EX_NB)
    with monkeypatch.context() as context:
        context.setattr(windows, "_unlock_file", None)  # no other process can lock the file in between
        windows.lock(mine, windows.EX_NB)
        windows.lock(mine, windows.EX)
    assert is_busy(other)
    windows.lock(mine, windows.UN)
    windows.lock(mine, windows.UN)
    assert not is_busy(other)


def test_a_lock_can_be_made_shared_and_exclusive_again(two):
    mine, other = two
    windows.lock(mine, windows.EX_NB)
    windows.lock(mine, windows.SH_NB)
    assert not is_busy(other, windows.SH_NB) and is_busy(other)
    windows.lock(mine, windows.EX_NB)
    assert is_busy(other, windows.SH_NB)
    windows.lock(mine, windows.UN)
    windows.lock(other, windows.SH_NB)
    with pytest.raises(BlockingIOError):
        windows.lock(mine, windows.EX_NB)


def test_closing_forgets_what_the_number_of_the_descriptor_had(path):
    fd = windows.open_fd(path, windows.O_LOCK)
    windows.lock(fd, windows.EX_NB)
    windows.close(fd)
    again, other = windows.open_fd(path, windows.O_LOCK), windows.open_fd(path, windows.O_LOCK)
    assert again == fd
    windows.lock(again, windows.EX_NB)
    assert is_busy(other)
    windows.close(again)
    windows.close(other)


def test_an_unlock_of_all_bytes_unlocks_a_slot(two):
    mine, other = two
    assert system.try_slot(mine, 3)
    assert not system.try_slot(other, 3)
    assert windows.slots_taken(other)
    system.unlock_slots(mine)
    system.unlock_slots(mine)
    assert not windows.slots_taken(other)
    assert system.try_slot(other, 3)


def test_several_processes_can_mark_a_removal_and_each_process_sees_it(path, two):
    third = windows.open_fd(path, windows.O_READ)
    assert not windows.removal_marked(third)
    for fd in two:
        windows.mark_removal(fd)
    assert windows.removal_marked(third)
    system.unmark_removal(two[0])
    assert windows.removal_marked(third)
    system.unmark_removal(two[1])
    assert not windows.removal_marked(third)
    windows.close(third)


def test_looking_for_a_mark_leaves_no_lock(two):
    mine, other = two
    assert not windows.removal_marked(mine)
    assert not windows.removal_marked(other)
    windows.mark_removal(mine)


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_another_programs_whole_file_lock_is_no_removal(path, two, shared):
    handle = open_sharing(path, ALL)
    lock_whole_file(handle, shared=shared)
    assert not windows.removal_marked(two[0])
    if not shared:
        with pytest.raises(BlockingIOError):
            windows.mark_removal(two[0])
    close_handle(handle)


def test_marking_a_removal_waits_for_a_process_that_looks_for_marks(two, monkeypatch):
    mine, other = two
    windows._lock_file(other, windows.EX, windows.REMOVAL_BYTE, 1)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        windows._unlock_file(other, windows.REMOVAL_BYTE, 1)

    monkeypatch.setattr(windows, "sleep", pause)
    windows.mark_removal(mine)
    assert len(pauses) == 1
    assert windows.removal_marked(other)


def test_our_own_mark_does_not_count_as_a_removal_by_another_process(two):
    mine, other = two
    windows.mark_removal(mine)
    assert not windows.removal_marked(mine)
    assert windows.removal_marked(other)


def test_an_open_file_can_be_deleted(path, two):
    windows.unlink(path)
    for fd in two:
        windows.close(fd)
    assert not os.path.exists(path)
    two.clear()


def test_the_name_is_free_at_once_although_the_file_is_open(path, two):
    """By POSIX semantics on NTFS. Wine has none, like older systems: there the file is renamed before its deletion."""
    windows.unlink(path)
    assert not os.path.exists(path)
    windows.close(windows.open_fd(path, windows.O_NEW))
    for fd in two:
        windows.close(fd)
    two.clear()
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_file_that_cannot_be_deleted_keeps_its_name(path):
    windows.close(windows.open_fd(path, windows.O_NEW))
    os.chmod(path, stat.S_IREAD)
    with pytest.raises(PermissionError):
        windows.unlink(path)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    os.chmod(path, stat.S_IREAD | stat.S_IWRITE)


def test_delete_distinguishes_a_missing_file_from_one_that_is_not_shared(path):
    with pytest.raises(FileNotFoundError):
        windows.unlink(path)
    handle = open_sharing(path, ALL & ~4)
    with pytest.raises(PermissionError):
        windows.unlink(path)
    close_handle(handle)


@pytest.fixture
def deletion_pending(monkeypatch):
    """The next `left` opens find the name of a deleted file that another program has open. Wine never reports it."""
    create = windows._kernel32.CreateFileW

    class Pending:
        left = 0

        def create(self, *arguments):
            if not self.left:
                return create(*arguments)
            self.left -= 1
            windows.ctypes.set_last_error(5)
            return windows._INVALID_HANDLE

        def status(self):
            return windows._STATUS_DELETE_PENDING

    pending = Pending()
    monkeypatch.setattr(windows._kernel32, "CreateFileW", pending.create)
    monkeypatch.setattr(windows._ntdll, "RtlGetLastNtStatus", pending.status)
    monkeypatch.setattr(windows, "sleep", lambda _: None)
    return pending


def test_a_name_that_is_being_deleted_is_waited_for(path, deletion_pending):
    deletion_pending.left = 3
    windows.close(windows.open_fd(path, windows.O_LOCK))
    assert deletion_pending.left == 0


def test_a_name_that_stays_deleted_is_busy(path, deletion_pending):
    deletion_pending.left = 1000
    with pytest.raises(BlockingIOError):
        windows.open_fd(path, windows.O_LOCK)
    assert 0 < deletion_pending.left < 1000


def test_a_lock_whose_name_stays_deleted_is_busy(path, deletion_pending):
    from holdfast import Lock

    deletion_pending.left = 100
    assert Lock(path).try_acquire() is None
    deletion_pending.left = 150
    Lock(path).acquire(timeout=60).release()


def test_errors_of_opening_are_those_of_posix(path, tmp_path):
    with pytest.raises(IsADirectoryError):
        windows.open_fd(str(tmp_path), windows.O_LOCK)
    with pytest.raises(FileNotFoundError):
        windows.open_fd(path, windows.O_EXISTING)
    with pytest.raises(FileNotFoundError) as raised:
        windows.open_fd(str(tmp_path / "no" / "x"), windows.O_LOCK)
    assert raised.value.errno == errno.ENOENT and "no" in raised.value.filename


def test_a_descriptor_that_can_only_read_can_lock(path, two):
    fd = windows.open_fd(path, windows.O_READ)
    windows.lock(fd, windows.EX_NB)
    assert is_busy(two[0])
    windows.close(fd)


def test_content_that_another_program_has_locked_is_busy(two, monkeypatch):
    """Locks are mandatory on Windows, though not under wine."""

    def refuse(fd, size):
        raise PermissionError(errno.EACCES, "")

    monkeypatch.setattr(windows.os, "read", refuse)
    with pytest.raises(BlockingIOError):
        windows.read(two[0], 16)


def test_threads_can_read_and_write_one_descriptor_at_different_places(path):
    """POSIX has pread for that. With a seek before each read, one thread reads where another one has seeked to."""
    from threading import Thread

    fd = windows.open_fd(path, windows.O_LOCK)
    places = [index * 16 for index in range(4)]
    wrong = []

    def work(place):
        for number in range(300):
            text = b"%4d%12d" % (place, number)
            windows.pwrite(fd, text, place)
            found = windows.pread(fd, 16, place)
            if found != text:
                wrong.append((place, text, found))

    threads = [Thread(target=work, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert windows.pread(fd, 16, 1000) == b""
    assert len(windows.pread(fd, 1000, 0)) == 64
    windows.close(fd)


def test_each_slot_is_one_lock(two):
    mine, other = two
    assert system.try_slot(mine, 40) and system.try_slot(mine, 5)
    assert not system.try_slot(other, 5) and system.try_slot(other, 6)
    windows.set_range(mine, windows.UN, windows.FIRST_SLOT + 5, 1)
    assert system.try_slot(other, 5)
    assert not system.try_slot(other, 40)


def test_a_link_replaces_nothing(path, tmp_path):
    other = str(tmp_path / "other")
    for name in (path, other):
        with open(name, "w") as file:
            file.write(name)
    with pytest.raises(FileExistsError):
        windows.link(path, other)
    with open(other) as file:
        assert file.read() == other
    windows.link(path, path + "2")
    assert sorted(os.listdir(tmp_path)) == ["other", "x.lock2"]
