"""Connections to PostgreSQL: how they are opened, how their loss is noticed, and what a fork does to them.

    session = postgres.connect("postgresql://user:password@host/database")
    session.connection.execute("select 1")       a psycopg connection, in autocommit mode
    session.close()

    pool = postgres.Pool(url, 4, settings)
    with pool.session() as session: …                the same for an operation: a session that is open already, if any

    alarm = postgres.Alarm(url)
    with alarm() as sockets: …                       one can be read when a statement with `RING` has changed something

`connect` raises `Unsupported` if psycopg is missing or if a pooler gives each transaction another session, and
`ConnectionFailed` for everything else: the server is away, the password is wrong, the database does not exist. No
message and no traceback shows the password.

Loss: the client and the server both probe an idle connection. Each notices within `MAX_SILENCE` seconds that the other
machine or the network between them is gone. The server then ends the session and releases its advisory locks. A URL
that sets these options itself is obeyed.

Fork: a session belongs to the process that opened it. The fork hook closes the child's copy of the socket without the
Terminate message, so the parent's session goes on. In the child `is_open` is False, and `close` does nothing.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections import deque
from contextlib import contextmanager, suppress
from random import uniform
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from . import process, system
from .errors import ConnectionFailed, CorruptStore, Unsupported
from .files import OwnedFd

try:
    import psycopg
except ImportError:
    _missing: Unsupported | None = Unsupported(
        "PostgreSQL needs psycopg, which is not installed. Run: pip install 'holdfast[postgres]'"
    )
else:
    _missing = None

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import TypeVar

    Result = TypeVar("Result")
    Statement = tuple[str, Sequence[Any]]  # and its parameters

CONNECT_TIMEOUT_S = 10
RECONNECT_S = 30.0  # for operations without a timeout
_MAX_PAUSE_S = 0.5
MAX_SILENCE = 11.0  # seconds: the first probe after 5, two more, and a reply that is awaited for 2

_ON_CLIENT = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 11_000}
_ON_SERVER = {name if name[:3] == "tcp" else f"tcp_{name}": value for name, value in _ON_CLIENT.items()}
_ON_SERVER["idle_session_timeout"] = 0  # a worker that runs a long task is idle here
_CERTIFICATES = "Check the certificates (sslrootcert, sslcert and sslkey), and the name of the host in the URL."
_REMEDIES = {
    "password authentication failed": "Check the user name and the password.",
    "pg_hba.conf": "Check the user name, and pg_hba.conf on the server.",
    "does not support SSL": "Set ssl = on on the server, or leave sslmode out.",
    **dict.fromkeys(("certificate", "SSL"), _CERTIFICATES),
    "does not exist": "Check the name of the database and of the user, or create them.",
    "too many": "Close other connections, or raise max_connections on the server.",
    "remaining connection slots": "Close other connections, or raise max_connections on the server.",
    "out of shared memory": "Release locks, or raise max_locks_per_transaction on the server.",
    "Too many open files": "Raise the limit of open files of this process (ulimit -n).",
    "the database system is": "Try again when the server has started.",
    **dict.fromkeys(("during recovery", "read-only transaction"), "Connect to the primary server."),
}
_ALARM = 0x686F6C6466617374  # the key of an advisory lock
# An expression in statements that a console shows the effect of. A program that wants to know holds the lock, so that
# the others learn that from the lock table, in a statement that they run anyway, and notify nobody otherwise.
RING = f"case when not pg_try_advisory_xact_lock_shared({_ALARM}) then pg_notify('holdfast_changes', '') end"
# A password that contains one of @/? must be percent-encoded. If it is not, everything up to the last @ is hidden.
_PASSWORD = r"(?<=://)([^:@/?]*:)(?:[^@/?]*@(?![^/?]*@)|.*@)"
_HOSTS = r"(?:,?(?:\[[^]]*\]|[^][:,@]*)(?::\d*)?)*"
_IN_QUERY = r"([?&][^=&]*password=)[^&]*"


class _Socket(OwnedFd):
    """The socket of a connection. Only the fork hook closes it, in a child: here psycopg does, also when garbage is
    collected, in any order, and libpq when the connection is lost."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        number = process.SharedNumber(fd)
        number.inode = system.fstat(fd).st_ino
        super().__init__(number)

    def __del__(self) -> None:
        try:
            self.detach()
        except (AttributeError, TypeError):  # the interpreter is going down
            pass


class Session:
    """One session on a server. `connection` is its psycopg connection, in autocommit mode. `pid` is the backend's.
    `number` is for the owner of the session."""

    number = 0

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self._socket = _Socket(connection.fileno())
        self.pid = connection.info.backend_pid

    @property
    def is_open(self) -> bool:
        """False after `close`, after the connection was lost, and in a forked child."""
        return self._socket.is_open and not self.connection.closed

    def fileno(self) -> int:
        """The socket. It becomes readable when the server sends a notification or ends the session."""
        return self._socket.fd

    def close(self) -> None:
        if self._socket.detach() != -1:  # not in a forked child. From here on the descriptor belongs to psycopg again
            self.connection.close()

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, TypeError):  # never opened, or the interpreter is going down
            pass


def check_driver() -> None:
    """Raise Unsupported if psycopg is not installed."""
    if _missing:
        raise _missing


def connect(url: str, timeout: float | None = None) -> Session:
    """Open a session. `timeout`: the most seconds that it takes, at least 2; the URL may ask for others."""
    check_driver()
    return explained(url, lambda: _open(url, timeout))


def explained(url: str, work: Callable[[], Result]) -> Result:
    """Call `work`. An error of psycopg, or of the system below it, becomes ConnectionFailed."""
    try:
        return work()
    except (psycopg.Error, OSError, UnicodeError) as error:  # the last: not the name of a host
        failed = failure(url, error)
    raise failed  # here, so that no traceback contains the error of psycopg, which may show the password


def _open(url: str, timeout: float | None) -> Session:
    session = Session(_connect(url, timeout))
    try:
        _begin(session, url)
    except BaseException:
        session.close()
        raise
    return session


def _connect(url: str, timeout: float | None = None) -> psycopg.Connection[Any]:
    authority = re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]
    if not re.fullmatch(_HOSTS, authority[authority.find("@") + 1 :]):
        raise psycopg.ProgrammingError("the URL is not valid")
    given = psycopg.conninfo.conninfo_to_dict(url)
    ours: dict[str, Any] = {name: value for name, value in _ON_CLIENT.items() if name not in given}
    if "connect_timeout" not in given and "PGCONNECT_TIMEOUT" not in os.environ:
        ours["connect_timeout"] = max(2, int(min(CONNECT_TIMEOUT_S, timeout or CONNECT_TIMEOUT_S)))
    ours["fallback_application_name"] = f"holdfast {os.getpid()}@{socket.gethostname()}"[:63]
    process.current_registry()  # in a forked child, the hook runs before the first descriptor is opened
    return _Connection.connect(url, autocommit=True, **ours)


def _begin(session: Session, url: str) -> None:
    """Refuse a transaction pooler, and set what this session needs on the server."""
    connection = session.connection
    (pid,) = connection.execute("select pg_backend_pid()").fetchone() or (0,)
    if pid != session.pid:  # a pooler invents the number that it tells a client
        _refuse_transaction_pooler(session, url)
        session.pid = pid
    options = f"{psycopg.conninfo.conninfo_to_dict(url).get('options', '')} {os.environ.get('PGOPTIONS', '')}"
    settings = {name: str(value) for name, value in _ON_SERVER.items() if name not in options}
    connection.execute(
        # A name that the server does not know (idle_session_timeout before version 14) is passed over.
        "select set_config(name, value, false) from unnest(%s::text[], %s::text[]) as ours (name, value)"
        " join pg_settings using (name)",
        [list(settings), list(settings.values())],
    )


def _refuse_transaction_pooler(session: Session, url: str) -> None:
    """Another client takes the backend that a transaction pooler takes away from this session after each statement."""
    query = "select pg_backend_pid()"
    first = session.connection.execute(query).fetchone()
    with _connect(url) as other, other.transaction():
        others = other.execute(query).fetchone()
        if others == first or session.connection.execute(query).fetchone() != first:
            raise Unsupported(
                f"{without_password(url)} is a connection pooler in transaction mode, where a session does not keep "
                "its locks. Connect to the PostgreSQL server itself, or set pool_mode=session."
            )


def failure(url: str, error: Exception) -> ConnectionFailed:
    """The error to raise when a connection cannot be opened or was lost."""
    lines = (line.strip() for line in str(error).splitlines())  # libpq begins its own advice with a tab
    words = " ".join(line for line in lines if not line.endswith("?")).split()
    text = " ".join(words).rstrip(".") or type(error).__name__
    if isinstance(error, psycopg.ProgrammingError) and (re.search(_PASSWORD, url) or re.search(_IN_QUERY, url)):
        text, remedy = "the URL is not valid", "Write special characters of the password as %40 for @ or %2F for /."
    else:  # libpq does not keep the code of an error that ends the start of a session
        default = "Check the URL, and that the server runs and can be reached."
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in text), default)
    return ConnectionFailed(f"Cannot connect to {without_password(url)}: {text}. {remedy}")


def is_lost(error: psycopg.Error) -> bool:
    """Was the connection lost? Without a code, it is an error of the client. 57P: the server shuts down."""
    return isinstance(error, psycopg.OperationalError) and (error.sqlstate or "57P")[:3] == "57P"


def explain(name: str, error: psycopg.Error, what: str) -> Exception:
    """The error to raise when a statement failed. `name`: of the store. `what`: whose tables these are."""
    text = " ".join(str(error).split())
    if isinstance(error, psycopg.errors.DiskFull):
        return OSError(errno.ENOSPC, f"the disk of the server is full ({text}). What was acknowledged is kept")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        text = error.diag.message_primary or text  # the rest is a line of SQL
        return PermissionError(
            errno.EACCES, f"{name}: {text}. Grant the user the right to create tables, or to use these"
        )
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return ConnectionFailed(f"{name}: this server is read-only. Connect to the primary server.")
    if isinstance(error, psycopg.errors.UndefinedTable):
        return CorruptStore(f"{name}: {text}. The tables of this {what} were deleted. Open the {what} again.")
    if isinstance(error, psycopg.DataError):
        return ValueError(f"{name}: {text}")
    return error


def has_transaction(connection: psycopg.Connection[Any]) -> bool:
    """Do the next statements run in one transaction? In autocommit mode each would be one of its own."""
    return not connection.autocommit or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE


@contextmanager
def pipeline(connection: psycopg.Connection[Any]) -> Iterator[psycopg.Pipeline]:
    """Statements that are sent together. The first error of any of them is raised."""
    failed: psycopg.Error | None = None
    try:
        with connection.pipeline() as pipeline:
            try:
                yield pipeline
            except psycopg.Error as error:
                failed = error  # not raised here: the end of the pipeline would log a second error
    except psycopg.Error as error:
        failed = failed or error
    if failed is not None:
        raise failed


class Pool:
    """The sessions of one process for its operations. `settings` are statements that each session begins with."""

    def __init__(self, url: str, size: int, settings: str) -> None:
        self._url, self._settings = url, settings
        self._room = threading.BoundedSemaphore(size)
        self._free: deque[Session] = deque()

    def close(self) -> None:
        """Close the sessions that no operation uses."""
        while self._free:
            self._free.pop().close()

    def open(self, timeout: float | None = None) -> Session:
        """A new session, which the caller closes."""
        session = connect(self._url, timeout)
        try:
            explained(self._url, lambda: session.connection.execute(self._settings))
        except BaseException:
            session.close()  # at once: libpq may have closed the socket
            raise
        return session

    @contextmanager
    def session(self, timeout: float | None = None) -> Iterator[Session]:
        """A session for one operation. After an error it is closed."""
        with self._room:
            try:
                session = self._free.pop()
            except IndexError:
                session = self.open(timeout)
            try:
                yield session
            except BaseException:
                session.close()
                raise
            if session.is_open:
                self._free.append(session)

    def repeat(self, work: Callable[[Session], Result], timeout: float | None, patience: float | None = None) -> Result:
        """Call `work` with a session. If the connection is lost, call it with another one. Raises ConnectionFailed.

        timeout: for how long, in seconds. But at least twice. None: `RECONNECT_S`
        patience: the same, but perhaps once only
        """
        limit = timeout if patience is None else patience
        deadline = monotonic() + (RECONNECT_S if limit is None else limit)
        pause = 0.0
        while True:
            try:
                with self.session(timeout) as session:
                    return work(session)
            except ConnectionFailed as error:
                failed = error
            except psycopg.Error as error:
                if not is_lost(error):
                    raise
                failed = failure(self._url, error)
            self.close()  # after a restart of the server, all of them are lost
            if monotonic() >= deadline and (pause or patience is not None):
                raise failed
            sleep(pause * uniform(0.5, 1.0))
            pause = min(_MAX_PAUSE_S, 2 * pause or 0.02)


class Alarm:
    """Waits for the next change on a server that a statement with `RING` makes. Each change costs its writer more while
    this waits, so it is for one change: the caller pauses before it waits again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = Pool(url, 1, "set synchronous_commit = off; set lock_timeout = '1s'")

    @contextmanager
    def __call__(self) -> Iterator[list[int]]:
        """Changes from now on ring: one of these descriptors can be read."""
        with self._pool.session() as session:
            is_ours = explained(self._url, lambda: self._begin(session))
            yield [session.fileno()]
            explained(self._url, lambda: self._end(session, is_ours))

    def _begin(self, session: Session) -> bool:
        """False: another alarm has the lock, so that changes ring for both."""
        run = session.connection.execute
        session.connection.add_notify_handler(_ignore)  # else psycopg keeps each notification
        run("listen holdfast_changes")
        query = f"select pg_try_advisory_lock({_ALARM}), not pg_try_advisory_xact_lock_shared({_ALARM})"
        is_ours, is_taken = run(query).fetchone() or (True, False)
        if not is_ours and not is_taken:  # only statements have it, which end soon. They ring while this one waits
            with suppress(psycopg.errors.LockNotAvailable):
                run(f"select pg_advisory_lock({_ALARM})")
                is_ours = True
        return bool(is_ours)

    def _end(self, session: Session, is_ours: bool) -> None:
        session.connection.execute("unlisten *")
        session.connection.remove_notify_handler(_ignore)
        if is_ours:  # another alarm takes the lock
            session.connection.execute(f"select pg_advisory_unlock({_ALARM}), pg_notify('holdfast_changes', '')")


def _ignore(notification: object) -> None:
    """A handler of notifications."""


def table_prefix(name: str, given: str) -> str:
    """Check the prefix of a URL, which the names of the tables begin with."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,29}", given):
        raise ValueError(
            f"{name}: the prefix {given!r} is not a plain name. Use at most 30 lower-case letters, "
            "digits and underscores, and begin with a letter or an underscore."
        )
    return given


def create_tables(session: Session, name: str, exist: Callable[[], bool], create: Callable[[], object]) -> None:
    """Call `create`, unless the tables exist. Of several processes that come at once, one creates them."""
    if exist():
        return
    with session.connection.transaction():
        session.connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", [name])
        if not exist():
            create()


def split(url: str, ours: Collection[str]) -> tuple[str, dict[str, str]]:
    """Take our own parameters out of a URL. Return the URL for psycopg, and these parameters."""
    address, mark, query = url.partition("?")
    found: dict[str, str] = {}
    others = []
    for part in query.split("&") if mark else []:
        name, _, value = part.partition("=")
        if unquote(name) in ours:
            found[unquote(name)] = unquote(value)
        else:
            others.append(part)
    return address + ("?" + "&".join(others) if others else ""), found


def without_password(url: str) -> str:
    """The URL for a message."""
    return re.sub(_IN_QUERY, r"\1***", re.sub(_PASSWORD, r"\1***@", url))


if not _missing:

    class _Connection(psycopg.Connection[Any]):
        """Its `Session` closes it. psycopg would warn about the copy of a forked child, which must stay as it is."""

        def __del__(self, _: Any = None) -> None: ...
