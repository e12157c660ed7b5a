"""Programs that use locks, a queue and an event store, for pictures and for tests in a browser.

    with Scene(directory) as scene:         # real processes; they end with the block
        scene.deploy.send("release")

Each program runs until it is told to end, by a line on its standard input, and answers "ready" when it has done what it
was told. Nothing waits for a moment of time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import time

from holdfast import Lock
from holdfast.events import Event, EventStore, Query
from holdfast.tasks import TaskQueue

READY = "print('ready', flush=True); input()\n"
PROGRAMS = {
    "deploy.py": "import holdfast\n"
    "with holdfast.LockFile('deploy.lock', tag='v2.4.1', fence=True, heartbeat=60).acquire():\n    " + READY,
    "build.py": "import holdfast\nwith holdfast.Lock('build.lock').acquire():\n    " + READY,
    "train.py": "import holdfast\nwith holdfast.Semaphore('gpu.sem', 4).acquire():\n    " + READY,
    "backup.py": "import holdfast\nwith holdfast.LockFile('backup.lock', tag='nightly').acquire():\n    " + READY,
    "thumbnails.py": "import sys\nfrom holdfast.tasks import TaskQueue\n"
    "queue = TaskQueue('jobs')\nwith queue.claim() as task:\n"
    "    task.progress(float(sys.argv[1]), 40, 'pages')\n    " + READY,
    "mailer.py": "from holdfast.events import EventStore\n"
    "with EventStore('shop').subscribe('mailer', after=int(__import__('sys').argv[1])) as events:\n"
    "    first = next(events)\n    " + READY,
}
FAILING = """
def login(user, password):
    raise PermissionError("535 authentication failed")

def send(mail):
    login("shop", None)
"""


class Program:
    """A running program of the scene."""

    def __init__(self, directory: Path, *words: object) -> None:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            ["python", *map(str, words)],  # as a user calls it: the pages show this
            executable=sys.executable,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def until_ready(self) -> Program:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", line
        return self

    def end(self) -> None:
        """Let it release what it holds, and end."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Scene:
    """A directory with locks, a queue "jobs" and a store "shop", and the programs that use them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        for name, text in PROGRAMS.items():
            (directory / name).write_text(text)

    def start(self, *words: object) -> Program:
        return self._stack.enter_context(Program(self.directory, *words))

    def __enter__(self) -> Scene:
        with ExitStack() as stack:
            stack.push(self._stack)
            self._make_locks()
            self._make_tasks()
            self._make_events()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make_locks(self) -> None:
        self.start("backup.py").until_ready().kill()
        self.deploy = self.start("deploy.py").until_ready()
        self.build = self.start("build.py").until_ready()
        self.train = [self.start("train.py") for _ in range(3)]
        for program in self.train:
            program.until_ready()
        self.waiters = [self.start("build.py"), self.start("build.py")]
        lock = Lock(str(self.directory / "build.lock"))
        _until(lambda: len(lock.status().waiters) == 2)

    def _make_tasks(self) -> None:
        self.queue = queue = TaskQueue(str(self.directory / "jobs"), retry_after=0)
        _run_tasks(queue)
        self._spread(queue)
        for number in range(2):
            queue.put({"book": f"catalogue-{number + 1}.pdf", "size": [400, 600]}, priority=9, timeout=600)
        self.workers = [self.start("thumbnails.py", done).until_ready() for done in (31, 12)]
        for name in ("spring.csv", "summer.csv", "autumn.csv"):
            queue.put({"import": name}, key="imports")
        queue.put({"report": "weekly"}, delay=5400)
        queue.schedule("nightly-backup", {"backup": "all"}, cron="30 2 * * *", tz="Europe/Berlin")
        queue.schedule("heartbeat", {"ping": "api"}, every=300)

    def _spread(self, queue: TaskQueue) -> None:
        """Let the tasks that ended have ended in the course of the last hour: a test cannot wait for that."""
        import sqlite3

        now = time()
        with sqlite3.connect(f"{queue.path}/queue.db") as database:
            query = "select seq, history from task where ended_at is not null order by seq"
            rows = database.execute(query).fetchall()
            for place, (seq, history) in enumerate(rows):
                minute = (place * 61 // len(rows)) + (place * place) % 7 - 3
                ended = now - max(0.5, min(59, 59 - minute)) * 60
                past = json.loads(history or "[]")
                for attempt in past:
                    attempt.update(started_at=ended - 7, ended_at=ended - 5)
                change = "update task set put_at = ?, started_at = ?, ended_at = ?, history = ? where seq = ?"
                database.execute(change, (ended - 8, ended - 3, ended, json.dumps(past), seq))
        database.close()

    def _make_events(self) -> None:
        self.store = store = EventStore(str(self.directory / "shop"))
        for order in range(1, 41):
            tags = [f"order:{order}", f"customer:{order % 7}"]
            store.append(Event("OrderPlaced", {"total": 12 + order * 7 % 90, "items": order % 4 + 1}, tags=tags))
            if order % 3:
                store.append(Event("OrderPaid", {"method": "card" if order % 2 else "transfer"}, tags=tags))
            if order % 4 == 0:
                store.append(Event("OrderShipped", {"parcel": f"00340{order:05}"}, tags=tags))
        store.project("totals", lambda total, event: total + event.data["total"], 0, Query.of(["OrderPlaced"]))
        store.append(Event("OrderPlaced", {"total": 89, "items": 3}, tags=["order:41", "customer:6"]))
        self.mailer = self.start("mailer.py", store.head() - 2).until_ready()


def _run_tasks(queue: TaskQueue) -> None:
    """Tasks that have ended: 300 that are done, and some that have failed."""
    queue.put_all([{"photo": f"img-{number:04}.jpg", "width": 1200} for number in range(300)], attempts=1)
    queue.put({"to": "ada@example.org", "subject": "Your order 17", "password": "hunter2"}, id="mail-17", attempts=2)
    queue.put({"to": "grace@example.org", "subject": "Your order 23"}, id="mail-23", attempts=1)
    while (claim := queue.claim()) is not None:
        if claim.id.startswith("mail"):
            claim.fail(_failure())
        else:
            claim.complete({"width": 1200, "height": 800})
    queue.close()


def _failure() -> Exception:
    """An error of a file that the picture shows."""
    names: dict[str, object] = {}
    exec(compile(FAILING, "/srv/app/mail.py", "exec"), names)
    try:
        names["send"](None)  # type: ignore[operator]
    except PermissionError as error:
        frames = error.__traceback__
        return error.with_traceback(frames and frames.tb_next)
    raise AssertionError


def _until(condition: object) -> None:
    from support import until

    until(condition)
