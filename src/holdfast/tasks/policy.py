"""What happens to a task after an attempt. Engines do not decide this."""

from __future__ import annotations

from dataclasses import dataclass
from random import uniform
from typing import Any

from .store import Attempt, Ending


@dataclass(frozen=True)
class Retries:
    """The pause after the first attempt is about `first` seconds, then twice as long each time, at most `longest`."""

    first: float = 1.0
    longest: float = 300.0

    def pause_after(self, tried: int) -> float:
        """A random part, so that tasks that failed together do not all come back together."""
        pause = min(self.longest, self.first * 2.0 ** min(tried - 1, 50))
        return uniform(pause / 2, pause)

    def failed(self, attempt: Attempt, error: str, delay: float | None = None, **more: Any) -> Ending:
        """The task is tried again later, or has failed for good if this was its last attempt."""
        if attempt.tried >= attempt.attempts:
            return Ending(attempt.id, attempt.token, "failed", error=error, **more)
        pause = self.pause_after(attempt.tried) if delay is None else delay
        return Ending(attempt.id, attempt.token, "delayed", pause, error=error, **more)

    def orphaned(self, attempt: Attempt) -> Ending:
        """The worker died. If it had begun the task, that was an attempt. Another worker may take the task at once."""
        return self.failed(attempt, "the worker died", 0.0) if attempt.begun else given_back(attempt)


def given_back(attempt: Attempt) -> Ending:
    return Ending(attempt.id, attempt.token, "delayed", counts=False)


def outcome_of(ending: Ending) -> str:
    """What the end of an attempt is called: "done", "failed", "cancelled", "retried" or "given back"."""
    if ending.state != "delayed":
        return ending.state
    return "retried" if ending.counts else "given back"
