"""What a page may change, with --allow-actions: retry, cancel and purge tasks, pause a queue, break a lock file.

    GET  …/confirm?action=retry&state=failed     says what would happen, to how many tasks, and asks
    POST …/act                                   does it, and goes back

The audit log gets a JSON line before the action and one after it. If the first one cannot be written, nothing is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ..collect.locks import lock_at
from ..collect.search import Filter, count_matching, matching
from ..errors import HoldfastError
from ..files import OwnedFd
from ..owner import without_passwords
from ..status import Status
from ..tasks.store import ENDED, Selection
from .console import Console
from .text import query
from .views import FILTERS, Context, NotFound, Params, can_break, filter_of, queue_of

# A cancelled task with a key makes a parked one ready. So the parked ones are cancelled before.
_CANCEL_ORDER = ("blocked", "parked", "delayed", "ready", "running")
# The states in which a task can be changed so, and what happens.
_TASKS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "retry": (ENDED, "Retry", "They wait again, with all their attempts."),
    "cancel": (_CANCEL_ORDER, "Cancel", "They will not run. Running tasks are killed by their workers."),
    "purge": (ENDED, "Delete", "They are deleted with their results. This cannot be undone."),
}
_QUEUE = {
    "pause": ("Pause", "Workers begin no task until the queue is resumed. Running tasks end."),
    "resume": ("Resume", "Workers begin tasks again."),
}


def audit_path() -> str:
    """Where the audit log is if --audit-log does not say so."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "holdfast", "web-audit.jsonl")


class Audit:
    """A file that only grows: a JSON object in each line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, outcome: str, **facts: Any) -> None:
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"at": at, "outcome": outcome, **facts}, default=str) + "\n"
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), mode=0o700, exist_ok=True)
        with OwnedFd(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
            os.write(file.fd, line.encode())
            os.fsync(file.fd)


class Actions:
    """The actions, if they are allowed."""

    def __init__(self, console: Console, audit: Audit | None) -> None:
        self._console, self._audit = console, audit
        self.allowed = audit is not None

    # Ask.

    def confirm(self, console: Console, params: Params) -> tuple[str, Context]:
        """The page that asks."""
        action = params.get("action", "")
        hidden = {name: params[name] for name in ("action", "id", *FILTERS) if name in params}
        if action == "break":
            return self._confirm_break(params)
        shown = queue_of(console, params)
        url = f"/queue/{shown.slug}"
        context: Context = {"target": shown.name, "hidden": hidden, "url": f"{url}/act", "back": url, "which": ""}
        context["danger"] = action in ("cancel", "purge")
        if action in _QUEUE:
            verb, what = _QUEUE[action]
            return "confirm.html", {**context, "verb": verb, "what": what, "number": None, "noun": "queue"}
        if action not in _TASKS:
            raise NotFound(f"There is no action {action!r}.")
        states, verb, what = _TASKS[action]
        context |= {"verb": verb, "what": what, "noun": "task"}
        if "id" in params:
            back = f"{url}/task?{urlencode({'id': params['id']}, errors='surrogateescape')}"
            return "confirm.html", {**context, "number": 1, "which": params["id"], "back": back}
        wanted = filter_of(console, params)
        some = _filters(wanted, states)
        number = sum(count_matching(shown.queue, one) for one in some)
        back = f"{url}?{urlencode({name: hidden[name] for name in hidden if name != 'action'})}"
        return "confirm.html", {**context, "number": number, "back": back, "states": [one.state for one in some]}

    def _confirm_break(self, params: Params) -> tuple[str, Context]:
        status = self._console.lock(params.get("name", ""))
        if status is None or not can_break(status):
            raise NotFound(f"{params.get('name', '')} is not a lock file that is held, or not any more.")
        back = f"/lock?{urlencode({'name': status.path}, errors='surrogateescape')}"
        what = (
            f"It is {status.explain()}. The next process acquires it. If the holder is still alive, it does not notice "
            "until it checks its hold, and two processes may work at the same time."
        )
        hidden = {"action": "break", "holder": _identity(status)}
        words = {
            "verb": "Break",
            "noun": "lock",
            "which": "",
            "number": None,
            "url": "/act?" + query({"name": status.path}),  # a form cannot send bytes that are not UTF-8
            "back": back,
            "danger": True,
        }
        return "confirm.html", {**words, "target": status.path, "what": what, "hidden": hidden}

    # Do.

    def act(self, path_params: Params, body: bytes, sender: str) -> Response:
        """Carry out a form, and redirect to where it came from."""
        if self._audit is None:
            return plain("This server changes nothing. Start it with --allow-actions.", 403)
        form = dict(parse_qsl(body.decode("ascii", "replace"), keep_blank_values=True, errors="surrogateescape"))
        params = {**form, **path_params}
        action = params.get("action", "")
        try:
            if action not in (*_TASKS, *_QUEUE) if "slug" in params else action != "break":
                raise NotFound(f"There is no action {action!r}.")
            target = params.get("name", "") if action == "break" else queue_of(self._console, params).name
        except NotFound as error:
            return plain(str(error), 404)
        which = {name: form[name] for name in ("id", *FILTERS) if form.get(name)}
        facts: Context = {"sender": sender, "action": action, "target": target, "tasks": which}
        if action not in _TASKS:
            del facts["tasks"]
        return self._act(params, self._audit, facts)

    def _act(self, params: Params, audit: Audit, facts: Context) -> Response:
        try:
            audit.write("begins", **facts)
        except OSError as error:
            return plain(f"Nothing was done: the audit log cannot be written ({error}).", 500)
        try:
            number, back = self._do(params)
        except (HoldfastError, OSError, ValueError) as error:
            why = without_passwords(str(error))
            outcome: Context = {"outcome": "failed", "error": why}
            answer: Response = plain(why, 409)
        else:
            joint = "&" if "?" in back else "?"
            answer = RedirectResponse(f"{back}{joint}did={params['action']}&number={number}", 303)
            outcome = {"outcome": "done", "number": number}
        try:
            audit.write(**outcome, **facts)
        except OSError as error:
            return plain(f"The action has ended: {outcome}. The audit log does not say so: {error}", 500)
        return answer

    def _do(self, params: Params) -> tuple[int, str]:
        action = params["action"]
        if action == "break":
            return self._break(params)
        shown = queue_of(self._console, params)
        queue, url = shown.queue, f"/queue/{shown.slug}"
        if action in _QUEUE:
            (queue.pause if action == "pause" else queue.resume)()
            return 1, url
        states, _, _ = _TASKS[action]
        change = {"retry": queue.store.retry, "cancel": queue.store.cancel, "purge": queue.store.delete}[action]
        if "id" in params:
            number = change(Selection(ids=[params["id"]]))
            if action == "purge":
                return number, url
            return number, f"{url}/task?{urlencode({'id': params['id']}, errors='surrogateescape')}"
        number = 0
        for one in _filters(filter_of(self._console, params), states):
            number += sum(change(Selection(ids=ids, states=states)) for ids in matching(queue, one))
        return number, f"{url}?{urlencode({name: params[name] for name in FILTERS if params.get(name)})}"

    def _break(self, params: Params) -> tuple[int, str]:
        path = params.get("name", "")
        status = self._console.lock(path)
        if status is None or not can_break(status):
            raise ValueError(f"{path} is not a lock file that is held. Nothing was done.")
        if _identity(status) != params.get("holder"):
            raise ValueError(f"{path} has another holder by now. Nothing was done.")
        lock_at(path, status.kind).break_()
        self._console.locks.was_broken(status)
        return 1, f"/lock?{urlencode({'name': path}, errors='surrogateescape')}"


def plain(text: str, status: int) -> Response:
    """A line of text. Half characters are replaced, as in `app.respond`."""
    return PlainTextResponse(text.encode(errors="replace"), status)


def _identity(status: Status) -> str:
    """Tells whether a lock still has the holder that the page showed."""
    facts = [[one.pid, one.host] for one in status.holders], status.timestamp, status.token
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _filters(wanted: Filter, states: tuple[str, ...]) -> list[Filter]:
    """A filter for each state of the filter in which the action is possible."""
    some = [state for state in states if state in wanted.states]
    return [Filter(state, wanted.function, wanted.key, wanted.text, wanted.in_data) for state in some]
