"""Locks on etcd: keys with a lease, through the JSON gateway of every etcd server.

    holdfast/<name>/<kind>/<lease in hex>-<number>      a holder or a waiter. Its value is `pid@host`

The kind is "x" (exclusive), "s" (shared), or the number of permits. etcd orders the keys by the revision in which they
were created. A key holds the lock if no earlier key of the name excludes it: an exclusive key is excluded by every
earlier one, a shared key by earlier exclusive ones, a permit by as many earlier ones as there are permits. The revision
is the token: it grows with every change of the database.

A waiter watches the last of the earlier keys that exclude it, so that a release wakes one waiter. For a permit it
watches all keys of the name. Then it reads the keys again, its own too: a waiter whose lease has expired holds nothing.

A process has one lease on a server for each time to live, and etcd deletes the keys of a lease that is not renewed.
A URL may name several servers of a cluster: when one does not answer, the next one is asked.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any
from urllib.parse import unquote

from .. import wait
from ..errors import HoldfastError, UnsafePath
from ..owner import hide_passwords
from .engine import BUSY, Outcome
from .etcd_client import LEASE_NOT_FOUND, EtcdError, EtcdLease, EtcdServer, Watch, decode, encode, servers
from .server import (
    STATUS_TIMEOUT_S,
    LeaseGone,
    ServerEngine,
    ServerGrant,
    Waiter,
    client_name,
    holder_of,
    release_timeout,
    split_url,
    unreachable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..status import Status

DEFAULT_TTL_S = 10.0
_numbers = count(1)


def _after(prefix: str) -> str:
    """The end of the range of all keys that begin with a prefix."""
    encoded = prefix.encode("utf-8", "surrogateescape")
    return base64.b64encode(encoded[:-1] + bytes([encoded[-1] + 1])).decode()


class EtcdEngine(ServerEngine):
    """The lock, or semaphore, of one name in one cluster."""

    def __init__(self, url: str, *, shared: bool = False, permits: int = 0, ttl: float | None = None) -> None:
        super().__init__(hide_passwords(url), "etcd")
        parts = split_url(url)
        name = unquote(parts.path[1:])
        if not name or "\0" in name or not parts.netloc.rpartition("@")[2]:
            raise UnsafePath(
                f"{self.name}: the URL names no lock. Write etcd://host:2379/name, or etcd://host:2379,host:2379/name",
                path=self.name,
            )
        self.url = f"{parts.scheme}://{parts.netloc}/?{parts.query}"
        self.shared = shared or permits > 0
        self.permits = permits
        self.kind = str(permits) if permits else "s" if shared else "x"
        self.ttl = DEFAULT_TTL_S if ttl is None else float(ttl)
        self.key = ("etcd", self.url, name)
        self.prefix = f"holdfast/{name}\0/"

    @property
    def server(self) -> EtcdServer:
        return servers.get(self.url) or servers.setdefault(self.url, EtcdServer(self.url, self.name))

    def attempt(self, timeout: float) -> ServerGrant | Outcome:
        """Add our key if the name has no key. Else add it and look, unless a look shows that it would have to wait."""
        until = monotonic() + timeout
        found = self.add(timeout, only_if_free=True)
        if isinstance(found, ServerGrant):
            return found
        if self.kind == "x" or self.excluding(found, None):
            return BUSY
        place: Place | None = self.add(wait.time_left(until))
        assert place is not None
        try:
            if self.ahead(place, wait.time_left(until)):
                return BUSY
            grant, place = place.grant(), None
            return grant
        except LeaseGone:
            return BUSY  # this process was stopped or cut off
        finally:
            if place is not None:
                place.leave(timeout)

    def add(self, timeout: float, *, only_if_free: bool = False) -> Any:
        """Add a key of ours. Return its place, or with `only_if_free` the grant or the keys that are there."""
        until = monotonic() + timeout
        for _ in range(2):
            lease = self.server.lease(self.ttl, wait.time_left(until))
            key = f"{self.prefix}{self.kind}/{int(lease.id):x}-{next(_numbers)}"
            put = {"request_put": {"key": encode(key), "value": encode(client_name()), "lease": lease.id}}
            mine: dict[str, Any] = {"key": encode(key)}
            keys = {"key": encode(self.prefix), "range_end": _after(self.prefix)} if only_if_free else mine
            compare = {"target": "CREATE", "result": "LESS", "create_revision": "1", **keys}
            ranges = [mine, *(self.ranges() if only_if_free else ())]
            failure = [{"request_range": each} for each in ranges]
            request = {"compare": [compare], "success": [put], "failure": failure}
            try:
                return self._added(self.call("kv/txn", request, wait.time_left(until)), lease, key, only_if_free)
            except EtcdError as error:
                if error.code != LEASE_NOT_FOUND:
                    lease.discard(key)  # a cluster that was too slow may have added it
                    raise
                lease.lose()
                continue
            except BaseException:  # no answer, or an interrupt: the key may be there
                lease.discard(key)
                raise
        raise unreachable(self.name, "the lease was lost at once", "Raise ttl, or check the clocks of the servers.")

    def _added(self, answer: dict[str, Any], lease: EtcdLease, key: str, only_if_free: bool) -> Any:
        revision = int(answer["header"]["revision"])
        if not answer.get("succeeded"):
            found = _keys(answer)
            ours = [entry[0] for entry in found if entry[1] == key]  # the request has reached the cluster twice
            if not ours:
                return found
            revision = ours[0]
        place = Place(self, lease, key, revision)
        return place.grant() if only_if_free else place

    def call(self, method: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        return self.server.call(method, request, timeout)

    def keys(self, timeout: float) -> list[tuple[int, str, str]]:
        """The revision, key and value of all holders and waiters, in order of arrival."""
        return self._read([{"key": encode(self.prefix), "range_end": _after(self.prefix)}], timeout)

    def _read(self, ranges: list[dict[str, Any]], timeout: float) -> list[tuple[int, str, str]]:
        return _keys(self.call("kv/txn", {"success": [{"request_range": each} for each in ranges]}, timeout))

    def ranges(self, before: int | None = None) -> list[dict[str, Any]]:
        """Those keys that decide whether a place excludes others. Not all of them: 1,000 waiters would read 1,000 each.

        before: only keys with an earlier revision, and of these the last
        """
        mine = f"{self.prefix}{self.kind}/"
        end = _after(self.prefix)
        others = [
            {"key": encode(self.prefix), "range_end": encode(mine)},
            {"key": _after(mine), "range_end": end},
        ]
        found = others if self.kind != "x" else [{"key": encode(self.prefix), "range_end": end}]
        if self.permits:
            found.append({"key": encode(mine), "range_end": _after(mine), "limit": str(self.permits)})
        last = {"sort_order": "DESCEND", "sort_target": "CREATE", "max_create_revision": str(before)}
        return [{"limit": "1", **each, **(last if before is not None else {})} for each in found]

    def ahead(self, place: Place, timeout: float) -> list[tuple[int, str, str]]:
        """The last of the keys that exclude a place. Raises LeaseGone if the place is not there any more."""
        ranges = [{"key": encode(place.key)}, *self.ranges(place.revision - 1)]
        return self.excluding(self._read(ranges, timeout), place)

    def is_excluded(self, place: Place, last: tuple[int, str, str], timeout: float) -> bool:
        """Is a place still excluded? last: the last of the keys that excluded it."""
        if self.permits:
            return bool(self.ahead(place, timeout))
        keys = self._read([{"key": encode(place.key)}, {"key": encode(last[1])}], timeout)
        return bool(self.excluding(keys, place))

    def excluding(self, keys: list[tuple[int, str, str]], place: Place | None) -> list[tuple[int, str, str]]:
        """The earlier keys that keep this place from holding the lock. None: a place behind all of them."""
        if place is not None and not any(key == place.key for _, key, _ in keys):
            raise LeaseGone
        earlier = [entry for entry in keys if place is None or entry[0] < place.revision]
        others = [entry for entry in earlier if self.kind_of(entry[1]) != self.kind]
        if self.permits:
            for _, key, _ in others:
                if self.kind_of(key).isdigit():
                    raise self.other_number(self.kind_of(key))
            return earlier if others or len(earlier) >= self.permits else []
        return earlier if self.kind == "x" else others

    def kind_of(self, key: str) -> str:
        return key[len(self.prefix) :].partition("/")[0]

    def release_grant(self, grant: ServerGrant) -> bool:
        lease: Any = grant.lease
        return bool(lease.delete(grant.id, release_timeout(self.ttl)))

    def join(self, timeout: float) -> Waiter:
        return EtcdWaiter(self, self.add(timeout))

    def status(self) -> Status:
        keys = self.keys(STATUS_TIMEOUT_S)
        number = 0
        for _ in keys:  # holders are the longest run of first keys that do not exclude each other
            kinds = {self.kind_of(key) for _, key, _ in keys[: number + 1]}
            kind = next(iter(kinds))
            if number and (len(kinds) > 1 or kind == "x" or (kind.isdigit() and number >= int(kind))):
                break
            number += 1
        found = [holder_of(client, self.kind_of(key) != "x") for _, key, client in keys]
        return self.state(tuple(found[:number]), tuple(found[number:]), keys[0][0] if keys else None)


def _keys(answer: dict[str, Any]) -> list[tuple[int, str, str]]:
    found = {
        (int(entry["create_revision"]), decode(entry["key"]), decode(entry.get("value", "")))
        for response in answer.get("responses", ())
        for entry in response["response_range"].get("kvs", ())
    }
    return sorted(found)


class Place:
    """A key of ours: a place in the queue of a lock."""

    def __init__(self, engine: EtcdEngine, lease: EtcdLease, key: str, revision: int) -> None:
        self._engine, self._lease = engine, lease
        self.key, self.revision = key, revision
        lease.waiters.add(key)
        lease.watch()

    def grant(self) -> ServerGrant:
        grant = ServerGrant(self._engine, self._lease, self.key, self.revision)
        self._lease.waiters.discard(self.key)
        return grant

    def leave(self, timeout: float) -> None:
        self._lease.waiters.discard(self.key)
        with suppress(HoldfastError, OSError):
            self._lease.delete(self.key, timeout)

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt came before it was complete
            if self.key in self._lease.waiters:  # an interrupt has dropped it
                self._lease.waiters.discard(self.key)
                self._lease.discard(self.key)


class EtcdWaiter(Waiter):
    def __init__(self, engine: EtcdEngine, place: Place) -> None:
        self._engine, self._place = engine, place
        self._watch: Watch | None = None
        self._front = (0, "", "")  # the entry that the watch is for

    def attempt(self, timeout: float) -> ServerGrant | None:
        """Look, watch what is in front, and look again: what was deleted in between causes no event.

        For the first look, etcd goes through all keys of the name. The second one reads two keys, and so do those that
        no event has caused.
        """
        engine, until = self._engine, monotonic() + timeout
        try:
            is_quiet = self._watch is not None and not wait.poll([self._watch.fd], 0)
            if is_quiet and engine.is_excluded(self._place, self._front, timeout):
                return None
            self._end_watch()
            while excluding := engine.ahead(self._place, wait.time_left(until)):
                key = engine.prefix if engine.permits else excluding[-1][1]
                request = {"key": encode(key), "filters": ["NOPUT"]}
                if engine.permits:
                    request["range_end"] = _after(key)
                self._watch = engine.server.watch(request, wait.time_left(until))
                self._front = excluding[-1]
                if engine.is_excluded(self._place, self._front, wait.time_left(until)):
                    return None
                self._end_watch()
        except LeaseGone:  # this process was stopped or cut off: wait at the end of the queue
            self._end_watch()
            self._place.leave(timeout)
            self._place = engine.add(wait.time_left(until))
            return self.attempt(wait.time_left(until))
        return self._place.grant()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def step(self, deadline: float | None) -> wait.Step:
        until = wait.sooner(monotonic() + self._engine.ttl, deadline)
        return wait.Pause(until) if self._watch is None else wait.Readable(self._watch.fd, until)

    def leave(self) -> None:
        self._end_watch()
        self._place.leave(STATUS_TIMEOUT_S)  # not longer: the timeout of the caller has passed
