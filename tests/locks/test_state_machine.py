"""Real processes do whatever comes to hypothesis' mind, and a model of a dozen lines knows what must come of it.

Three peers try, acquire, wait in the queue, give up, release, release twice and are killed. After each step everybody
who must have the lock by now has it, and nobody else: the model is exact, because the queue is first come, first
served.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support import Peer, Raised, assert_nothing_left, until_queued

from holdfast import Lock, Semaphore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the queue, which is made of FIFOs")

IN_PEER = """
holds, spent = {}, []

def take(lock, name, way):
    hold = lock.try_acquire() if way == "try" else lock.acquire(timeout=way)
    if hold is not None:
        holds[name] = hold
    return hold is not None

def give(name):
    spent.append(holds.pop(name))
    spent[-1].release()
"""
PEERS = 3
PERMITS = 2
# One try, one try that raises, a wait that is soon over, and waits in the queue: most of the time, or it stays empty.
WAYS = ("try", 0, 0.01, None, None, None)


class Want(NamedTuple):
    """What somebody has, or waits for."""

    peer: int
    shared: bool
    name: str


class Pool:
    """Peers that live from one example to the next, if they are not killed."""

    def __init__(self) -> None:
        self.peers = [self._new() for _ in range(PEERS)]

    def _new(self) -> Peer:
        peer = Peer()
        peer.begin(IN_PEER)
        return peer

    def __getitem__(self, number: int) -> Peer:
        peer = self.peers[number]
        if not hasattr(peer, "ready"):
            peer.answer()
            peer.ready = True  # type: ignore[attr-defined]
        return peer

    def kill(self, number: int) -> None:
        peer = self.peers[number]
        self.peers[number] = self._new()
        peer.kill()
        peer.__exit__(None, None, None)

    def close(self) -> None:
        for number, peer in enumerate(self.peers):
            self[number].__exit__(None, None, None)
            assert peer.process.returncode == 0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    Machine.pool = pool
    yield pool
    pool.close()


class Machine(RuleBasedStateMachine):
    """The steps, and the model of a queue. A subclass says who may be inside together."""

    pool: Pool
    sharing = st.just(False)

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = os.path.realpath(self.directory.name) + "/x.lock"
        self.inside: list[Want] = []
        self.queue: list[Want] = []
        self.names = 0
        self.nobody_died = True

    # The model.

    def fits(self, want: Want) -> bool:
        """May it be inside with those who are?"""
        raise NotImplementedError

    def waits_for_itself(self, want: Want) -> bool:
        raise NotImplementedError

    def passes_the_queue(self, want: Want) -> bool:
        return False

    def lock(self, shared: bool) -> str:
        """The lock, as a peer would write it."""
        raise NotImplementedError

    def of(self, peer: int) -> list[Want]:
        return [want for want in self.inside if want.peer == peer]

    def idle(self) -> list[int]:
        waiting = {want.peer for want in self.queue}
        return [number for number in range(PEERS) if number not in waiting]

    def expected(self, want: Want, way: float | str | None) -> bool | str:
        if self.fits(want) and (not self.queue or self.passes_the_queue(want)):
            return True
        if way == "try":
            return False
        if way == 0:
            return "Busy"
        if self.waits_for_itself(want):
            return "WouldDeadlock"
        return "waits" if way is None else "Timeout"

    def serve_the_queue(self) -> None:
        while self.queue and self.fits(self.queue[0]):
            want = self.queue.pop(0)
            self.inside.append(want)
            assert self.pool[want.peer].answer() is True

    # The steps.

    def take(self, want: Want, way: float | str | None) -> Any:
        try:
            return self.pool[want.peer].do(self.taking(want, way))
        except Raised as raised:
            return raised.name

    def taking(self, want: Want, way: float | str | None) -> str:
        return f"take({self.lock(want.shared)}, {want.name!r}, {way!r})"

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), way=st.sampled_from(WAYS))
    def acquire(self, data: st.DataObject, way: float | str | None) -> None:
        self.names += 1
        peer = data.draw(st.sampled_from(self.idle()), label="peer")
        want = Want(peer, data.draw(self.sharing, label="shared"), f"hold {self.names}")
        expected = self.expected(want, way)
        if expected == "waits":
            self.queue.append(want)
            self.pool[peer].begin(self.taking(want, way))
            until_queued(self.path, len(self.queue))
            self.pool[peer].until_waiting(self.path)
            return
        assert self.take(want, way) == expected
        if expected is True:
            self.inside.append(want)

    def releasable(self) -> list[Want]:
        idle = self.idle()
        return [want for want in self.inside if want.peer in idle]

    @precondition(lambda self: self.releasable())
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        want = data.draw(st.sampled_from(self.releasable()), label="hold")
        self.inside.remove(want)
        peer = self.pool[want.peer]
        peer.do(f"give({want.name!r})")
        if twice:
            with pytest.raises(Raised, match="NotLocked"):
                peer.do("spent[-1].release()")
        self.serve_the_queue()

    # Now and then: a lock whose users die all the time is never waited for.
    @precondition(lambda self: not self.idle() or (self.names % 4 == 3 and (self.inside or self.queue)))
    @rule(number=st.integers(0, PEERS - 1))
    def kill(self, number: int) -> None:
        self.pool.kill(number)
        self.nobody_died = False
        self.inside = [want for want in self.inside if want.peer != number]
        self.queue = [want for want in self.queue if want.peer != number]
        self.serve_the_queue()

    @invariant()
    def those_who_wait_go_on_waiting(self) -> None:
        assert not any(self.pool[want.peer].has_answered() for want in self.queue)

    @invariant()
    def nothing_is_left_when_nobody_is_there(self) -> None:
        if self.nobody_died and not self.inside and not self.queue:
            assert_nothing_left(self.path)

    def teardown(self) -> None:
        try:
            for number in {want.peer for want in self.queue}:
                self.kill(number)
            for want in list(self.inside):
                self.pool[want.peer].do(f"give({want.name!r})")
            self.clean_up_after_the_dead()
            assert_nothing_left(self.path)
        finally:
            self.directory.cleanup()

    def clean_up_after_the_dead(self) -> None:
        raise NotImplementedError


class LockMachine(Machine):
    sharing = st.booleans()

    def lock(self, shared: bool) -> str:
        return f"Lock({self.path!r}, shared={shared})"

    def fits(self, want: Want) -> bool:
        return not self.inside or (want.shared and all(other.shared for other in self.inside))

    def waits_for_itself(self, want: Want) -> bool:
        return any(not (want.shared and own.shared) for own in self.of(want.peer))

    def passes_the_queue(self, want: Want) -> bool:
        """Who shares already may share again: the writer in the queue waits for it."""
        return want.shared and bool(self.of(want.peer))

    @invariant()
    def the_status_names_them_all(self) -> None:
        status = Lock(self.path).status()
        pids = [peer.pid for peer in self.pool.peers]
        assert Counter((holder.pid, holder.shared) for holder in status.holders) == Counter(
            (pids[want.peer], want.shared) for want in self.inside
        )
        assert [waiter.pid for waiter in status.waiters] == [pids[want.peer] for want in self.queue]

    def clean_up_after_the_dead(self) -> None:
        Lock(self.path).acquire(timeout=10).release()


class SemaphoreMachine(Machine):
    def lock(self, shared: bool) -> str:
        return f"Semaphore({self.path!r}, {PERMITS})"

    def fits(self, want: Want) -> bool:
        return len(self.inside) < PERMITS

    def waits_for_itself(self, want: Want) -> bool:
        return len(self.of(want.peer)) >= PERMITS

    def clean_up_after_the_dead(self) -> None:
        Semaphore(self.path, PERMITS).acquire(timeout=10).release()


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
AMOUNTS = [
    pytest.param(25, 20, id="short"),
    pytest.param(300, 40, id="long", marks=SLOW),
]


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(("examples", "steps"), AMOUNTS)
@pytest.mark.parametrize("machine", [LockMachine, SemaphoreMachine])
def test_random_operations_have_the_results_that_the_model_predicts(
    machine: type[Machine], examples: int, steps: int
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=examples < 100,  # so that it takes about as long every time
            suppress_health_check=list(HealthCheck),
        ),
    )
