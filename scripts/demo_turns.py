"""The first part of `make demo`: processes take turns on one lock, and one is killed while it holds it.

Each turn reads a number from a file, thinks, and writes the number plus one. Without a lock, turns would overwrite each
other. On a terminal the table is live; in a pipe it is printed now and then.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from demo_screen import BOLD, DIM, GREEN, LIVE, PLAIN, RED

import holdfast

WORKERS, SECONDS, VICTIM, KILL_AFTER = 5, 5.0, 3, 1.5


def work(number: int, folder: Path, report: Connection) -> None:
    """Take turns until told to stop by a closed pipe. Says `holds` and `done`, each with the time."""
    lock = holdfast.Lock(folder / "demo.lock")
    counter = folder / "counter"
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        with lock:
            report.send(("holds", time.monotonic()))
            count = int(counter.read_text())
            if number == VICTIM and time.monotonic() - began > KILL_AFTER:
                signal.pause()  # it will be killed here, with the lock in its hands
            time.sleep(0.05)
            counter.write_text(str(count + 1))
        report.send(("done", time.monotonic()))


class Show:
    """What is known of the workers, and the table that shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = holdfast.Lock(folder / "demo.lock")
        self.turns = [0] * WORKERS
        self.finished: set[int] = set()
        self.killed_at = self.taken_over_at = 0.0
        self.began = time.monotonic()
        self.drawn = 0

    def draw(self, pids: list[int]) -> None:
        status = self.lock.status()
        holders = [holder.pid for holder in status.holders]
        line = [waiter.pid for waiter in status.waiters]
        rows = [f"{BOLD}{WORKERS} processes take turns on demo.lock{PLAIN}   {time.monotonic() - self.began:4.1f} s"]
        for number, pid in enumerate(pids):
            if number == VICTIM and self.killed_at:
                state = f"{RED}killed with SIGKILL while it held the lock{PLAIN}"
            elif number in self.finished:
                state = f"{DIM}finished{PLAIN}"
            elif pid in holders:
                state = f"{GREEN}holds the lock{PLAIN}"
            elif pid in line:
                state = "next" if line[0] == pid else f"{DIM}number {line.index(pid) + 1} in the queue{PLAIN}"
            else:
                state = f"{DIM}on its way{PLAIN}"
            rows.append(f"  worker {number}  pid {pid:<8}{self.turns[number]:4} turns   {state}")
        rows.append(f"  turns reported: {sum(self.turns)}")
        if LIVE and self.drawn:
            print(f"\033[{self.drawn}A", end="")
        print("\n".join(f"\033[K{row}" if LIVE else row for row in rows), flush=True)
        self.drawn = len(rows)

    def hear(self, number: int, message: tuple[str, float]) -> None:
        what, when = message
        if what == "done":
            self.turns[number] += 1
        elif self.killed_at and not self.taken_over_at and number != VICTIM:
            self.taken_over_at = when


def turns() -> tuple[bool, str]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    (folder / "counter").write_text("0")
    start = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(WORKERS):
        ours, theirs = start.Pipe(duplex=False)
        process = start.Process(target=work, args=(number, folder, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    show = Show(folder)
    try:
        watch(show, pipes, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return verdict(show)


def watch(show: Show, pipes: list[Connection], processes: list[multiprocessing.process.BaseProcess]) -> None:
    pids = [process.pid or 0 for process in processes]
    open_pipes, next_draw, stuck = dict(zip(pipes, range(WORKERS), strict=True)), 0.0, False
    while open_pipes:
        for pipe in wait(list(open_pipes), timeout=0.1):
            number = open_pipes[pipe]  # type: ignore[index]
            try:
                show.hear(number, pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                show.finished.add(number)
                del open_pipes[pipe]  # type: ignore[arg-type]
        holders = [holder.pid for holder in show.lock.status().holders]
        # The victim holds it and does not move any more: seen twice in a row without news.
        was_stuck, stuck = stuck, pids[VICTIM] in holders and time.monotonic() - show.began > KILL_AFTER + 1
        if stuck and was_stuck and not show.killed_at:
            show.killed_at = time.monotonic()
            os.kill(pids[VICTIM], signal.SIGKILL)
        if time.monotonic() >= next_draw:
            show.draw(pids)
            next_draw = time.monotonic() + (0.1 if LIVE else 2.0)
    show.draw(pids)


def verdict(show: Show) -> tuple[bool, str]:
    counted, reported = int((show.folder / "counter").read_text()), sum(show.turns)
    left = sorted(path.name for path in show.folder.iterdir() if path.name.startswith("demo.lock"))
    lost = reported - counted
    delay = 1000 * (show.taken_over_at - show.killed_at)
    for path in show.folder.iterdir():
        path.unlink()
    show.folder.rmdir()
    text = f"{reported} turns, and the counter says {counted}. The killed process's lock was free after {delay:.1f} ms."
    if left:
        text += f" Left behind: {', '.join(left)}."
    return not lost and not left and bool(show.taken_over_at), text
