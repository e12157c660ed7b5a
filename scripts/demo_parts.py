"""The parts of `make demo` after the first. Each returns whether it went well, and the line that says so."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from demo_screen import progress

import holdfast
from holdfast.events import AppendCondition, ConditionFailed, Event, EventStore, Query

START = multiprocessing.get_context("spawn")
SECONDS = 2.5  # of the replacements
READERS, RACERS, SEATS, TASKS, WORKERS = 2, 4, 100, 30, 3
PATIENCE = 30.0


@contextmanager
def room() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def started(number: int, work: Callable[..., None], *arguments: object) -> Iterator[list[tuple[int, Connection]]]:
    """Processes that call `work(number, pipe, …)`: their pids and pipes. They are killed at the end."""
    found, processes = [], []
    for at in range(number):
        ours, theirs = START.Pipe()
        process = START.Process(target=work, args=(at, theirs, *arguments))
        process.start()
        theirs.close()
        processes.append(process)
        found.append((process.pid or 0, ours))
    try:
        yield found
    finally:
        for process in processes:
            process.kill()
            process.join()


def hear(pipe: Connection) -> object:
    if not pipe.poll(PATIENCE):
        raise TimeoutError("a process of the demo does not answer")
    return pipe.recv()


# 2: a directory is replaced under readers.


def read(_number: int, pipe: Connection, folder: Path) -> None:
    site, reads, mixed = holdfast.AtomicDir(folder / "site"), 0, 0
    pipe.send("ready")
    while not pipe.poll():
        with site.snapshot() as snap:
            pages = [os.open(name, os.O_RDONLY, dir_fd=snap.fd) for name in ("index.html", "style.css")]
            texts = {os.read(page, 100) for page in pages}
            for page in pages:
                os.close(page)
        reads, mixed = reads + 1, mixed + (len(texts) > 1)
    pipe.send((reads, mixed))


def directory() -> tuple[bool, str]:
    with room() as folder:
        site = holdfast.AtomicDir(folder / "site", durable=False)

        def publish(number: int) -> None:
            with site.replace() as new:
                for name in ("index.html", "style.css"):
                    (new / name).write_text(f"version {number}")

        publish(0)
        with started(READERS, read, folder) as readers:
            for _, pipe in readers:
                hear(pipe)
            number, end = 0, time.monotonic() + SECONDS
            while time.monotonic() < end:
                number += 1
                publish(number)
                progress(f"version {number}")
            for _, pipe in readers:
                pipe.send("stop")
            results = [hear(pipe) for _, pipe in readers]
    reads, mixed = (sum(result[at] for result in results) for at in (0, 1))  # type: ignore[index]
    return reads > 0 and not mixed, f"{number} versions, {reads} reads: {mixed or 'none'} saw a mixture of two."


# 3: appends race, with one winner.


def race(number: int, pipe: Connection, folder: Path) -> None:
    store = EventStore(folder / "shop", durable=False)
    for seat in range(SEATS):
        pipe.send("ready")
        pipe.recv()
        condition = AppendCondition(Query.of(types={"SeatSold"}, tags={f"seat:{seat}"}))
        try:
            store.append(Event("SeatSold", {"by": number}, tags={f"seat:{seat}"}), condition)
        except ConditionFailed:
            pass
    pipe.send("done")


def appends() -> tuple[bool, str]:
    with room() as folder:
        with started(RACERS, race, folder) as racers:
            for seat in range(SEATS):
                progress(f"seat {seat}")
                for _, pipe in racers:
                    hear(pipe)
                for _, pipe in racers:  # all of them start at once
                    pipe.send("go")
            for _, pipe in racers:
                hear(pipe)
        sold = list(EventStore(folder / "shop").read())
    tags = Counter(tag for event in sold for tag in event.tags)
    won = Counter(event.data["by"] for event in sold)
    good = len(sold) == SEATS and set(tags.values()) == {1}
    shares = ", ".join(str(won[number]) for number in range(RACERS))
    return good, f"{SEATS} races of {RACERS} processes, {len(sold)} seats sold, none twice. Wins: {shares}."


# 4: tasks, with a killed worker.


def do(_number: int, pipe: Connection, folder: Path) -> None:
    queue = holdfast.TaskQueue(folder / "jobs")
    while (task := queue.claim(timeout=1)) is not None:
        with task:
            if task.payload == "slow" and task.tried == 1:
                pipe.send("working")
                signal.pause()  # it will be killed here, in the middle of the task
            time.sleep(0.02)
            with open(folder / "done.txt", "a") as file:
                file.write(f"{task.payload}\n")
    pipe.send("finished")


def tasks() -> tuple[bool, str]:
    with room() as folder:
        queue = holdfast.TaskQueue(folder / "jobs")
        queue.put("slow")
        with started(1, do, folder) as [(victim, pipe)]:
            hear(pipe)
            queue.put_all([f"task {number}" for number in range(TASKS - 1)])
            with started(WORKERS - 1, do, folder) as others:
                os.kill(victim, signal.SIGKILL)
                progress("a worker was killed")
                for _, other in others:
                    hear(other)
        done = Counter((folder / "done.txt").read_text().splitlines())
        state = queue.get(next(task.id for task in queue.tasks() if task.payload == "slow"))
        counts = queue.stats()
        queue.close()
    good = counts["done"] == len(done) == TASKS and set(done.values()) == {1}
    text = f"{counts['done']} of {TASKS} tasks done, each once. The killed worker's task needed {state.tried} attempts."
    return good, text


# 5: a lock on a server, if one is installed.


@contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0/demo"
    finally:
        process.kill()
        process.wait()


def hold(_number: int, pipe: Connection, url: str) -> None:
    with holdfast.lock(url, ttl=2, timeout=PATIENCE):
        pipe.send("holds")
        signal.pause()


def server() -> tuple[bool | None, str]:
    try:
        import redis  # noqa: F401
    except ImportError:
        return None, "pip install 'holdfast[redis]' and a redis-server show it."
    with room() as folder, redis_server(folder) as url:
        if url is None:
            return None, "no redis-server or valkey-server is installed. docs/engines.md has the engines."
        lock = holdfast.lock(url, ttl=2, timeout=PATIENCE)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                lock.status()
                break
            except holdfast.ConnectionFailed:
                time.sleep(0.02)  # the server starts
        with started(1, hold, url) as [(victim, pipe)]:
            hear(pipe)
            busy = lock.try_acquire() is None
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            progress("waits for the lease of the killed holder")
            with lock as hold_:
                seconds, token = time.monotonic() - began, hold_.token
    return busy, f"on Redis, busy while held; free {seconds:.1f} s after the kill (the lease is 2 s). Token {token}."
