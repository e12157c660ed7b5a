"""Which of the requests that are committed together may append: each condition against what comes before it.

A condition that held up to some position needs to be checked only behind it. So an engine checks conditions before it
takes its lock (`look_ahead`), up to the head that is visible then. Under the lock (`admit`) only what was appended
since is left. A search stops at the first match; see `docs/events.md` for what bounds it.
"""

from __future__ import annotations

from ..errors import ConditionFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .draft import Draft
    from .model import AppendCondition, Query
    from .requests import Request

    # The last event that matches a query, behind a position and up to another one; None: there is none.
    LastMatch = Callable[[Query, int, int], int | None]


def look_ahead(request: Request, name: str, head: int, last_match: LastMatch) -> None:
    """Check the condition of a request up to `head`. Raises ConditionFailed."""
    condition = request.condition
    if condition is None:
        return
    after = max(condition.after or 0, request.checked)
    if head > after:
        match = last_match(condition.fail_if_match, after, head)
        if match:
            raise _conflict(name, condition, match)
        request.checked = head


def admit(requests: Iterable[Request], name: str, head: int, last_match: LastMatch) -> list[Request]:
    """Those that may append. Each gets the position of its last event; each of the others gets its error.

    For a caller that holds the lock, so that no other append comes first. The log ends with `head`.
    """
    admitted: list[Request] = []
    drafts: list[Draft] = []
    for request in requests:
        if request.behind is not None and request.behind.error is not None:
            request.error = request.behind.error
            continue
        if request.condition is not None:
            try:
                _check(request, name, drafts, head, last_match)
            except (ConditionFailed, ValueError, TypeError, AttributeError) as error:  # its own, not the others'
                request.error = error
                continue
        drafts += request.drafts
        request.position = head + len(drafts)
        admitted.append(request)
    return admitted


def _check(request: Request, name: str, drafts: list[Draft], head: int, last_match: LastMatch) -> None:
    condition = request.condition
    assert condition is not None
    after = condition.after or 0
    if after > head + len(drafts):
        raise ValueError(f"after={after} is no position of {name}, which ends with {head}")
    query = condition.fail_if_match
    for at in range(len(drafts) - 1, max(-1, after - head - 1), -1):
        if query.matches(drafts[at]):
            raise _conflict(name, condition, head + 1 + at)
    after = max(after, request.checked)
    match = last_match(query, after, head) if head > after else None
    if match:
        raise _conflict(name, condition, match)


def _conflict(name: str, condition: AppendCondition, position: int) -> ConditionFailed:
    since = "" if condition.after is None else f", and came after position {condition.after}"
    return ConditionFailed(
        f"{name}: not appended: event {position} matches the condition{since}. Read and decide again, as "
        "store.execute does.",
        path=name,
        position=position,
    )
