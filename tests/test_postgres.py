"""Connections to PostgreSQL: errors without a password, keepalives, poolers, forks, and the server of the tests."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import servers
from support import HERE, PATIENCE, descriptors, is_alive, until

import holdfast
from holdfast import ConnectionFailed, Unsupported, postgres

if TYPE_CHECKING:
    from collections.abc import Iterator


def failure(url: str) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        postgres.connect(url)
    return caught.value


def replaced(url: str, old: str, new: str) -> str:
    assert old in url
    return url.replace(old, new)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[postgres.Session]:
    session = postgres.connect(request.getfixturevalue("postgres"))
    yield session
    session.close()


def test_a_session_runs_statements_outside_a_transaction(session: postgres.Session) -> None:
    assert session.connection.execute("select 1, pg_backend_pid()").fetchone() == (1, session.pid)
    assert session.connection.autocommit
    assert session.is_open
    session.close()
    session.close()
    assert not session.is_open


@pytest.mark.parametrize(
    ("old", "new", "remedy"),
    [
        (servers.PASSWORD, "wrong-secret", "Check the user name and the password."),
        ("/", "", "Check the name of the database"),
        (f"{servers.USER}:", "nobody:", "Check the user name and the password."),
    ],
)
def test_a_refused_connection_names_the_reason_and_the_remedy(
    request: pytest.FixtureRequest, old: str, new: str, remedy: str
) -> None:
    head, slash, database = request.getfixturevalue("postgres").rpartition("/")
    error = failure(replaced(head, old, new) + slash + database if old != "/" else f"{head}/nothing")
    assert str(error).startswith("Cannot connect to postgresql://") and remedy in str(error)


def test_a_server_that_is_away_is_named() -> None:
    port = servers.free_port()
    error = failure(f"postgresql://u:hidden@127.0.0.1:{port}/db")
    assert f"postgresql://u:***@127.0.0.1:{port}/db" in str(error)
    assert "refused" in str(error) and "Check the URL" in str(error)


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = failure(f"postgresql://u:hidden@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2")
    assert "timeout" in str(error)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hid@den@127.0.0.1:1/db",
        "postgresql://u:hid/den@127.0.0.1:1/db",
        "postgresql://u:hid?den@127.0.0.1:1/db",
        "postgresql://u:hid#den@127.0.0.1:1/db",
        "postgresql://u:hid den@127.0.0.1:1/db",
        "postgresql://u:hid%zzden@127.0.0.1:1/db",
        "postgresql://u:hid%40den@127.0.0.1:1/db",
        "postgresql://u:hidden@[127.0.0.1/db",
        "postgresql://u:hidden@127.0.0.1:1/db?nonsense=1",
        "postgresql://127.0.0.1:1/db?user=u&password=hidden",
        "postgresql://127.0.0.1:1/db?sslpassword=hidden",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    error = failure(url)
    assert error.__context__ is None and error.__cause__ is None
    shown = "".join(traceback.format_exception(error)) + postgres.without_password(url)
    assert not any(part in shown.replace(__file__, "") for part in ("hid", "den@", "den%", "hidden"))


@pytest.mark.parametrize(
    "url",
    ["postgresql://h/db", "postgresql://u@h:5432/db", "postgres:///db", "postgresql://h/db?application_name=a@b"],
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert postgres.without_password(url) == url


def test_our_parameters_are_taken_out_of_the_url() -> None:
    assert postgres.split("postgresql://h/d?prefix=a%5Fb&sslmode=off", ["prefix"]) == (
        "postgresql://h/d?sslmode=off",
        {"prefix": "a_b"},
    )
    assert postgres.split("postgresql://h/d?prefix=x", ["prefix"]) == ("postgresql://h/d", {"prefix": "x"})
    assert postgres.split("postgresql://h/d", ["prefix"]) == ("postgresql://h/d", {})


@pytest.mark.parametrize("call", ["postgres.connect", "tasks.TaskQueue"])
def test_a_missing_psycopg_names_the_command(call: str) -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from holdfast import postgres, tasks\n"
        f"try: {call}('postgresql://h/db')\n"
        "except postgres.Unsupported as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'holdfast[postgres]'" in done.stdout


def setting(session: postgres.Session, name: str) -> str:
    (value,) = session.connection.execute("select current_setting(%s)", [name]).fetchone()
    return str(value)


def test_the_statements_of_an_error_about_rights_grant_them(
    postgres_server: servers.Postgres, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres")
    database = url.rsplit("/", 1)[1]
    limited = f"postgresql://o%27Neil:open@127.0.0.1:{postgres_server.port}/{database}?name=a"
    with postgres_server.connect(database, user="postgres") as admin:
        admin.execute("revoke create on schema public from public")
        admin.execute("create role \"o'Neil\" login password 'open'")
        try:
            with pytest.raises(Unsupported, match="may not create or write the table") as caught:
                holdfast.lock(limited).acquire(timeout=PATIENCE)
            admin.execute(str(caught.value).partition("run: ")[2])
            with holdfast.lock(limited, timeout=PATIENCE) as hold:
                assert hold.token
        finally:
            admin.execute('drop owned by "o\'Neil"; drop role "o\'Neil"')


def test_a_refused_connection_is_one_sentence_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionFailed) as caught:
        holdfast.lock(f"postgresql://ci@127.0.0.1:{port}/ops?name=a").try_acquire()
    assert str(caught.value).endswith("Connection refused. Check the URL, and that the server runs and can be reached.")


def test_the_server_notices_a_lost_client(session: postgres.Session) -> None:
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    idle, interval, probes, patience = (int(setting(session, name)) for name in names)
    assert idle + interval * probes <= postgres.MAX_SILENCE
    assert patience <= postgres.MAX_SILENCE * 1000
    with socket.socket(fileno=os.dup(session.fileno())) as client:
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == patience


def test_options_of_the_url_are_obeyed(postgres: str) -> None:
    from holdfast.postgres import connect

    session = connect(f"{postgres}?options=-c%20tcp_keepalives_idle%3D77&application_name=mine")
    try:
        assert setting(session, "tcp_keepalives_idle") == "77"
        assert setting(session, "tcp_keepalives_count") == "3"
        assert setting(session, "application_name") == "mine"
    finally:
        session.close()


def test_the_session_has_our_pid_as_its_name(session: postgres.Session) -> None:
    assert setting(session, "application_name").startswith(f"holdfast {os.getpid()}@")


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_transaction_pooler_is_refused(postgres: str, postgres_server: servers.Postgres, mode: str) -> None:
    from holdfast.postgres import connect

    with servers.PgBouncer(postgres_server, mode) as pooler:
        if mode == "session":
            session = connect(pooler.url(postgres))
            assert session.connection.execute("select pg_backend_pid()").fetchone() == (session.pid,)
            session.close()
        else:
            with pytest.raises(Unsupported, match="pooler in transaction mode") as caught:
                connect(pooler.url(postgres))
            assert servers.PASSWORD not in str(caught.value)


def in_child(code: object) -> int:
    """Fork, call `code` in the child, and return its exit status."""
    assert callable(code)
    if (pid := os.fork()) == 0:
        try:
            code()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_leaves_the_session_of_its_parent_alone(postgres: str) -> None:
    from holdfast.postgres import connect

    sessions = [connect(postgres)]
    fd, target = sessions[0].fileno(), os.readlink(f"/proc/self/fd/{sessions[0].fileno()}")

    def child() -> None:
        assert target not in descriptors().values()
        assert not sessions[0].is_open
        other = os.open("/dev/null", os.O_RDONLY)
        os.dup2(other, fd)  # a file of the child under the number of the socket
        sessions[0].close()
        sessions.clear()
        gc.collect()
        os.fstat(fd)
        mine = connect(postgres)
        assert mine.connection.execute("select 1").fetchone() == (1,)
        mine.close()

    assert in_child(child) == 0
    assert sessions[0].connection.execute("select pg_backend_pid()").fetchone() == (sessions[0].pid,)
    sessions[0].close()


def test_a_child_that_lives_on_does_not_keep_the_session_of_its_parent(postgres: str) -> None:
    """The advisory locks of a killed worker are released, also if a child of it still runs."""
    from holdfast.postgres import connect

    program = (
        "import os, signal, sys; from holdfast import postgres\n"
        "session = postgres.connect(sys.argv[1])\n"
        "child = os.fork()\n"
        "if not child: signal.pause()\n"
        "print(session.pid, child, flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, postgres], stdout=subprocess.PIPE, text=True) as parent:
        backend, child = map(int, parent.stdout.readline().split())
        parent.kill()
    watching = connect(postgres)
    query = "select count(*) from pg_stat_activity where pid = %s"
    try:
        until(lambda: watching.connection.execute(query, [backend]).fetchone() == (0,))
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        watching.close()


def test_a_session_that_was_dropped_is_closed(postgres: str) -> None:
    from holdfast.postgres import connect

    session = connect(postgres)
    backend = session.pid
    del session
    gc.collect()
    watching = connect(postgres)
    query = "select count(*) from pg_stat_activity where pid = %s"
    until(lambda: watching.connection.execute(query, [backend]).fetchone() == (0,))
    watching.close()


def test_only_psycopg_closes_the_socket_when_garbage_is_collected(session: postgres.Session) -> None:
    owner: object = session._socket
    owner.__del__()  # type: ignore[attr-defined]  # in a cycle it may be collected before the session
    assert session.connection.execute("select 1").fetchone() == (1,)


def test_the_end_of_a_session_makes_its_socket_readable(postgres: str) -> None:
    import select

    from holdfast.postgres import connect

    session, other = connect(postgres), connect(postgres)
    other.connection.execute("select pg_terminate_backend(%s)", [session.pid])
    assert select.select([session.fileno()], [], [], PATIENCE)[0]
    session.close()
    other.close()


def test_the_server_of_killed_tests_ends(postgres: str) -> None:
    """The kernel ends it, and the next tests delete its files."""
    program = (
        f"import sys, signal; sys.path.insert(0, {HERE!r}); import servers\n"
        "server = servers.Postgres.start()\n"
        "print(server.process.pid, server.directory, flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as tests:
        pid, directory = tests.stdout.readline().split()
        tests.kill()
    until(lambda: not is_alive(int(pid)))
    servers.delete_left_over("postgres")
    assert not Path(directory).exists()
