"""`holdfast.lock(url)` and `holdfast.semaphore(url, permits)`: the engine is chosen by the scheme of the URL.

    a path                                                  Lock, Semaphore
    postgresql://user@host/database?name=deploy             a session of PostgreSQL (`postgres`)
    etcd://host:2379,host2:2379/deploy                      a lease of etcd (`etcd`)
    redis://host:6379/0/deploy   rediss://   valkey://      a key of Redis or Valkey that expires (`redis`)
    smb://host:445/share/dir/.store.lock                    an open file on an SMB server (`smb`)

Another package adds a scheme with an entry point in the group `holdfast.engines`: its name is the scheme, and its
object is called with the URL and the keyword arguments shared, permits (0 for a lock) and ttl. It returns a
`locks.server.ServerEngine`.
"""

from __future__ import annotations

import re
from time import monotonic

from ..errors import Unsupported
from .base import DEFAULT, BaseLock, check_timeout
from .server import ServerEngine, ServerHold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .base import Default, StrPath
    from .lock import Lock
    from .semaphore import Semaphore

GROUP = "holdfast.engines"
_ENGINES = {
    **dict.fromkeys(("postgresql", "postgres"), (".postgres", "PostgresEngine")),
    "etcd": (".etcd", "EtcdEngine"),
    "etcds": (".etcd", "EtcdEngine"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), (".redis", "RedisEngine")),
    "smb": (".smb", "SmbEngine"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class ServerLock(BaseLock[ServerHold]):
    """A lock, or semaphore, on a server. `holdfast.lock` and `holdfast.semaphore` make it.

    `name` is its URL without a password.
    """

    __slots__ = ("_url", "on_lost", "permits", "shared", "ttl")

    _engine: Any  # a `ServerEngine`
    _hold_type = ServerHold
    _options = ("shared", "permits", "ttl", "timeout", "on_lost")

    def __init__(
        self,
        url: str,
        *,
        shared: bool = False,
        permits: int | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
        on_lost: Callable[[ServerHold], object] | None = None,
    ) -> None:
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 1 <= ttl <= 86_400):
            raise ValueError(f"ttl is seconds, from 1 to 86400; not {ttl!r}")
        if permits is not None and (isinstance(permits, bool) or not isinstance(permits, int) or permits < 1):
            raise ValueError(f"permits is a number from 1 on, not {permits!r}")
        engine = engine_of(url)(url, shared=shared, permits=permits or 0, ttl=ttl)
        engine.on_lost = on_lost
        BaseLock.__init__(self, engine, timeout)
        engine.try_timeout = self.timeout or None
        self._url = url
        self.shared = shared
        self.permits = permits
        self.ttl = ttl
        self.on_lost = on_lost

    # The timeout includes the first attempt, which may take long.

    def acquire(
        self, timeout: float | Default | None = DEFAULT, *, cancel_check: Callable[[], bool] | None = None
    ) -> ServerHold:
        timeout = self.timeout if timeout is DEFAULT else check_timeout(timeout)
        began = monotonic()
        found: Any = self._engine.first_attempt(timeout)
        return ServerHold(self, found) if found else self._wait(found, timeout, cancel_check, began)

    acquire.__doc__ = BaseLock.acquire.__doc__

    def __enter__(self) -> ServerHold:
        hold = self.acquire()
        self._entered.append(hold)
        return hold

    def __reduce__(self) -> tuple[object, ...]:
        return _describe_again, (self._url, {name: getattr(self, name) for name in self._options})


def _describe_again(url: str, options: dict[str, Any]) -> ServerLock:
    return ServerLock(url, **options)


def is_url(name: object) -> bool:
    return isinstance(name, str) and _SCHEME.match(name) is not None


def engine_of(url: str) -> Callable[..., ServerEngine]:
    """The engine for the scheme of a URL. Raises Unsupported if there is none."""
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if scheme in _ENGINES:
        from importlib import import_module

        module, name = _ENGINES[scheme]
        return getattr(import_module(module, __package__), name)  # type: ignore[no-any-return]
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        if entry.name == scheme:
            try:
                return entry.load()  # type: ignore[no-any-return]
            except (ImportError, AttributeError) as error:
                raise Unsupported(
                    f"{scheme}://…: the engine for this scheme cannot be loaded ({error}). Check the package that adds "
                    f"it: {entry.value}."
                ) from None
    known = ", ".join(dict.fromkeys(_ENGINES))
    raise Unsupported(
        f"{scheme}://…: no engine has this scheme. Use one of {known}, the path of a file, or install a package that "
        f"adds the scheme (entry point group {GROUP})."
    )


def lock(
    url: StrPath,
    *,
    shared: bool = False,
    timeout: float | None = None,
    ttl: float | None = None,
    on_lost: Callable[[ServerHold], object] | None = None,
    connection: Any = None,
) -> Lock | ServerLock | BaseLock[Any]:
    """Return the lock that a URL or a path names. Nothing is connected or created before it is acquired.

    url: postgresql://…?name=…, etcd://…/name, redis://…/0/name, smb://…/share/path; or a path, which gives a `Lock`
    shared: several holders may share the lock, and exclude an exclusive holder
    timeout: seconds that `acquire` and `with` wait; None: for ever; 0: one attempt. `try_acquire` waits so long, and
        not longer than 10 s, for an answer of the server
    ttl: seconds after which etcd and Redis release the lock of a holder that vanished. Default: 10
    on_lost: called with the hold, in a thread, when the lock was taken away or the server does not answer any more
    connection: a psycopg connection of yours: the lock is held until the end of its transaction

    Raises Unsupported for an unknown scheme, a missing extra, or what the engine cannot do, and UnsafePath for a URL
    without a name. Acquiring raises ConnectionFailed if the server does not answer within the timeout.

        with holdfast.lock("postgresql://ci@db/ops?name=deploy", timeout=60) as hold:
            deploy(fence=hold.token)
    """
    if not is_url(url):
        from .lock import Lock

        if ttl is not None or on_lost is not None or connection is not None:
            raise ValueError("ttl, on_lost and connection are for locks on servers, and this is a path")
        return Lock(url, shared=shared, timeout=timeout)
    if connection is not None:
        from .postgres_transaction import TransactionEngine

        if ttl is not None or on_lost is not None:
            raise ValueError("ttl and on_lost do not apply to a lock of a transaction: it ends with the transaction")
        engine = TransactionEngine(str(url), connection, shared=shared)
        return BaseLock(engine, timeout)
    return ServerLock(str(url), shared=shared, timeout=timeout, ttl=ttl, on_lost=on_lost)


def semaphore(
    url: StrPath,
    permits: int,
    *,
    timeout: float | None = None,
    ttl: float | None = None,
    on_lost: Callable[[ServerHold], object] | None = None,
) -> Semaphore | ServerLock:
    """Return the semaphore that a URL or a path names. All users must pass the same number of permits.

    The parameters are those of `lock`. SMB has no semaphores.

        with holdfast.semaphore("redis://cache/0/gpu", permits=4):
            train()
    """
    if not is_url(url):
        from .semaphore import Semaphore

        if ttl is not None or on_lost is not None:
            raise ValueError("ttl and on_lost are for semaphores on servers, and this is a path")
        return Semaphore(url, permits, timeout=timeout)
    return ServerLock(str(url), permits=permits, timeout=timeout, ttl=ttl, on_lost=on_lost)
