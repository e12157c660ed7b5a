"""The commands on locks of real servers: each command on each engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import servers
from support import is_alive, until

import holdfast
from holdfast import cli
from holdfast.owner import password_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers run on Linux")

HOLDFAST = [sys.executable, "-W", "error", "-m", "holdfast"]
PATIENCE = 60
ENGINES = ("redis", "postgresql", "etcd", "smb")
# For tests of what does not depend on the engine.
SOME = [*ENGINES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES[2:])]
# What is started in the background writes its pid and waits until its standard input is closed.
STAYS = ["sh", "-c", "echo $$ $HOLDFAST_TOKEN; read line"]


class Place:
    """A server, and how it ends the session of a holder.

    SMB has no shared locks and semaphores, and does not tell who waits or which locks there are.
    """

    def __init__(self, kind: str, url: str, name: str, loses: Callable[[], object]) -> None:
        self.kind, self.server, self.url, self.loses = kind, url, f"{url}{name}", loses

    def has_waiter(self) -> bool:
        if self.kind == "smb":
            return servers.watches(os.getpid()) > 0
        return bool(holdfast.lock(self.url).status().waiters)

    def call(self, *words: object, status: int = 0) -> str:
        """Run a command in this process, check its exit status and that it shows no password. Return its output."""
        text = StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            assert cli.main([self.url if word is URL else str(word) for word in words]) == status, text.getvalue()
        assert servers.PASSWORD not in text.getvalue()
        return text.getvalue()

    def start(self, *words: object, status: int = 0) -> str:
        """The same in a process of its own."""
        command = [*HOLDFAST, *(self.url if word is URL else str(word) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        text = done.stdout + done.stderr
        assert done.returncode == status, done
        assert servers.PASSWORD not in text and "Traceback" not in text
        return text


URL = object()


@pytest.fixture(scope="module")
def etcd_with_password() -> Iterator[servers.Etcd]:
    server = servers.Etcd.start()
    try:
        server.require_password()
        yield server
    finally:
        server.stop()


def revoke_leases(url: str) -> None:
    server = holdfast.lock(f"{url}/deploy")._engine.server
    for lease in server.call("lease/leases", {}, PATIENCE).get("leases", ()):
        server.call("lease/revoke", lease, PATIENCE)


_directories = count(1)


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "smb":
        samba: servers.Samba = request.getfixturevalue("samba_server")
        directory = f"cli{next(_directories)}"
        (samba.share / directory).mkdir()
        yield Place("smb", samba.url(f"store/{directory}"), "/deploy", lambda: samba.close_share("store"))
        assert {file.name for file in (samba.share / directory).iterdir()} <= {"deploy", "deploy.token"}
        return
    if request.param == "etcd":
        url = request.getfixturevalue("etcd_with_password").url("", servers.LOGIN).rstrip("/")
        revoke_leases(url)
        yield Place("etcd", url, "/deploy", lambda: revoke_leases(url))
        return
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
            loses = lambda: client.delete("holdfast:{deploy}:holders")  # noqa: E731
            yield Place("redis", server.url("").rstrip("/"), "/deploy", loses)
        return
    url = request.getfixturevalue("postgres")

    def terminate() -> None:
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'")

    yield Place("postgresql", url, "?name=deploy", terminate)


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, program: list[str] = HOLDFAST) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen([*program, *map(str, words)], text=True, **pipes))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> list[int]:
    """The pid of the command and its token, when it runs."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_run_excludes_and_has_the_exit_status_of_the_command(place: Place, begin: Any) -> None:
    holder = begin("run", place.url, "--", *STAYS)
    pid, token = said(holder)
    assert place.start("run", "-n", URL, "--", "true", status=75).startswith(f"holdfast run: {place.kind}://")
    assert "not free within 2 s" in place.start("run", "-w", 2, URL, "--", "true", status=75)
    os.kill(holder.pid, signal.SIGTERM)  # is passed on to the command
    assert holder.wait(PATIENCE) == 128 + signal.SIGTERM and not is_alive(pid)
    assert int(place.start("run", URL, "-c", "echo $HOLDFAST_TOKEN; exit 7", status=7)) > token
    place.start("run", URL, "--", "/nonexistent", status=127)


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_a_waiter_gets_the_lock_when_the_holder_releases_it(place: Place, begin: Any) -> None:
    holder = begin("run", place.url, "--", *STAYS)
    _, first = said(holder)
    waiter = begin("run", place.url, "--", *STAYS)
    until(place.has_waiter)
    holder.communicate("\n", timeout=PATIENCE)
    assert said(waiter)[1] > first


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_shared_locks_and_semaphores(place: Place, begin: Any) -> None:
    if place.kind == "smb":
        for option, what in ((["-s"], "no shared locks"), (["-j", 2], "no semaphores")):
            text = place.start("run", *option, URL, "--", "true", status=66)
            assert what in text and text.count("\n") == 1
        return
    said(begin("run", "-s", place.url, "--", *STAYS))
    place.start("run", "-n", "-s", URL, "--", "true")
    place.start("run", "-n", URL, "--", "true", status=75)
    assert "shared" in place.call("ls", URL)
    semaphore = f"{place.url}-sem"
    said(begin("run", "-j", 2, semaphore, "--", *STAYS))
    assert "semaphore of 2, 1 taken" in place.call("status", semaphore)
    said(begin("run", "-j", 2, semaphore, "--", *STAYS))
    place.start("run", "-n", "-j", 2, semaphore, "--", "true", status=75)
    assert f"{place.kind}, 2 of 2" in place.call("ls", semaphore)


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_a_lost_lock_ends_the_command(place: Place, begin: Any) -> None:
    """SIGTERM comes with the notice of the loss, not with the next look of the supervisor."""
    by_events = "import sys; from holdfast.cli import main, supervise; supervise._LOOK = 3600.0; sys.exit(main())"
    ttl = ["--ttl", "1"] if place.kind in ("redis", "etcd") else []
    program = [sys.executable, "-W", "error", "-c", by_events]
    holder = begin("run", *ttl, place.url, "--", *STAYS, program=program)
    pid, _ = said(holder)
    place.loses()
    assert holder.wait(PATIENCE) == 76
    assert not is_alive(pid)


@pytest.mark.parametrize("place", SOME, indirect=True)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_the_kernel_kills_the_command_of_a_wrapper_that_was_killed(place: Place, begin: Any) -> None:
    holder = begin("run", place.url, "--", *STAYS)
    pid, _ = said(holder)
    holder.kill()
    until(lambda: not is_alive(pid))


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_a_waiter_that_is_ended_by_a_signal_leaves_the_queue(place: Place, begin: Any) -> None:
    said(begin("run", place.url, "--", *STAYS))
    waiter = begin("run", place.url, "--", "true")
    until(place.has_waiter)
    waiter.terminate()
    assert waiter.wait(PATIENCE) == 128 + signal.SIGTERM
    until(lambda: not place.has_waiter())


def test_status_ls_and_top_name_the_holder(place: Place, begin: Any, tmp_path: Path) -> None:
    assert "FREE" in place.call("status", URL)
    holder = begin("run", place.url, "--", *STAYS)
    said(holder)
    local = tmp_path / "local.lock"
    with holdfast.Lock(local):
        assert f"PID: {holder.pid}" in place.call("status", URL, status=1)
        found = json.loads(place.call("status", "--json", URL, status=1))
        assert found["locked"] and found["pid"] == holder.pid and found["kind"] == place.kind
        for words in (["ls", "--json"], ["ls", "--held", "--json"], ["top", "--json"]):
            both = json.loads(place.call(*words, URL if place.kind == "smb" else place.server, tmp_path))
            assert [lock["path"] for lock in both] == [found["path"], str(local)]
            assert all(lock["state"] == "held" for lock in both)
    assert ":***@" in found["path"] and found["path"].endswith("deploy")


def test_wait_until_free(place: Place, begin: Any) -> None:
    holder = begin("run", place.url, "--", *STAYS)
    said(holder)
    place.call("wait", URL, "--timeout", 0.1, status=1)
    if place.kind != "smb":
        place.call("wait", "--all", place.server, "--timeout", 0, status=1)
    waits = begin("wait", "--json", place.url)
    holder.communicate("\n", timeout=PATIENCE)
    assert json.loads(waits.communicate(timeout=PATIENCE)[0])["free"] and waits.returncode == 0
    if place.kind != "smb":
        assert "All locks are free" in place.call("wait", "--all", place.server)


def test_doctor_tests_the_server_and_leaves_nothing(place: Place) -> None:
    found = json.loads(place.start("doctor", "--json", place.server))
    missing = [what for what, check in found["checks"].items() if not check["good"]]
    assert found["safe"] and missing == (["shared locks", "semaphores"] if place.kind == "smb" else []), found
    assert len(found["checks"]) == 7
    text = place.call("doctor", place.server)
    assert "Locks on this server work." in text
    assert ("may lose a lock" in text) == (place.kind == "redis")
    if place.kind != "smb":  # the fixture looks into its directory
        assert json.loads(place.call("ls", "--json", place.server)) == []


@pytest.mark.parametrize("place", SOME, indirect=True)
def test_commands_that_need_a_path_give_a_reason(place: Place) -> None:
    for command in ("break", "clean", "lockfile try", "lockfile acquire", "sema release"):
        text = place.call(*command.split(), URL, status=3)
        assert text.count("\n") == 1 and text.startswith(f"holdfast {command.split()[0]}: {place.kind}://")
    for option in (["--keep"], ["--lock-file"], ["--tag", "x"], ["--stale", "5m"], ["--no-fair"]):
        text = place.call("run", *option, URL, "--", "true", status=64)
        assert text.startswith(f"holdfast run: {option[0]} does not go with a URL: ")
    place.call("status", "--kind", "lock", URL, status=2)


def test_what_is_wrong_is_said_in_one_line(place: Place) -> None:
    wrong = place.url.replace(servers.PASSWORD, "wrong-secret")
    away = place.url.replace(place.url.rpartition("@")[2].partition("/")[0], f"127.0.0.1:{servers.free_port()}")
    nameless = place.server.rpartition("/")[0] if place.kind == "smb" else place.server
    nowhere = place.url.replace("127.0.0.1", "[::1")
    for url, misuse in ((wrong, False), (away, False), (nameless, True)):
        for words in (["run", url, "--", "true"], ["status", url], ["wait", url]):
            status = (64 if misuse else 66) if words[0] == "run" else 2 if misuse else 3
            run = place.start if words[0] == "run" and not misuse else place.call
            text = run(*words, status=status)
            assert text.count("\n") == 1 and "wrong-secret" not in text
    for command in ("ls", "top", "doctor"):
        assert place.call(command, wrong, status=3).count("\n") == 1
        text = place.call(command, nowhere, status=3 if command == "ls" or place.kind == "postgresql" else 2)
        assert text.count("\n") == 1 and ("Check" in text or "Write" in text)


def test_a_scheme_without_an_engine_and_an_extra_that_is_missing() -> None:
    place = Place("", "", "", lambda: None)
    assert "no engine has this scheme" in place.start("run", "nosuch://host/name", "--", "true", status=66)
    place.call("status", "nosuch://host/name", status=3)
    without = "import sys; sys.modules['redis'] = None; from holdfast.cli import main; sys.exit(main())"
    for words, status in ((["run", "redis://h/0/x", "--", "true"], 66), (["ls", "redis://h/0"], 3)):
        command = [sys.executable, "-W", "error", "-c", without, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == status and done.stderr.count("\n") == 1, done
        assert "pip install 'holdfast[redis]'" in done.stderr
    assert "--ttl is for locks on servers" in place.start("run", "--ttl", 5, "x.lock", "--", "true", status=64)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the arguments in the memory of the process")
def test_ps_does_not_show_the_password(place: Place, begin: Any) -> None:
    holder = begin("run", place.url, "--", *STAYS)
    said(holder)
    shown = Path(f"/proc/{holder.pid}/cmdline").read_bytes().split(b"\0")
    expected = place.url.replace(servers.PASSWORD, "*" * len(servers.PASSWORD))
    assert shown[-1 - len(STAYS) - 2] == expected.encode()
    assert shown[-1 - len(STAYS) : -1] == [word.encode() for word in STAYS]


def test_a_password_in_the_query_is_hidden(redis_server: servers.Redis) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/0/query?password={servers.PASSWORD}"
    place = Place("redis", url, "", lambda: None)
    with holdfast.lock(url):
        for words, status in ((["status", "--json"], 1), (["ls"], 0), (["wait", "--json", "--timeout", 0], 1)):
            assert "?password=***" in place.call(*words, URL, status=status)
        assert "?password=***: busy" in place.start("run", "-n", URL, "--", "true", status=75)


@pytest.mark.parametrize(
    ("url", "passwords"),
    [
        ("redis://user:secret@host:6379/0/deploy", ["secret"]),
        ("redis://:se:cr@et@host/0/a@b", ["se:cr@et"]),
        ("redis://user:se/cret@host/0/deploy", ["se/cret"]),
        ("redis://user:se cret\twith@spaces@host/0/deploy", ["se cret\twith@spaces"]),
        ("postgresql://host/db?password=se cret&name=x", ["se cret"]),
        ("a message: redis://user:***@host/0/x y@z", ["***"]),
        ("redis://host:6379/0/me@example.org", []),
        ("postgresql://user@host/db?password=secret&name=x", ["secret"]),
        ("postgresql://user:one@host/db?sslpassword=two", ["one", "two"]),
        ("sh -c 'psql postgresql://a:one@b; redis://c:two@d'", ["one", "two"]),
        ("etcd://a:2379,b:2379/deploy", []),
        ("/var/lock/user:name@host.lock", []),
    ],
)
def test_exactly_the_password_is_found_in_an_argument(url: str, passwords: list[str]) -> None:
    assert [url[first:last] for first, last in password_spans(url)] == passwords
