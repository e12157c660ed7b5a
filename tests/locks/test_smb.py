"""Locks on an SMB server: exclusion, hand-over, loss, forks, and errors without a password. Against a real Samba."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import threading
import traceback
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import servers
from faces import Caller
from smbprotocol.open import CreateDisposition, FilePipePrinterAccessMask, ImpersonationLevel
from support import Raised, Waited, auntil, descriptors, in_child, until

import holdfast
from holdfast.errors import (
    Busy,
    ConnectionFailed,
    HoldfastError,
    LockLost,
    NotALockFile,
    NotOwner,
    Timeout,
    UnsafePath,
    Unsupported,
    WouldDeadlock,
)
from holdfast.locks import smb, smb_file, smb_session, smb_watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from support import Peer

_names = count(1)


@pytest.fixture
def samba(samba_server: servers.Samba) -> servers.Samba:
    if not samba_server.is_ready():  # an earlier test has stopped it, and failed
        samba_server.restart()
    return samba_server


@pytest.fixture
def name(samba: servers.Samba) -> str:
    """The name of a lock, in a directory of its own."""
    directory = f"test{next(_names)}"
    (samba.share / directory).mkdir()
    return f"{directory}/.store.lock"


@pytest.fixture
def url(samba: servers.Samba, name: str) -> str:
    return samba.url(f"store/{name}")


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that misses its event waits until the test fails."""
    monkeypatch.setattr(smb, "_LOOK_S", 1000.0)


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Any:
    return lambda function: anyio.run(function, backend=request.param)


def waiters() -> int:
    return sum(len(watch.pipes) for watch in smb_watch._watches.values())


def session_of(url: str) -> smb_session.SmbSession:
    return smb.SmbEngine(url).session(10)


def server_process(samba: servers.Samba, url: str) -> int:
    """The process of the server that serves this process."""
    with socket.socket(fileno=os.dup(session_of(url).connection.transport._sock.fileno())) as ours:
        port = ours.getsockname()[1]
    command = ["smbstatus", "-s", str(samba.directory / "smb.conf"), "-p"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in told.splitlines() if f":{port})" in line)
    return int(line.split()[0])


# Exclusion.


def test_processes_exclude_each_other_and_tokens_grow(
    url: str, samba: servers.Samba, name: str, start_peer: Callable[..., Peer]
) -> None:
    counter = samba.share / name.replace(".store.lock", "counter")
    counter.write_text("0")
    peers = [start_peer(url=url, path=str(counter)) for _ in range(3)]
    for peer in peers:
        peer.begin(
            "tokens = []\n"
            "for _ in range(6):\n"
            "    with holdfast.lock(url, timeout=30) as hold:\n"
            "        number = int(Path(path).read_text())\n"
            "        Path(path).write_text(str(number + 1))\n"
            "        tokens.append([number, hold.token])\n"
        )
    for peer in peers:
        peer.answer()
    found = sorted(entry for peer in peers for entry in peer.do("tokens"))
    assert [number for number, _ in found] == list(range(18))
    tokens = [token for _, token in found]
    assert tokens == sorted(set(tokens))


def test_threads_exclude_each_other(url: str) -> None:
    lock = holdfast.lock(url, timeout=30)
    inside: list[int] = []

    def work() -> None:
        for _ in range(5):
            with lock:
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lock.status().held


def test_a_held_lock_is_busy(url: str) -> None:
    lock = holdfast.lock(url)
    with lock.acquire() as hold:
        assert not hold.lost
        assert lock.try_acquire() is None
        with pytest.raises(Busy, match=f"held by pid {os.getpid()}"):
            lock.acquire(timeout=0)
        with pytest.raises(WouldDeadlock):
            lock.acquire()
    with lock.acquire(timeout=0):
        pass


def test_status_names_the_holder(url: str, start_peer: Callable[..., Peer]) -> None:
    lock = holdfast.lock(url, timeout=1.5)  # within which a server on a busy machine answers
    assert not lock.status().held
    peer = start_peer(url=url)
    peer.do("hold = holdfast.lock(url).acquire()")
    token = peer.do("hold.token")
    status = lock.status()
    (holder,) = status.holders
    assert status.held and holder.pid == peer.pid
    assert holder.since == pytest.approx(token / 1_000_000)
    with pytest.raises(Timeout, match=f"not acquired within 1.5 s: held by pid {peer.pid}"):
        lock.acquire()
    peer.do("hold.release()")
    assert not lock.status().held


def test_a_release_wakes_the_waiter(url: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(url=url)
    peer.do("from holdfast.locks import smb, smb_watch; import threading; smb._LOOK_S = 1000")
    peer.do("lock = holdfast.lock(url, timeout=60); lock.acquire().release()")
    for _ in range(5):
        with holdfast.lock(url).acquire():
            peer.do("thread = threading.Thread(target=lambda: lock.acquire().release()); thread.start()")
            peer.do("until(lambda: smb_watch._watches)")
        peer.do("thread.join()")
    assert peer.do("len(smb_watch._watches)") == 0


@pytest.mark.usefixtures("no_fallback")
def test_a_killed_holder_frees_the_lock(url: str, samba: servers.Samba, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(url=url)
    peer.do("hold = holdfast.lock(url).acquire()")
    lock = holdfast.lock(url, timeout=30)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire()))
    thread.start()
    until(lambda: waiters() == 1)
    peer.kill()
    thread.join()
    found[0].release()
    assert waiters() == 0


@pytest.mark.usefixtures("no_fallback")
def test_waiters_of_other_names_share_the_watch_of_a_directory(url: str) -> None:
    locks = [holdfast.lock(url + suffix, timeout=30) for suffix in ("", "2", "3")]
    holds = [lock.acquire() for lock in locks]
    threads = [threading.Thread(target=lambda lock=lock: lock.acquire().release()) for lock in locks]
    for thread in threads:
        thread.start()
    until(lambda: waiters() == 3)
    assert len(smb_watch._watches) == 1
    for hold in holds:
        hold.release()
    for thread in threads:
        thread.join()
    assert not smb_watch._watches


def test_a_released_lock_leaves_only_the_token(url: str, samba: servers.Samba, name: str) -> None:
    with holdfast.lock(url).acquire() as hold:
        assert (samba.share / name).read_text() == f"{os.getpid()}@{socket.gethostname()}"
    (left,) = (samba.share / name).parent.iterdir()
    assert left.name == ".store.lock.token" and int(left.read_text()) == hold.token


def test_tokens_grow_if_the_clock_is_set_back_or_their_file_is_deleted(
    url: str, samba: servers.Samba, name: str
) -> None:
    lock, file = holdfast.lock(url), samba.share / f"{name}.token"
    ahead = 9_000_000_000_000_000
    file.write_text(f"{ahead}\n")
    with lock as hold:
        assert hold.token == ahead + 1
    file.unlink()
    with lock as first:
        pass
    file.unlink()
    with lock as second:
        assert first.token is not None and second.token is not None and first.token <= second.token < ahead


@pytest.mark.parametrize("content", ["123@elsewhere", ""])
def test_a_lock_left_over_from_a_crash_of_the_server_is_free(
    url: str, samba: servers.Samba, name: str, content: str
) -> None:
    (samba.share / name).write_text(content)
    lock = holdfast.lock(url)
    assert not lock.status().held
    with lock.acquire(timeout=0):
        assert lock.status().holders[0].pid == os.getpid()


def test_only_the_holder_of_the_token_deletes_what_a_crash_left_over(url: str, samba: servers.Samba, name: str) -> None:
    """Samba creates a file first, and enters it as open later. In between it seems to be left over."""
    (samba.share / name).write_text("123@elsewhere")
    session = session_of(url)
    token = session.file(f"{name}.token".replace("/", "\\"))
    session.ask([smb_file.open_lock(token)], 10, token)
    assert holdfast.lock(url).try_acquire() is None
    assert (samba.share / name).read_text() == "123@elsewhere"
    session.close_files(10, token)
    with holdfast.lock(url).acquire(timeout=0):
        assert (samba.share / name).read_text().startswith(f"{os.getpid()}@")


def test_a_waiter_polls_while_no_file_tells_the_holder(url: str, name: str, waits: list[Waited]) -> None:
    """The holder of the token has not created it yet, or the server has closed it first: there will be no event."""
    session = session_of(url)
    token = session.file(f"{name}.token".replace("/", "\\"))
    session.ask([smb_file.open_lock(token)], 10, token)
    waiting = Caller(holdfast.lock(url).acquire, timeout=smb._LOOK_S - 1)
    until(lambda: waits)  # its attempt has failed
    session.close_files(10, token)
    waiting.result().release()


def test_a_file_that_another_program_has_open_alone_is_held(url: str, name: str) -> None:
    session = session_of(url)
    file = session.file(name.replace("/", "\\"))
    alone = file.create(
        ImpersonationLevel.Impersonation,
        FilePipePrinterAccessMask.GENERIC_WRITE,
        0,
        0,
        CreateDisposition.FILE_CREATE,
        0,
        send=False,
    )
    session.ask([alone], 10)
    lock = holdfast.lock(url)
    assert lock.try_acquire() is None
    (holder,) = lock.status().holders
    assert holder.pid is None
    session.close_files(10, file)
    assert not lock.status().held


def test_user_data_is_refused_and_not_changed(url: str, samba: servers.Samba, name: str) -> None:
    (samba.share / name).write_text("user data")
    with pytest.raises(NotALockFile, match="is not a lock"):
        holdfast.lock(url).acquire(timeout=0)
    assert (samba.share / name).read_text() == "user data"


def test_user_data_in_place_of_the_token_is_refused_and_not_changed(url: str, samba: servers.Samba, name: str) -> None:
    (samba.share / f"{name}.token").write_text("user data")
    lock = holdfast.lock(url)
    with pytest.raises(NotALockFile, match="does not hold a number"):
        lock.acquire(timeout=0)
    assert (samba.share / f"{name}.token").read_text() == "user data"
    assert not lock.status().held


def test_names_may_contain_any_character(samba: servers.Samba, name: str) -> None:
    directory = name.partition("/")[0]
    (samba.share / directory / "Größe 1").mkdir()
    with holdfast.lock(samba.url(f"store/{directory}/Gr%C3%B6%C3%9Fe%201/鎖 %23.lock")).acquire():
        assert (samba.share / directory / "Größe 1/鎖 #.lock").exists()


# Loss.


def test_a_lock_is_lost_when_the_server_dies(url: str, samba: servers.Samba) -> None:
    told = threading.Event()
    lock = holdfast.lock(url, on_lost=lambda _: told.set())
    hold, other = lock.acquire(), holdfast.lock(url + "2").acquire()
    samba.kill()
    try:
        assert told.wait(30)
        assert hold.lost
        with pytest.raises(LockLost):
            hold.check()
        for each in (hold, other):
            with pytest.raises(LockLost):
                each.release()
        with pytest.raises(ConnectionFailed, match="refused"):
            lock.acquire(timeout=5)
    finally:
        samba.restart()
    with lock.acquire(timeout=10):
        pass


def test_a_waiter_outlives_its_connection(url: str, samba: servers.Samba, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(url=url)
    peer.do("hold = holdfast.lock(url).acquire()")
    lock = holdfast.lock(url, timeout=30)
    thread = threading.Thread(target=lambda: lock.acquire().release())
    session = session_of(url)
    thread.start()
    until(lambda: waiters() == 1)
    session.close()
    until(lambda: session_of(url) is not session and waiters() == 1)
    peer.do("hold.release()")
    thread.join()
    assert waiters() == 0


def test_a_session_that_is_lost_during_an_attempt_does_not_grant(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, engine = holdfast.lock(url), smb.SmbEngine
    write_token = engine._write_token
    lost: list[Any] = []

    def lose_once(self: smb.SmbEngine, session: smb_session.SmbSession, *rest: Any) -> int:
        token = write_token(self, session, *rest)
        if not lost:
            lost.append(session)
            session.lose()
        return token

    monkeypatch.setattr(engine, "_write_token", lose_once)
    with lock.acquire(timeout=10) as hold:
        assert hold._grant.lease is not lost[0]
        hold.check()


def test_a_file_that_the_administrator_closes_is_lost(url: str, samba: servers.Samba) -> None:
    hold: Any = holdfast.lock(url).acquire()
    lease = hold._grant.lease
    lease.renew_now()
    assert not hold.lost
    command = ["smbcontrol", "-s", str(samba.directory / "smb.conf"), str(server_process(samba, url))]
    subprocess.run([*command, "close-share", "store"], check=True)

    def is_lost() -> bool:
        lease.renew_now()
        return bool(hold.lost)

    until(is_lost)
    with pytest.raises(LockLost):
        hold.release()
    with holdfast.lock(url).acquire(timeout=10):
        pass


def test_a_silent_server_loses_the_lock_at_its_deadline(url: str, samba: servers.Samba) -> None:
    hold: Any = holdfast.lock(url).acquire()
    pid = server_process(samba, url)
    os.kill(pid, signal.SIGSTOP)
    try:
        lease = hold._grant.lease
        lease.deadline = smb_session.clock()
        assert hold.lost  # it asks the server once more
        with pytest.raises(LockLost):
            hold.release()
    finally:
        os.kill(pid, signal.SIGCONT)
    with holdfast.lock(url).acquire(timeout=10):  # the server has closed the file of the lost session
        pass


def test_an_answer_that_comes_too_late_leaves_no_lock_behind(url: str, samba: servers.Samba, name: str) -> None:
    with holdfast.lock(url + "2").acquire():  # which keeps the session open
        pid = server_process(samba, url)
        engine = smb.SmbEngine(url)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ConnectionFailed, match=rf"{name}: no answer in time"):
                engine.attempt(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        with holdfast.lock(url).acquire(timeout=10):
            pass


def test_requests_without_an_answer_do_not_lose_other_locks(url: str, samba: servers.Samba) -> None:
    with holdfast.lock(url + "2").acquire() as hold:
        pid = server_process(samba, url)
        engine = smb.SmbEngine(url)
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(100):  # more than the server allows
                with pytest.raises(ConnectionFailed):
                    engine.attempt(0.001)
        finally:
            os.kill(pid, signal.SIGCONT)
        hold.check()
        with holdfast.lock(url).acquire(timeout=10):
            hold.check()


# Tasks.


def test_a_task_waits_while_others_run(url: str, run: Any) -> None:
    async def main() -> None:
        lock = holdfast.lock(url, timeout=30)
        order: list[str] = []

        async def wait() -> None:
            async with lock:
                order.append("waiter")

        async with anyio.create_task_group() as group, lock:
            assert await lock.atry_acquire() is None
            group.start_soon(wait)
            await auntil(lambda: waiters() == 1)
            order.append("holder")
        assert order == ["holder", "waiter"]

    run(main)


def test_a_cancelled_task_leaves_nothing_behind(url: str, run: Any) -> None:
    async def main() -> None:
        lock = holdfast.lock(url)
        async with lock:
            async with anyio.create_task_group() as group:
                group.start_soon(lock.aacquire, 30)
                await auntil(lambda: waiters() == 1)
                group.cancel_scope.cancel()
            await auntil(lambda: waiters() == 0)
        hold = await lock.aacquire(timeout=0)
        await hold.arelease()

    run(main)


# Forks.


def test_a_forked_child_has_no_connection_and_holds_nothing(url: str, samba: servers.Samba) -> None:
    lock = holdfast.lock(url)
    hold = lock.acquire()

    def sockets() -> list[str]:
        return [target for target in descriptors().values() if target.startswith("socket:")]

    ours = set(sockets()) - set(in_child(sockets))
    assert len(ours) >= 1
    assert in_child(hold.release) == NotOwner.__name__
    assert in_child(lambda: lock.try_acquire() is None)
    hold.check()
    hold.release()

    def acquire() -> bool:
        with lock.acquire(timeout=10) as own:
            return lock.status().holders[0].pid == os.getpid() and not own.lost

    assert in_child(acquire)


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(url: str, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(url=url)
    peer.do("hold = holdfast.lock(url).acquire()")
    child = peer.do("idle_child()")
    try:
        peer.kill()
        with holdfast.lock(url).acquire(timeout=4):  # sooner than the fallback of a waiter
            pass
    finally:
        os.kill(child, signal.SIGKILL)


# Bad input.


@pytest.mark.parametrize(
    ("path", "options", "kind", "text"),
    [
        ("store/x", {"password": "wrong-secret"}, ConnectionFailed, "Check the user name and the password."),
        ("store/x", {"user": "nobody-knows"}, ConnectionFailed, "Check the user name and the password."),
        ("missing/x", {}, ConnectionFailed, "no such share"),
        ("readonly/x", {}, ConnectionFailed, "access is denied"),
        ("store/missing/x", {}, UnsafePath, "directory does not exist"),
        ("store/" + "x" * 300, {}, UnsafePath, "does not accept this name"),
    ],
)
def test_an_error_of_the_server_names_the_reason_and_the_remedy(
    samba: servers.Samba, path: str, options: dict[str, str], kind: type[Exception], text: str
) -> None:
    lock = holdfast.lock(samba.url(path, **options))
    for use in (lock.try_acquire, lock.acquire, lock.status):
        if use == lock.status and kind is UnsafePath and "missing" not in path:
            continue
        with pytest.raises(kind) as caught:
            use()
        assert text in str(caught.value) and "***@127.0.0.1" in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        assert "wrong-secret" not in shown and servers.PASSWORD not in shown


@pytest.mark.parametrize(
    "url",
    [
        "smb://host",
        "smb://host/share",
        "smb://host/share/",
        "smb://host/share/a//b",
        "smb://host/share/../x",
        "smb://host/share/x:stream",
        "smb://host/share/a%5Cb",
        "smb://host/share/x.",
        "smb://host/share/%FF",
        "smb://host/share/x?name=y",
        "smb://host:port/share/x",
        "smb://[::1/share/x",
        "smb:///share/x",
        "smb://user:to/be@hidden@host/share/x",
    ],
)
def test_a_url_without_a_name_is_refused(url: str) -> None:
    with pytest.raises(UnsafePath, match="names no lock") as caught:
        holdfast.lock(url)
    assert "be@" not in str(caught.value)


def test_what_smb_cannot_do_is_refused_with_an_alternative() -> None:
    url = "smb://host/share/x"
    with pytest.raises(Unsupported, match=r"no shared locks.*PostgreSQL, etcd or Redis"):
        holdfast.lock(url, shared=True)
    with pytest.raises(Unsupported, match=r"no semaphores.*PostgreSQL, etcd or Redis"):
        holdfast.semaphore(url, 3)
    with pytest.raises(Unsupported, match="leave ttl out"):
        holdfast.lock(url, ttl=10)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smb_session, "is_installed", False)
    with pytest.raises(Unsupported, match=r"pip install 'holdfast\[smb\]'"):
        holdfast.lock("smb://host/share/x")


def test_a_server_that_is_away_is_named() -> None:
    url = f"smb://u:hidden@127.0.0.1:{servers.free_port()}/share/x"
    for use in (holdfast.lock(url).try_acquire, holdfast.lock(url).status):
        with pytest.raises(ConnectionFailed, match=r"smb://u:\*\*\*@127\.0\.0\.1.*refused.*Check the URL"):
            use()


def test_a_server_that_does_not_answer_is_given_up_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = smb.SmbEngine(f"smb://u:hidden@127.0.0.1:{silent.getsockname()[1]}/share/x")
        with pytest.raises(ConnectionFailed, match=r"no answer in time"):
            engine.attempt(0.2)


def test_a_server_that_does_not_lock_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smb.SmbEngine(url)._share, "is_proven", False)
    monkeypatch.setattr(smb_file, "open_alone", lambda file: smb_file.open_for_reading(file, alone=False))
    with pytest.raises(Unsupported, match="this server does not lock"):
        holdfast.lock(url).try_acquire()


def test_the_password_is_never_shown(url: str, start_peer: Callable[..., Peer]) -> None:
    lock = holdfast.lock(url)
    with lock.acquire() as hold:
        for text in (repr(lock), repr(hold), lock.name, str(lock.status())):
            assert servers.PASSWORD not in text and "***" in text
        with pytest.raises(HoldfastError) as caught:
            lock.acquire(timeout=0)
        assert servers.PASSWORD not in str(caught.value)
        assert pickle.loads(pickle.dumps(lock)).try_acquire() is None
    peer = start_peer(url=url)
    with pytest.raises(Raised, match="Busy"), lock.acquire():
        peer.do("holdfast.lock(url).acquire(timeout=0)")
