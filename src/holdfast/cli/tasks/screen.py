"""The screen of `holdfast tasks watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Static

from ...collect.tasks import look
from .. import output
from ..screen import Live
from .text import age_of
from .watch import about, failure_line, summary

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ...collect.tasks import Snapshot
    from ...tasks import Task, TaskQueue

# Together 80, with a space after each. The last column gets the rest of a wider terminal.
_COLUMNS = {"RUNNING": 26, "TIME": 7, "TRIED": 6, "WORKER": 16, "PROGRESS": 25}


class Screen(Live["Snapshot"]):
    """How many tasks are in each state, the running tasks, and the newest failures."""

    TITLE = "holdfast tasks watch"
    CSS = """
    #head { height: 1; background: $primary; color: $text; padding: 0 1; }
    #table { height: 1fr; }
    #failures { height: 7; border-top: solid $primary; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    BINDINGS: ClassVar = [Binding("q", "quit", "quit"), *Live.QUIETLY]

    def __init__(self, queue: TaskQueue, name: str, every: float) -> None:
        super().__init__(every)
        self._queue = queue
        self._title = name

    def compose(self) -> ComposeResult:
        yield Static(f"{output.shown(self._title)}   looking…", id="head", markup=False)
        yield DataTable[Text](id="table", cursor_type="row", zebra_stripes=True, cell_padding=0)
        yield Static(id="failures")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name, width in _COLUMNS.items():
            table.add_column(name, width=width, key=name)
        table.focus()

    def on_resize(self) -> None:
        for column in self.query_one(DataTable).ordered_columns:
            if str(column.label) == "PROGRESS":
                more = max(0, self.size.width - sum(_COLUMNS.values()))
                column.width = _COLUMNS["PROGRESS"] + more

    def find(self) -> Snapshot:
        return look(self._queue)

    def show(self, found: Snapshot) -> None:
        self.query_one("#head", Static).update(Text(f"{output.shown(self._title)}   {summary(found)}"))
        table = self.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for task in found.running:
            table.add_row(*_cells(task, about(task, found)), key=task.id)
        if found.running:
            table.move_cursor(row=min(row, len(found.running) - 1))
        self.query_one("#failures", Static).update(_failures(found.failures))


def _cells(task: Task, about: str) -> list[Text]:
    texts = (
        output.shown(task.id),
        age_of(task),
        f"{task.tried}/{task.attempts}",
        output.shown(task.worker or "?"),
        about,
    )
    return [Text(text, style="green", no_wrap=True, overflow="ellipsis") for text in texts]


def _failures(tasks: tuple[Task, ...]) -> Text:
    lines = [failure_line(task).strip() for task in tasks]
    return Text("\n".join(lines), style="red") if lines else Text("no task has failed", style="dim")
