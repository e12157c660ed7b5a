"""The questions that docs/benchmarks.md answers, one table for each: which rows of which section stand in it.

A section of `run.py` without a question is on the page, too, with its tables as they are. To compare it with the
figures of the repository, and to shorten it, add a question.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Rows = dict[str, str]  # label on the page: name of the row in the table that was measured


@dataclass(frozen=True)
class Question:
    """columns: label, and a part of the title of the table. versus: the ratio of a peer is our speed over its speed."""

    group: str
    section: str
    title: str
    text: str
    columns: Rows
    ours: Rows
    floor: Rows = field(default_factory=dict)
    peers: Rows = field(default_factory=dict)
    less_is_better: bool = True
    versus: bool = False
    plot: str = ""
    noisy: bool = False  # the ratio of two waits, which differs too much from run to run to be compared

    def compared(self) -> list[str]:
        """The rows whose ratio says how good we are."""
        if self.noisy:
            return []
        return list((self.peers if self.versus else self.ours).values())


LOCKS, DIRECTORIES, TASKS = "Locks on one machine", "Directories", "Task queue"
EVENTS, ENGINES, COMMAND = "Event store", "Locks on servers", "Import and command"


_HERE = {"{here}": ", {here}", "tmpfs": ", tmpfs"}  # {here}: the kind of file system of the current directory
_PEERS = {name: name for name in ("filelock.FileLock", "fasteners.InterProcessLock", "portalocker.Lock")}
_WITH = {"`with lock`": "holdfast: with lock", "`with Lock(path)`, a new object": "holdfast: with Lock(path)"}
_QUEUES = {name: name for name in ("localqueue", "litequeue")} | {
    "huey, FileHuey": "huey, FileHuey",
    "persist-queue, SQLiteAckQueue": "persist-queue, SQLiteAckQueue",
}

QUESTIONS = (
    Question(
        LOCKS,
        "keep",
        "What does a free lock cost if the file stays?",
        "`Lock(path, keep=True)`, acquired and released. The ratio is the time over that of the floor. "
        "A new object costs one more look at the file system.",
        _HERE,
        _WITH,
        {"open, flock, fstat, stat, close": "raw Python", "the same in C": "raw C"},
        {**_PEERS, "zc.lockfile.LockFile": "zc.lockfile.LockFile", "flufl.lock.Lock": "flufl.lock.Lock"},
    ),
    Question(
        LOCKS,
        "ephemeral",
        "What does a free lock cost if the file is removed?",
        "`Lock(path)`, acquired and released: the default. The ratio is the time over that of the floor.",
        _HERE,
        _WITH,
        {
            "open, flock, fstat, stat, unlink, close": "raw Python",
            "the system calls of our rules": "the system calls of the rules alone",
        },
    ),
    Question(
        LOCKS,
        "lockfile",
        "What does a free lock file cost, without fsync?",
        "`LockFile(path, durable=False)`. The ratio is the time over that of the floor. "
        "The peers write less, and most of them do not detect a holder that was killed.",
        _HERE,
        {"`with lock`": "holdfast: with lock"},
        {
            "open with O_EXCL, write, close, unlink": "raw Python",
            "the system calls of our rules": "the system calls of the rules, raw",
        },
        {name: name for name in ("filelock.SoftFileLock", "flufl.lock.Lock", "lockfile.LockFile")},
    ),
    Question(
        LOCKS,
        "durable",
        "What does a free lock file cost, with fsync?",
        "`LockFile(path)`: the default. On tmpfs an fsync does nothing.",
        _HERE,
        {"`with lock`": "holdfast: with lock"},
        {"the same system calls, with two fsyncs": "raw Python"},
    ),
    Question(
        LOCKS,
        "handoff",
        "How soon does a waiter have the lock after a release?",
        "Two processes; the median. The waiter has slept. The ratio is the time over that of the floor. "
        "filelock polls every 50 ms.",
        _HERE,
        {
            "`Lock`": "ephemeral, fair=True, blocking",
            "`Lock(timeout=10)`": "ephemeral, fair=True, timeout=10",
            "`Lock`, asyncio": "ephemeral, fair=True, asyncio",
            "`Lock(keep=True, fair=False)`": "keep=True, fair=False, blocking",
            "`LockFile`": "LockFile, blocking",
        },
        {"blocking flock": "raw flock"},
        {"filelock": "filelock"},
        plot="handoff",
    ),
    Question(
        LOCKS,
        "flock-loop",
        "How long is the wait beside a program that locks in a loop?",
        "A C program locks and unlocks the file. The columns say how long it holds the lock, and for how long it "
        "does not. The ratio is the wait over that of the floor. Where the lock is mostly free, or held briefly, the "
        "time is that of Python, and the target is 4 times the blocking `Lock`.",
        {
            f"{held} and {gap} µs": f"holds for {held} µs, with gaps of {gap} µs"
            for gap in (10, 150)
            for held in (20, 200, 1000)
        },
        {
            "`Lock`": "Lock, no timeout",
            "`Lock(timeout=10)`": "Lock, timeout=10",
            "`Lock`, asyncio": "Lock, asyncio",
        },
        {"blocking flock, in C": "C, blocking flock"},
        noisy=True,
    ),
    Question(
        LOCKS,
        "contention",
        "What does it cost to serve 8 processes in order?",
        "8 processes acquire and release without a pause; `keep=True`. "
        "The ratio is the speed over that of `fair=False`. The shares of the processes have a plot below.",
        _HERE,
        {
            "`fair=True`": "keep=True, timeout=None, fair=True",
            "`fair=True, timeout=30`": "keep=True, timeout=30, fair=True",
        },
        {"`fair=False`": "keep=True, timeout=None, fair=False"},
        less_is_better=False,
    ),
    Question(
        LOCKS,
        "throughput",
        "How fast is a lock that many processes want?",
        "Acquisitions a second of all processes; `keep=True`. All but one of them wait. "
        "The ratio is the speed over that of a bare flock.",
        {"speed": "number of processes"},
        {
            f"`fair={fair}`, {number} processes": f"Lock, fair={fair}, {number}"
            for number in (8, 128)
            for fair in (True, False)
        },
        {f"bare flock, {number} processes": f"bare flock, {number}" for number in (8, 128)},
        {f"filelock, {number} processes": f"filelock, {number}" for number in (8, 128)},
        less_is_better=False,
        plot="throughput shares",
    ),
    Question(
        LOCKS,
        "waiters",
        "What does a hand-off cost with many waiters?",
        "CPU time of all processes for each hand-off. The queue stays as long as it is. The ratio is to 8 waiters.",
        {"CPU time": "CPU time per hand-off"},
        {f"{number} waiters": f"{number} waiting processes, standing" for number in (50, 200)},
        {"8 waiters": "8 waiting processes, standing"},
    ),
    Question(
        DIRECTORIES,
        "directory",
        "What does it cost to replace a directory?",
        "1,000 files of 4 KiB. The time to write them is not counted. The ratio of a commit is to the fsyncs, "
        "that of the copy to `cp -a`.",
        _HERE,
        {
            "`AtomicDir.replace`": "holdfast: replace, durable",
            "the copy of `AtomicDir.edit`": "holdfast: edit, the copy",
        },
        {"fsync of all files, rename": "fsyncs of 1000 files, exchange, raw", "`cp -a`": "cp -a --reflink=auto"},
    ),
    Question(
        TASKS,
        "tasks",
        "How many tasks do two workers complete in a second, without fsync?",
        "Empty tasks, each claimed and completed. The ratio of a peer says how many times as fast we are.",
        {"{here}": "not durable, {here} here: ", "tmpfs": "not durable, tmpfs: "},
        {"`claim`, `complete`": "holdfast", "`Worker`": "holdfast, Worker"},
        {"the same SQL, nothing else": "the SQL alone"},
        _QUEUES,
        less_is_better=False,
        versus=True,
    ),
    Question(
        TASKS,
        "tasks",
        "How many tasks do two workers complete in a second, with fsync?",
        "The same, with each completion on disk before the call returns.",
        {
            "{here}": "empty tasks, durable, {here} here",
            "ext4 with a journal": "empty tasks, durable, ext4 with a journal",
        },
        {"`claim`, `complete`": "holdfast", "`Worker`": "holdfast, Worker"},
        {"the same SQL, nothing else": "the SQL alone"},
        {name: label for name, label in _QUEUES.items() if "huey" not in name},
        less_is_better=False,
        versus=True,
    ),
    Question(
        TASKS,
        "tasks",
        "How many tasks does a process put in a second?",
        "The ratio of a peer says how many times as fast we are.",
        {
            "tmpfs": "Put, not durable, tmpfs",
            "{here}": "Put, not durable, {here} here",
            "{here}, with fsync": "Put, durable, {here} here",
        },
        {"`put`": "holdfast"},
        {"the same SQL, nothing else": "the SQL alone"},
        _QUEUES,
        less_is_better=False,
        versus=True,
    ),
    Question(
        TASKS,
        "tasks-wake",
        "How soon does an idle worker begin a task?",
        "The median, from just before `put` to inside the handler.",
        _HERE,
        {"`Worker`": "holdfast, Worker", "`claim(timeout=None)`": "holdfast, claim(timeout=None)"},
        peers={"localqueue": "localqueue, Worker", "huey": "huey, FileHuey, Consumer"},
    ),
    Question(
        TASKS,
        "tasks-idle",
        "What do idle workers cost?",
        "CPU time of all processes for a put and its task; the ratio is to 1 idle worker. "
        "The last row: an idle worker takes over the task of a worker that was killed.",
        _HERE,
        {
            "64 idle workers": "CPU time of a put and its task, 64 idle",
            "from SIGKILL to the next claim": "claimed by an idle worker after SIGKILL",
        },
        {"1 idle worker": "CPU time of a put and its task, 1 idle"},
    ),
    Question(
        TASKS,
        "tasks-many",
        "Does a long queue slow a claim down?",
        "Claim and complete, after the first thousand of a process, `durable=False`. The ratio is to 100 tasks.",
        {"time": "TaskQueue with few and with many tasks"},
        {
            f"{number:,} tasks {what}": f"claim + complete, steady, {number:,} {what}"
            for number, what in ((10_000, "waiting"), (100_000, "waiting"), (1_000_000, "waiting"))
        }
        | {f"{number:,} tasks done": f"claim + complete, steady, {number:,} done" for number in (100_000, 10_000_000)},
        {"100 tasks waiting": "claim + complete, steady, 100 waiting"},
        plot="sizes",
    ),
    Question(
        TASKS,
        "tasks-postgres",
        "How many tasks do two processes complete in a second on PostgreSQL?",
        "With fsync on the server. The ratio says how many times as fast `Worker` is.",
        {"speed": "empty tasks on PostgreSQL"},
        {
            "`Worker`": "holdfast Worker",
            "`Worker`, coroutines": "holdfast Worker, coroutine, concurrency=100",
            "`claim`, `complete`": "holdfast, by hand",
        },
        peers={"procrastinate": "procrastinate, concurrency=30", "pgqueuer": "pgqueuer, psycopg driver"},
        less_is_better=False,
        versus=True,
    ),
    Question(
        EVENTS,
        "events",
        "What does a durable append cost?",
        "The time for each event. The ratio is the speed over that of the floor. Threads share an fdatasync.",
        {"{here}": "EventStore, durable appends"},
        {
            "one thread": "holdfast: one thread",
            "one thread, under a condition": "holdfast: one thread, conditional",
            "16 threads": "holdfast: 16 threads",
        },
        {
            "write, fdatasync": "raw Python: write + fdatasync",
            "the system calls of our rules": "the system calls of the rules alone",
        },
        less_is_better=False,
    ),
    Question(
        EVENTS,
        "events-writers",
        "How fast are several writers?",
        "Durable appends a second of all writers. The ratio is the speed over that of the floor.",
        {"speed": "number of writers"},
        {f"{number} writers": f"EventStore, {number}" for number in (2, 4, 8, 16)},
        {"write, fdatasync, 1 process": "write + fdatasync, 1 process"},
        {f"SQLite, synchronous=FULL, {number} writers": f"SQLite, synchronous=FULL, {number}" for number in (2, 16)},
        less_is_better=False,
        plot="writers",
    ),
    Question(
        EVENTS,
        "events-processes",
        "How fast are several writers on a file system with a journal?",
        "The same, beside ext4 with a journal on a loop device. The target is also that 99 of 100 appends take 5 ms.",
        {"{here}": "{here} here", "ext4 with a journal": "ext4 with a journal"},
        {f"{number} writers": f"holdfast: {number} processes" for number in (4, 8)},
        less_is_better=False,
    ),
    Question(
        EVENTS,
        "events-lock",
        "What does the store's lock cost an append?",
        "One process, median latency. The ratio is the time over that of a store whose lock does nothing. "
        "store-lock.md asks for at most 1.05 x (`SingleInstance_PerformanceNotDegraded`) and assumes appends of 10 ms. "
        "On CIFS, where they take 100 ms, [checks.py](../tests/netfs/checks.py) measured 0.99 x on 2026-11-18.",
        {"{here}": "{here} here", "ext4 with a journal": "ext4 with a journal"},
        {
            "with the lock": "durable, with the store's lock",
            "with the lock, `durable=False`": "not durable, with the store's lock",
        },
        {
            "without the lock": "durable, without it",
            "with the six system calls of the lock": "durable, with the system calls of the lock alone",
            "without the lock, `durable=False`": "not durable, without it",
        },
    ),
    Question(
        EVENTS,
        "events-peers",
        "What does an append cost without fsync?",
        "The time for each event. The ratio is the speed over that of an SQLite table, batches over batches.",
        {"{here}": "Appends that wait for no disk"},
        {
            "`durable=False`": "holdfast: durable=False",
            "`durable=False`, batches of 100": "holdfast: durable=False, batches of 100",
        },
        {name: name for name in ("SQLite, synchronous=OFF", "SQLite, synchronous=OFF, batches of 100")},
        {
            "SQLite, synchronous=OFF, write-ahead log": "SQLite, synchronous=OFF, with a write-ahead log",
            "eventsourcing, SQLite": "eventsourcing, SQLite",
            "UmaDB, with fsync": "UmaDB (durable)",
        },
        less_is_better=False,
    ),
    Question(
        EVENTS,
        "events-sizes",
        "Does a large store slow it down?",
        "`durable=False`. The ratio is to the same with 1,000 events.",
        {"time": "EventStore by the number of events"},
        {
            f"{label}, 1,000,000 events": f"{name}, 1,000,000"
            for label, name in (
                ("append", "append, durable=False"),
                ("append under a condition", "append under a condition"),
                ("read the 10 events of a tag", "read the 10 events of a tag"),
                ("open, read the last event", "open, and read the last event"),
            )
        },
        {"append, 1,000 events": "append, durable=False, 1,000"},
    ),
    Question(
        EVENTS,
        "events-million",
        "How fast is a large store read?",
        "Memory is that of a process that has it open, with Python.",
        {"{here}": "EventStore with "},
        {
            "read all events": "full read",
            "10 events by tag": "10 events by tag",
            "memory": "memory of a process that has it open",
        },
        peers={"read all events, eventsourcing": "full read, eventsourcing with SQLite"},
    ),
    Question(
        EVENTS,
        "events-postgres",
        "How fast are conditional appends on PostgreSQL?",
        "With fsync on the server. The ratio is the speed over that of the floor.",
        {"1 process": "fsync on, 1 process", "8 processes": "fsync on, 8 processes"},
        {"`append`": "holdfast"},
        {"one insert in a transaction": "one insert in a transaction"},
        {"eventsourcing": "eventsourcing, PostgresDCBRecorderTT"},
        less_is_better=False,
    ),
    Question(
        EVENTS,
        "events-conditional",
        "How fast are conditional appends beside other event stores?",
        "In a directory, each on disk before it returns; UmaDB is a server. The ratio of a peer says how many times as "
        "fast we are.",
        {
            "1 process": "in a directory, 1 process",
            "8 processes": "in a directory, 8 processes",
        },
        {"`append` under a condition": "EventStore"},
        {"write, fdatasync, 1 process": "write + fdatasync, 1 process"},
        {"eventsourcing, SQLite": "eventsourcing, SQLite", "UmaDB": "UmaDB"},
        less_is_better=False,
        versus=True,
    ),
    Question(
        EVENTS,
        "events-takeover",
        "How soon does the next consumer go on after a SIGKILL?",
        "From the kill of the active consumer of a subscription until the next one has the event; the median.",
        {"time": "the next consumer gets the event"},
        {"a directory": "a directory", "PostgreSQL": "PostgreSQL"},
    ),
    Question(
        ENGINES,
        "engines",
        "What does a free lock cost on a server?",
        "The server is on the same machine. The ratio is the time over that of the bare calls of the client.",
        {engine: f"{engine}: acquire and release" for engine in ("PostgreSQL", "Redis", "etcd")},
        {"`holdfast.lock(url)`": "holdfast.lock"},
        {"bare calls": "bare calls of the client", "the same, with a fencing token": "bare calls, with a token"},
        {name: name for name in ("redis-py Lock", "python-redis-lock", "tooz", "etcd3gw lock")},
    ),
    Question(
        ENGINES,
        "engines-handoff",
        "How soon does a waiter have the lock after a release on a server?",
        "Two processes; the median. redis-py and tooz poll; etcd3gw does not wait, so it is called in a loop.",
        {engine: f"{engine}: hand-off" for engine in ("PostgreSQL", "Redis", "etcd")},
        {"`holdfast.lock(url)`": "holdfast.lock"},
        peers={name: name for name in ("redis-py Lock", "python-redis-lock", "tooz", "etcd3gw lock")},
    ),
    Question(
        COMMAND,
        "import",
        "What does `import holdfast` cost?",
        "A whole Python process. The ratio is the time over that of the floor.",
        {"time": "Import"},
        {"`import holdfast`": 'python -c "import holdfast"'},
        {"`import os, fcntl, threading`": 'python -c "import os, fcntl, threading"'},
        {"`import filelock`": 'python -c "import filelock"'},
    ),
    Question(
        COMMAND,
        "command",
        "What does the `holdfast` command cost?",
        "From start to end. The ratio is the time over that of the floor.",
        {"time": "Command"},
        {
            "`holdfast run x -- true`": "holdfast run x -- true",
            "`holdfast lockfile acquire y`": "holdfast lockfile acquire y",
            "`holdfast status y`": "holdfast status y, free",
        },
        {"Python with argparse and subprocess": 'python -c "import argparse, subprocess"'},
        {"`flock x true`": "flock x true"},
    ),
)
