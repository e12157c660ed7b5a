"""The screen of `holdfast top`. Textual draws it: tables, keys and dialogs that work over ssh and in 80 by 24."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from .. import LockFile
from ..collect.locks import all_locks, state_of, user_of
from ..errors import HoldfastError
from . import arguments, listing, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..status import Status

# Together 80, with a space after each. What a wider terminal has more goes to the first and the last.
_COLUMNS = {"LOCK": 19, "STATE": 8, "KIND": 7, "AGE": 7, "WAIT": 5, "LONGEST": 8, "PID": 8, "HOLDER": 18}
_COLOURS = {"held": "green", "shared": "green", "stale": "yellow", "corrupt": "yellow", "free": "dim"}


def longest_wait(status: Status) -> float:
    return max((time.time() - waiter.since for waiter in status.waiters if waiter.since is not None), default=0.0)


_ORDERS: dict[str, Callable[[Status], tuple[object, ...]]] = {
    "name": lambda status: (status.path,),
    "state": lambda status: (not status.held, status.path),
    "age": lambda status: (status.since is None or not status.held, status.since or 0.0, status.path),
    "waiting": lambda status: (-len(status.waiters), status.path),
    "longest wait": lambda status: (-longest_wait(status), status.path),
}


class Question(ModalScreen[bool]):
    """Asks before something is done that cannot be undone."""

    CSS = """
    Question { align: center middle; }
    Question > Vertical { width: 70; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar = [Binding("y", "answer(True)", "yes"), Binding("n,escape", "answer(False)", "no")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._text))
            yield Static(Text("\ny: take it away    n: leave it", style="bold"))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


Found = TypeVar("Found")


class Live(App[None], Generic[Found]):
    """A screen that is drawn again at an interval: a thread calls `find`, and `show` draws its result."""

    ENABLE_COMMAND_PALETTE = False
    QUIETLY: ClassVar = [Binding("ctrl+c", "quit", "quit", show=False, priority=True)]

    def __init__(self, every: float) -> None:
        super().__init__()
        self._every = every
        self._looking = False
        self._ending = False

    def find(self) -> Found:
        raise NotImplementedError

    def show(self, found: Found) -> None:
        raise NotImplementedError

    def on_ready(self) -> None:
        self._look()
        self.set_interval(self._every, self._look)

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self.run_worker(self._find, thread=True, exit_on_error=False)

    def _find(self) -> None:
        """In a thread: a directory may be slow to read."""
        found = None
        try:
            found = self.find()
        except (HoldfastError, OSError):
            pass  # it may be there again the next time
        if not self._ending:
            self.call_from_thread(self._found, found)

    def _found(self, found: Found | None) -> None:
        self._looking = False
        if found is not None:
            self.show(found)

    async def action_quit(self) -> None:
        self._ending = True
        self.exit()


class Screen(Live["list[Status]"]):
    """A table of locks, and more about the one under the cursor."""

    TITLE = "holdfast top"
    CSS = """
    #head { height: 1; background: $primary; color: $text; padding: 0 1; }
    #table { height: 1fr; }
    #more { height: 6; border-top: solid $primary; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #filter { display: none; height: 3; }
    """
    BINDINGS: ClassVar = [
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("h", "held", "held only"),
        Binding("b", "break", "break"),
        Binding("q", "quit", "quit"),
        Binding("escape", "clear", "clear", show=False),
        *Live.QUIETLY,
    ]

    def __init__(self, directories: list[str], recursive: bool, every: float) -> None:
        super().__init__(every)
        self._directories = directories
        self._recursive = recursive
        self._locks: list[Status] = []
        self._shown: list[Status] = []
        self._order = "state"
        self._held_only = False
        self._wanted = ""
        self._looked = False
        self._name_width = _COLUMNS["LOCK"]

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable[Text](id="table", cursor_type="row", zebra_stripes=True, cell_padding=0)
        yield Input(placeholder="show only what contains…", id="filter")
        yield Static(id="more")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name, width in _COLUMNS.items():
            table.add_column(name, width=width, key=name)
        table.focus()
        self._draw_rest()

    def on_resize(self) -> None:
        table, more = self.query_one(DataTable), max(0, self.size.width - sum(_COLUMNS.values()))
        columns = {str(column.label): column for column in table.ordered_columns}
        if columns:
            columns["LOCK"].width = self._name_width = _COLUMNS["LOCK"] + more // 3
            columns["HOLDER"].width = _COLUMNS["HOLDER"] + more - more // 3
            self._draw()

    def find(self) -> list[Status]:
        try:
            return all_locks(self._directories, self._recursive, stop=lambda: self._ending)
        except OSError:
            return []

    def show(self, found: list[Status]) -> None:
        self._looked = True
        self._locks = found
        self._draw()

    def _draw(self) -> None:
        table = self.query_one(DataTable)
        under_cursor = self._chosen()
        self._shown = sorted(filter(self._is_wanted, self._locks), key=_ORDERS[self._order])
        row = table.cursor_row
        table.clear()
        for status in self._shown:
            table.add_row(*self._cells(status), key=status.path)
        paths = [status.path for status in self._shown]
        if under_cursor is not None and under_cursor.path in paths:
            row = paths.index(under_cursor.path)
        if paths:
            table.move_cursor(row=min(row, len(paths) - 1))
        self._draw_rest()

    def _is_wanted(self, status: Status) -> bool:
        if self._held_only and not status.held:
            return False
        text = f"{status.path} {listing.who(status)} {listing.pids_of(status)} {user_of(status) or '-'}"
        return self._wanted.lower() in text.lower()

    def _cells(self, status: Status) -> list[Text]:
        state = state_of(status)
        waited = longest_wait(status)
        texts = (
            _name(status, self._name_width),
            state,
            listing.kind_name(status),
            listing.age_of(status),
            str(len(status.waiters) or "-"),
            output.duration(waited) if status.waiters else "-",
            listing.pids_of(status),
            output.shown(listing.who(status)),
        )
        return [Text(text, style=_COLOURS.get(state, ""), no_wrap=True, overflow="ellipsis") for text in texts]

    def _draw_rest(self) -> None:
        held = sum(status.held for status in self._locks)
        waiting = sum(len(status.waiters) for status in self._locks)
        text = (
            f"holdfast top   {output.many(len(self._locks), 'lock')}, {held} held, {waiting} waiting   by {self._order}"
        )
        if self._held_only:
            text += "   held only"
        if self._wanted and not self.query_one("#filter").display:  # the field itself shows it, as long as it is open
            text += f"   containing {self._wanted!r}"
        self.query_one("#head", Static).update(Text(text))
        chosen = self._chosen()
        nothing = "looking…" if not self._looked else "nothing to show" if self._locks else "no locks here"
        about = _details(chosen) if chosen is not None else nothing
        self.query_one("#more", Static).update(Text(about))

    def _chosen(self) -> Status | None:
        row = self.query_one(DataTable).cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    def on_data_table_row_highlighted(self) -> None:
        self._draw_rest()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        self._hide_filter()

    def _hide_filter(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self.query_one(DataTable))
        self._draw_rest()

    def action_sort(self) -> None:
        names = list(_ORDERS)
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self._draw()

    def action_held(self) -> None:
        self._held_only = not self._held_only
        self._draw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.set_focus(field)

    def action_clear(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._hide_filter()

    def action_break(self) -> None:
        chosen = self._chosen()
        if chosen is None or not chosen.held:
            self.notify("nobody holds this lock")
        elif arguments.is_url(chosen.path):
            self.notify("the server releases this lock when its holder has ended: end the holder", severity="warning")
        elif chosen.kind != "file":
            self.notify("a kernel lock cannot be taken away; it is free when its holder has ended", severity="warning")
        else:
            question = f"{output.shown(chosen.path)}\n{output.shown(chosen.explain())}\n\nTake it away?"
            self.push_screen(Question(question), lambda yes: self._break(chosen) if yes else None)

    def _break(self, status: Status) -> None:
        try:
            LockFile(status.path).break_()
        except (HoldfastError, OSError) as error:
            self.notify(str(error), severity="error")
        else:
            self.notify(f"{output.shown(status.path)} is free")
        self._look()


def _name(status: Status, width: int) -> str:
    """The path of a lock. A URL ends with the name of the lock, so that its beginning is cut."""
    text = output.shown(listing.relative(status.path))
    is_cut = arguments.is_url(status.path) and len(text) >= width  # with a space behind it
    return f"…{text[2 - width :]}" if is_cut else text


def _details(status: Status) -> str:
    lines = [output.shown(f"{listing.relative(status.path)}: {status.explain()}")]
    for holder in status.holders[:1]:
        if holder.pid is not None:
            lines.append(output.shown(f"{user_of(status) or '-'}: {holder.command or ''}"))
    for number, waiter in enumerate(status.waiters[:3], 1):
        waited = output.duration(time.time() - waiter.since) if waiter.since is not None else "?"
        lines.append(output.shown(f"{number}. pid {waiter.pid} waits for {waited}  {waiter.command or ''}"))
    if len(status.waiters) > 3:
        lines[-1] += f"   and {len(status.waiters) - 3} more"
    return "\n".join(lines)
