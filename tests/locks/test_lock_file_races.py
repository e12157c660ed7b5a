"""`LockFile` among real processes: thousands of rounds in which all begin at once, and signals at bad moments.

The explorer (`test_lock_file_interleavings`) goes through the orders that it can think of; here the kernel and two
cores make them up. Rounds are kept together by shared memory, not by a lock of anybody's.
"""

from __future__ import annotations

import errno
import glob
import mmap
import os
import re
import signal
import threading
import time
import traceback
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from explored import explored
from foreign import TOOLS, UNWRITTEN, victims
from support import (
    NO_PROCESS,
    Raised,
    assert_nothing_left,
    descriptors,
    die_with_parent,
    state_of,
    tickets,
    until,
    until_asleep,
)

from holdfast import CorruptLock, LockFile, LockLost, NotLocked, owner, system
from holdfast.locks import publish, record
from holdfast.locks.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from support import Peer


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
ROUNDS = [400, pytest.param(4000, marks=SLOW)]
LONG_AGO = 1_000_000_000
OURS = "ours"


def of_the_dead() -> bytes:
    """A fresh lock of a process of ours, on this boot, whose liveness byte nobody holds."""
    me = owner.me()
    return record.compose(Record(NO_PROCESS, int(time.time()), "dead", me.host, me.boot, "1:1", "0123456789abcdef", 17))


IN_PLACE: dict[str, Callable[[], bytes | None]] = {
    "absent": lambda: None,
    "dead": of_the_dead,
    "foreign": lambda: b"pid=%d\ntimestamp=%d\n" % (NO_PROCESS, LONG_AGO),
}


class Stay(NamedTuple):
    """What a process did in a round: when it came in and went out (nanoseconds of the monotonic clock, which all share;
    0: it did not get in), whether it was told that it lost the lock, whose locks it removed (at most two), when it
    began to try and had let go, and when it last checked the name of a stale file and had unlinked it."""

    came: int = 0
    went: int = 0
    told: int = 0
    pid: int = 0
    victim: int = 0
    other_victim: int = 0
    began: int = 0
    left: int = 0
    checked: int = 0
    unlinked: int = 0
    member: str = ""


window: dict[str, int] = {}  # when this process last checked the name of a stale file, and when it had unlinked it


def note_window() -> None:
    """Fill `window` from now on, in this process."""
    means, remove = publish.Entry.means, publish.Entry.remove

    def check(entry: publish.Entry, fd: int, st: os.stat_result) -> bool:
        window["checked"] = time.monotonic_ns()
        return means(entry, fd, st)

    def unlink(entry: publish.Entry, name: str) -> bool:
        found = remove(entry, name)
        window.setdefault("unlinked", time.monotonic_ns())
        return found

    publish.Entry.means = check  # type: ignore[method-assign]
    publish.Entry.remove = unlink  # type: ignore[method-assign]


class Arena:
    """Processes that meet in rounds. What each did in a round, it writes into memory that all of them share."""

    _NUMBERS = len(Stay._fields) - 1

    def __init__(self, path: str, members: list[str], content: str, rounds: int) -> None:
        self.path = path
        self.members = members
        self.content = content
        self.rounds = rounds
        self._memory = mmap.mmap(-1, 4096 + 8 * self._NUMBERS * rounds * len(members))
        self._counters = memoryview(self._memory).cast("q")  # 0: the round that may begin; n + 1: the last one n ended
        self._base = 512

    def run(self) -> None:
        children = []
        try:
            for number, member in enumerate(self.members):
                pid = os.fork()
                if pid == 0:
                    self._child(number, member)
                children.append(pid)
            explored(rounds=self.rounds)
            for number in range(1, self.rounds + 1):
                self._prepare()
                self._counters[0] = number
                self._until_all_ended(number, children)
        finally:
            for pid in children:
                if not self._finished(pid):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _finished(self, pid: int) -> bool:
        if self._counters[0] != self.rounds:
            return False
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"a process ended with {status}"
        return True

    def _until_all_ended(self, number: int, children: list[int]) -> None:
        deadline = time.monotonic() + 30
        ended = range(1, len(children) + 1)
        while not all(self._counters[n] >= number for n in ended):
            assert time.monotonic() < deadline, "a round has no end"
            assert all(state_of(pid) not in ("", "Z") for pid in children) or self._counters[0] == self.rounds
            os.sched_yield()

    def _prepare(self) -> None:
        content = IN_PLACE[self.content]()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        if content is not None:
            with open(self.path, "wb") as file:
                file.write(content)

    def _child(self, number: int, member: str) -> None:
        code = 1
        try:
            die_with_parent()
            note_window()
            attempt = self._ours if member == OURS else self._foreign
            for turn in range(1, self.rounds + 1):
                while self._counters[0] < turn:
                    os.sched_yield()
                at = self._base + self._NUMBERS * ((turn - 1) * len(self.members) + number)
                for offset, value in enumerate(attempt(member)[: self._NUMBERS]):
                    self._counters[at + offset] = value
                self._counters[number + 1] = turn
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _stay(self) -> tuple[int, int]:
        came = time.monotonic_ns()
        for _ in range(3):
            os.sched_yield()
        return came, time.monotonic_ns()

    def _ours(self, _: str) -> Stay:
        window.clear()
        hold = LockFile(self.path, durable=False).try_acquire()
        checked, unlinked = window.get("checked", 0), window.get("unlinked", 0)
        if hold is None:
            return Stay(checked=checked, unlinked=unlinked)
        came, went = self._stay()
        told = 0
        try:
            hold.release()
        except LockLost:
            told = 1
        return Stay(came, went, told, left=time.monotonic_ns(), checked=checked, unlinked=unlinked)

    def _foreign(self, member: str) -> Stay:
        victims.clear()
        began = time.monotonic_ns()
        tool = TOOLS[member](self.path)
        came = went = told = 0
        if tool.try_acquire():
            came, went = self._stay()
            told = int(not tool.release())
        robbed = [pid for pid in victims if pid not in (NO_PROCESS, os.getpid())][:2]
        return Stay(came, went, told, os.getpid(), *robbed)._replace(began=began)

    def stays(self) -> list[list[Stay]]:
        """What all did, of each round."""
        many, size = len(self.members), self._NUMBERS
        found = []
        for turn in range(self.rounds):
            at = self._base + size * turn * many
            slots = [self._counters[at + size * n : at + size * (n + 1)] for n in range(many)]
            found.append([Stay(*slot, self.members[n]) for n, slot in enumerate(slots)])
        return found


def overlaps(stays: list[Stay]) -> list[tuple[Stay, Stay]]:
    """Pairs that were in at the same time."""
    inside = [stay for stay in stays if stay.came]
    return [
        (one, other)
        for number, one in enumerate(inside)
        for other in inside[number + 1 :]
        if one.came < other.went and other.came < one.went
    ]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("content", IN_PLACE)
@pytest.mark.parametrize("processes", [2, 4])
def test_of_all_that_try_at_once_there_are_never_two_holders(
    processes: int, content: str, rounds: int, path: str
) -> None:
    met = 0  # rounds in which all but one were refused. On a busy machine the processes run one after the other
    while met <= rounds / 20:
        arena = Arena(path, [OURS] * processes, content, rounds)
        arena.run()
        found = arena.stays()
        together = [pair for stays in found for pair in overlaps(stays)]
        assert not together, f"{len(together)} times two holders in {rounds} rounds"
        inside = [sum(stay.came > 0 for stay in stays) for stays in found]
        assert all(inside), "in some round no process acquired the lock"
        assert not any(stay.told for stays in found for stay in stays)
        met += inside.count(1)
        assert_nothing_left(path)


def excused(pair: tuple[Stay, Stay], stays: list[Stay]) -> bool:
    """Ours was told; or the two are foreign; or another foreign one had removed the foreign one's lock, perhaps before
    it was written, which ours never are; or the foreign one made its lock while one of ours took over the stale file,
    between our last check and our unlink."""
    ours = [stay for stay in pair if stay.member == OURS]
    if not ours or any(stay.told for stay in ours):
        return True
    foreign = [stay for stay in pair if stay.member != OURS]
    robbed = {victim for stay in stays for victim in (stay.victim, stay.other_victim)}
    # semats renames over what is there, which names no victim; but its release looks.
    several = sum(stay.member != OURS for stay in stays) > 1
    return any(
        robbed & {stay.pid, UNWRITTEN}
        or any(stay.began < one.unlinked and one.checked < stay.came for one in stays if one.member == OURS)
        or (stay.told and stay.member == "semats" and (several or _renamed_over_a_release(stay, stays)))
        for stay in foreign
    )


def _renamed_over_a_release(foreign: Stay, stays: list[Stay]) -> bool:
    """It had looked before ours had the lock, and renamed its own over it between our last look at the name and our
    unlink, which removes that one then. No system call removes a name only if it means a certain file."""
    ours = [stay for stay in stays if stay.member == OURS and stay.came and not stay.told]
    return any(foreign.began < stay.left and stay.went < foreign.came for stay in ours)


# To semats a fresh lock is not stale although its process is dead: nothing would happen there.
@pytest.mark.parametrize(("tool", "content"), [pair for pair in product(TOOLS, IN_PLACE) if pair != ("semats", "dead")])
@pytest.mark.parametrize(("foreign", "ours"), [(1, 1), (1, 3), (2, 2)], ids=["1 and 1", "1 and 3", "2 and 2"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_holder_that_a_foreign_tool_displaces_raises_lock_lost(
    rounds: int, foreign: int, ours: int, content: str, tool: str, path: str
) -> None:
    """Foreign processes may take the lock away from ours, which are then told, and from each other."""
    members: set[str] = set()
    while members < {tool, OURS}:
        arena = Arena(path, [tool] * foreign + [OURS] * ours, content, rounds)
        arena.run()
        found = arena.stays()
        untold = [pair for stays in found for pair in overlaps(stays) if not excused(pair, stays)]
        assert not untold, f"{len(untold)} times two holders and nobody was told, in {rounds} rounds: {untold[:3]}"
        members |= {stay.member for stays in found for stay in stays if stay.came}
        if content == "dead":  # the tool may never get it
            break


# Stopped processes.


@pytest.mark.parametrize("stale", ["by hand", "old"])
@pytest.mark.parametrize("where", ["inside", "releasing"])
def test_a_stopped_holder_whose_lock_was_broken_removes_nothing_and_learns_of_it(
    where: str, stale: str, path: str, start_peer: Callable[..., Peer]
) -> None:
    """It stops inside, or in the middle of its release, before it has the right to remove its file."""
    peer = start_peer(path=path)
    peer.do("from test_lock_file_races import stop_before")
    peer.do("hold = holdfast.LockFile(path, durable=False).acquire()")
    if where == "inside":
        peer.stop()
    else:
        peer.do("stop_before('lock_removal')")
        peer.begin("hold.release()")
        until(lambda: state_of(peer.pid) == "T")
    if stale == "by hand":
        loser = LockFile(path).break_()
        assert loser is not None and loser.pid == peer.pid
        successor = LockFile(path, durable=False).acquire(timeout=30)
    else:
        successor = LockFile(path, durable=False, stale="old", stale_after=0).acquire(timeout=30)
    peer.go_on()
    if where == "releasing":
        with pytest.raises(Raised, match="LockLost"):
            peer.answer()
    else:
        assert peer.do("hold.lost") is True
        with pytest.raises(Raised, match="LockLost"):
            peer.do("hold.check()")
        with pytest.raises(Raised, match="LockLost"):
            peer.do("hold.release()")
    successor.check()
    successor.release()
    assert_nothing_left(path)


def stop_before(name: str) -> None:
    """Stop this process the next time it is about to make this system call."""
    real = getattr(system, name)

    def call(*args: Any, **options: Any) -> Any:
        setattr(system, name, real)
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **options)

    setattr(system, name, call)


@pytest.mark.parametrize("way", ["old", "dead"])
def test_a_stopped_remover_keeps_no_caller_beyond_its_timeout(
    way: str, path: str, start_peer: Callable[..., Peer]
) -> None:
    """One that stopped with the right to remove the file is in the way, as a holder is, and no more than that."""
    stopped, waiter = start_peer(path=path), start_peer(path=path)
    stopped.do("from test_lock_file_races import stop_before")
    if way == "old":
        stopped.do("hold = holdfast.LockFile(path, durable=False).acquire()")
        stopped.do("stop_before('unlink')")
        stopped.begin("hold.release()")
    else:
        with open(path, "wb") as file:
            file.write(of_the_dead())
        stopped.do("stop_before('unlink')")
        stopped.begin("holdfast.LockFile(path, durable=False).acquire().release()")
    until(lambda: state_of(stopped.pid) == "T")
    options = "stale='old', stale_after=0, " if way == "old" else ""
    try:
        with pytest.raises(Raised, match=r"Timeout|Busy"):
            waiter.do(f"holdfast.LockFile(path, durable=False, {options}timeout=0.2).acquire()")
    finally:
        stopped.go_on()
        stopped.answer()


# What others see.


def acquire_and_release_until(path: str, seconds: float) -> int:
    lock = LockFile(path, durable=False, tag="a tag")
    until = time.monotonic() + seconds
    times = 0
    while time.monotonic() < until:
        lock.acquire().release()
        times += 1
    return times


@pytest.mark.parametrize("reads", [150_000, pytest.param(1_000_000, marks=SLOW)])
def test_no_reader_sees_an_empty_or_partial_file(reads: int, path: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(path=path)
    peer.do("from test_lock_file_races import acquire_and_release_until")
    peer.begin("acquire_and_release_until(path, 100)")
    whole = re.compile(
        rb"pid=%d\ntimestamp=\d{10}\ntag=a tag\nhost=[^\n]*\nboot=[^\n]+\nstart=\d+:\d+\nowner=[0-9a-f]+\n"
        rb"token=\d{20}\n" % peer.pid
    ).fullmatch
    opened, read, close, seen = os.open, os.read, os.close, set()
    done = misses = 0
    until(lambda: os.path.exists(path))
    while done < reads:
        try:
            fd = opened(path, os.O_RDONLY)
        except FileNotFoundError:
            misses += 1
            continue
        content = read(fd, 4096)
        close(fd)
        done += 1
        assert whole(content), content
        if not done % 100:
            seen.add(record.parse(content).owner)
    peer.kill()
    assert misses > 1000 and len(seen) > 100, "the lock did not come and go"
    LockFile(path).clean()
    assert_nothing_left(path)


# Sudden death.


def die_before_call(number: int, path: str, way: str, thorough: bool) -> int:
    """Start a process that uses the lock and is killed before its `number`th system call."""
    from explorer import system_calls

    pid = os.fork()
    if pid:
        return pid
    left = number

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "private" and name == "open_fd" and args[1] == system.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
            return real(*args, **options)

        return call

    code = 1
    try:
        for name, real in system_calls().items():
            setattr(system, name, counted(name, real))
        LockFile(path, durable=thorough, fence=thorough).acquire().release()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def died(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or status == 0, f"it ended with {status}"
    return os.WIFSIGNALED(status)


def grow_old(path: str) -> None:
    """As if it had all happened long ago."""
    for name in glob.glob(path) + glob.glob(f"{path}.*.tmp"):
        with open(name, "r+b") as file:
            start = file.read().find(b"timestamp=")
            if start >= 0:
                file.seek(start + len(b"timestamp="))
                file.write(b"%d" % LONG_AGO)


@pytest.mark.parametrize("policy", ["proof", "old", "dead-and-old"])
@pytest.mark.parametrize("way", ["nameless", "private"])
@pytest.mark.parametrize("case", ["absent", "stale", "durable with a fence", "queueing"])
def test_sigkill_before_every_system_call(
    case: str, way: str, policy: Any, path: str, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(path=path)
    peer.do("from test_lock_file_races import die_before_call, died")
    calls, killed = 0, True
    while killed:
        calls += 1
        if case == "stale":
            with open(path, "wb") as file:
                file.write(of_the_dead())
        hold = LockFile(path, durable=False).acquire(timeout=10) if case == "queueing" else None
        pid = peer.do(f"die_before_call({calls}, path, {way!r}, {case.startswith('durable')})")
        if hold is not None:
            until(lambda pid=pid: state_of(pid) == "Z" or (state_of(pid) == "S" and tickets(path)))
            hold.release()
        killed = peer.do(f"died({pid})")
        if policy != "proof":
            grow_old(path)
        lock = LockFile(path, durable=False, stale=policy)
        lock.acquire(timeout=10).release()
        lock.clean()
        if case.startswith("durable") and os.path.exists(f"{path}.fence"):
            os.unlink(f"{path}.fence")
        assert_nothing_left(path)
    assert calls > {"absent": 10, "stale": 20, "durable with a fence": 18, "queueing": 25}[case]


# Threads.


def test_a_heartbeat_writes_into_no_other_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside the release, and the number of a closed descriptor may mean another file at once."""
    about_to_write, reopened = threading.Event(), threading.Event()
    hold = LockFile(path, durable=False).acquire()
    pwrite = system.pwrite

    def slow(*args: Any) -> int:
        about_to_write.set()
        reopened.wait(0.3)  # in vain, if the release waits for us
        return pwrite(*args)

    def renew() -> None:
        try:
            hold.renew()
        except (LockLost, NotLocked, OSError):
            pass

    monkeypatch.setattr(system, "pwrite", slow)
    thread = threading.Thread(target=renew)
    thread.start()
    assert about_to_write.wait(30)
    hold.release()
    data = b"precious " * 40
    with open(f"{path}.data", "w+b", buffering=0) as file:
        file.write(data)
        reopened.set()
        thread.join()
        file.seek(0)
        assert file.read() == data


def test_the_error_of_an_acquire_is_that_of_the_system_call_that_failed(path: str) -> None:
    """And no descriptor is closed twice: it may be another thread's by then."""
    with open(f"{path}.fence", "w") as file:
        file.write("not a number")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CorruptLock):
        LockFile(path, durable=True, fence=True).try_acquire()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not os.path.exists(path)


def test_a_waiter_sleeps(path: str, start_peer: Callable[..., Peer]) -> None:
    """A look of a waiter wakes neither the other waiters nor itself. Else one event would have them look for ever."""
    hold = LockFile(path, durable=False).acquire()
    peers = [start_peer(path=path) for _ in range(2)]
    for peer in peers:
        peer.do("look_only_when_told()")
        peer.begin("holdfast.LockFile(path, durable=False, fair=False).acquire().release()")
    for peer in peers:
        until(lambda peer=peer: "anon_inode:inotify" in descriptors(peer.pid).values())
    assert LockFile(path, durable=False).try_acquire() is None  # opens and closes the file: an event
    until_asleep([peer.pid for peer in peers])
    hold.release()
    for peer in peers:
        peer.answer()
