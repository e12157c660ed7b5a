"""How an attempt is to end, by somebody who could not write it into the task's file: `Verdict`."""

from __future__ import annotations

import json
import os

from ..files import create_file, read_all, remove
from . import journal
from .journal import Task
from .places import Places, file_name, make, move


class Verdict:
    """How an attempt is to end, by somebody who could not write it into the task's file, because its worker had it.

    A file in ending/ says so, of one attempt; whoever gets the task next does it.
    """

    def __init__(self, state: str, because: str) -> None:
        self.state = state
        self.because = because

    def write(self, places: Places, task: Task) -> None:
        name = file_name(task.id)
        private = f"{places.new}/{os.getpid()}.{os.urandom(8).hex()}"
        make(places.new)
        said = {"is": self.state, "because": self.because, "token": task.token, "put": task.put}
        create_file(private, journal.line(said, "said"), 0o644)
        try:
            move(private, f"{places.ending}/{name}")
        except BaseException:
            remove(private)
            raise

    @staticmethod
    def of(places: Places, task: Task) -> Verdict | None:
        try:
            said = json.loads(read_all(f"{places.ending}/{file_name(task.id)}"))
            if said["token"] == task.token and said["put"] == task.put:  # of this task, not of one of the same id
                return Verdict(said["is"], str(said["because"]))
        except (ValueError, KeyError, TypeError, OSError):  # none, or something that is none
            pass
        return None
