"""How a worker comes to its next task: one that waits, or one whose worker is dead.

A worker that is killed leaves its task in running/, unlocked. Whoever finds it there goes by what its file says: it is
put away if it had ended, ended if somebody had decided so (`Verdict`), and else begun again. Of a worker on another
machine, that its lock is gone proves nothing: that one may have been cut off. Its lease has to run out first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

from .. import owner, system
from ..errors import CorruptStore, UnsafePath
from ..files import remove
from . import journal
from .claim import Claim, Desk
from .finder import Finder
from .journal import Task
from .limits import Limits
from .lines import Lines
from .places import Places, file_name, listed, move_over, name_of
from .sheet import ONLY_THIS_FILE, Entry, place_of
from .verdict import Verdict

# What a file can be that somebody has edited, or put there.
_NOT_A_TASK = (CorruptStore, UnsafePath, ValueError, TypeError, OverflowError, RecursionError)
_BETWEEN_TRIES = 0.002  # seconds
_BETWEEN_LOOKS = 0.5  # seconds after which who is busy looks for tasks of the dead


class Taker:
    def __init__(
        self,
        places: Places,
        desk: Desk,
        finder: Finder,
        limits: Limits,
        lines: Lines,
        stale_after: float,
    ) -> None:
        self._places = places
        self._desk = desk
        self.finder = finder
        self._limits = limits
        self._lines = lines
        self._stale_after = stale_after
        self._looked_at = 0.0
        self._leases: dict[str, tuple[int, float]] = {}
        self._said: set[str] = set()
        # An attempt is over because its worker died; or a task has failed because nobody can read it.
        self.on_over: Callable[[bool], None] = lambda failed: None

    def try_claim(self, *, look: bool = False) -> Claim | None:
        """The next task, if there is one. `look`: in any case also among those of the dead."""
        now = monotonic()
        if look or now - self._looked_at > _BETWEEN_LOOKS or self._desk.has_left_one:
            self._looked_at, self._desk.has_left_one = now, False
            self._lines.look_after_boot()
            self.finder.look_for_due()
            claim = self._take_over()
            if claim is not None:
                self._looked_at = 0.0  # there may be more
                return claim
        tried: set[str] = set()
        while (found := self.finder.next(tried)) is not None:
            claim = self._try(*found)
            if claim is not None:
                return claim
        return None

    def _try(self, place: str, source: str | Entry) -> Claim | None:
        try:
            if isinstance(source, str):
                return self._desk.take(source, place, self._limits.admit)
            if not self._desk.shared:
                return self._lines.take(source, place)
            # Who is on the machine with the disk, where this was put, does not see that somebody here has a slot.
            path = self._lines.give_file(source)
            return None if path is None else self._desk.take(path, place, self._limits.admit)
        except _NOT_A_TASK as error:
            self._put_aside(source, place, error)
        except OSError as error:
            self._pass_over(source if isinstance(source, str) else source.sheet.path, error)
        return None

    def _pass_over(self, path: str, error: OSError) -> None:
        """A directory, a link, another user's: it is in nobody's way but its own."""
        if error.errno not in ONLY_THIS_FILE:
            raise error
        if path not in self._said:
            self._said.add(path)
            _log("%s: passed over: %s", path, error)

    def _take_over(self) -> Claim | None:
        """One that a dead worker has left."""
        there = listed(self._places.running)
        self._leases = {place: lease for place, lease in self._leases.items() if place in there}
        for place in there:
            path = f"{self._places.running}/{place}"
            try:
                claim = self._desk.abandoned(place) if name_of(place) else None
                if claim is not None and self._goes_on(claim):
                    return claim
            except _NOT_A_TASK as error:
                self._put_aside(path, place, error)
            except OSError as error:
                self._pass_over(path, error)
        for slot in self._lines.slots.names() if not self._desk.shared else ():
            try:
                claim = self._lines.left_in(slot)
                if claim is not None and self._goes_on(claim):
                    return claim
            except _NOT_A_TASK as error:
                _log("%s: %s", self._lines.slots.path(slot), error)
            except OSError as error:
                self._pass_over(self._lines.slots.path(slot), error)
        self._limits.look()
        return None

    def _goes_on(self, claim: Claim) -> bool:
        """With what somebody left. True: by doing it, now."""
        try:
            return self._go_on(claim)
        except BaseException:
            claim.abandon()  # the disk is full, for one; whoever comes next tries again
            raise

    def _go_on(self, claim: Claim) -> bool:
        task = claim.task
        if not self._is_over(claim):
            claim.abandon()
            return False
        if self.settle(claim):
            return False
        if task.state == "running":
            if task.tried >= task.attempts:
                claim.fail(f"the worker died, the last of {task.tried} times")
                self.on_over(True)
                return False
            claim.say(**{"is": "pending", "because": "the worker died"})
            self.on_over(False)
        if task.key is not None and not self._limits.admit(task, f"{self._places.running}/{claim.place}", claim.place):
            claim.abandon()
            return False
        claim.begin()
        return True

    def settle(self, claim: Claim) -> bool:
        """Put it away if that was decided: by its worker, or by somebody about its worker."""
        if claim.settle():
            return True
        verdict = Verdict.of(self._places, claim.task) if claim.task.state == "running" else None
        if verdict is not None:
            claim.end_as(verdict)
            remove(f"{self._places.ending}/{file_name(claim.id)}")
        return verdict is not None

    def _is_over(self, claim: Claim) -> bool:
        """It is not locked. Is that enough? Of a worker on another machine, not before its lease has run out."""
        task = claim.task
        if not self._desk.shared or task.state != "running" or task.boot in (None, owner.boot_id()):
            return True
        seen, since = self._leases.get(claim.place, (0, 0.0))
        if seen != claim.renewed:
            self._leases[claim.place] = (claim.renewed, monotonic())  # by our own clock: theirs may be wrong
            return False
        return monotonic() - since > self._stale_after

    def _put_aside(self, source: str | Entry, place: str, error: Exception) -> None:
        """What nobody can do must not be in the way of the others. It is left to a person, in failed/."""
        name = name_of(place)
        try:
            if isinstance(source, Entry):
                if not self._lines.set_aside(source):
                    return
            else:
                move_over(source, f"{self._places.failed}/{name}")
        except FileNotFoundError:
            return
        own = f"{self._places.tasks}/{name}"
        _log("%s cannot be read, and was put aside: failed/ has it, too. Mend it, and call recover. (%s)", own, error)
        self.on_over(True)

    def leave(self) -> None:
        """There is nothing more to do."""
        self._lines.slots.close()

    # For who supervises others.

    def running(self) -> dict[str, Task]:
        """What is being done, by its place in running/."""
        found = {}
        for place in listed(self._places.running):
            with suppress(OSError, CorruptStore):
                found[place] = journal.read_file(f"{self._places.running}/{place}")
        for task in self._lines.slots.in_hand().values():
            found.setdefault(place_of(task.id), task)
        return found

    def _path(self, place: str) -> str:
        """Of what runs there: in running/, or in a slot."""
        path = f"{self._places.running}/{place}"
        for name, task in self._lines.slots.in_hand().items() if not system.access(path, 0) else ():
            if place_of(task.id) == place:
                return self._lines.slots.path(name)
        return path

    def _abandoned(self, path: str, place: str) -> Claim | None:
        folder, _, name = path.rpartition("/")
        return self._lines.left_in(name) if folder == self._places.slots else self._desk.abandoned(place)

    def say_how_it_ends(self, place: str, task: Task, verdict: Verdict) -> None:
        """Of a task whose worker is about to be killed for that. Whoever gets it afterwards does so."""
        if not self._desk.shared and not self._desk.is_locked(self._path(place)):
            return  # it has ended
        said = Verdict.of(self._places, task)
        if said is None or said.state != "cancelled":  # that was promised to somebody
            verdict.write(self._places, task)

    def settle_place(self, place: str, until: float) -> bool:
        """If its worker is dead, and it was said how this ends. A command that the worker had started has the task
        locked, too, and may take a moment longer to die: that one is waited for until a time."""
        said = f"{self._places.ending}/{name_of(place)}"  # else somebody has settled it, and another one has it by now
        path = self._path(place)
        while self._desk.is_locked(path) and system.access(said, 0) and monotonic() < until:
            sleep(_BETWEEN_TRIES)
        claim = self._abandoned(path, place)
        if claim is None:
            if path.startswith(self._places.slots) and not system.access(path, 0):
                remove(said)  # it had not been begun: whoever begins it is not meant
            return False
        settled = self.settle(claim)
        if not settled:
            claim.abandon()
        return settled

    def cancelled(self, tasks: dict[str, Task]) -> list[str]:
        """Those that somebody wants to be ended."""
        there = set(listed(self._places.ending))
        return [
            place
            for place, task in tasks.items()
            if file_name(task.id) in there
            and (verdict := Verdict.of(self._places, task)) is not None
            and verdict.state == "cancelled"
        ]

    def any_verdict(self) -> bool:
        return bool(listed(self._places.ending))


def _log(text: str, *said: object) -> None:
    import logging

    logging.getLogger("holdfast").warning(text, *said)
