"""Run one section of run.py in a process of its own, with a time limit, and leave no process of it behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figures, condensed
from groups import SHORTENED
from measure import JOURNALLED, PREFIX, SHM, remove

ROOT = Path(__file__).resolve().parent.parent
RUN = Path(__file__).with_name("run.py")
TO_CLEAN_UP_S = 20.0
KERNEL_THREADS = "2"  # the process id of their parent

clock = time.monotonic


def measure(name: str, quick: bool, directory: str, limit: float, tick: Callable[[], None]) -> Figures:
    """The figures of one section, or as many as there are, and the error."""
    began, busy, mine = clock(), _busy_s(), _mine_s()
    with tempfile.TemporaryDirectory() as room, open(f"{room}/log", "w+b") as log:
        command = [sys.executable, str(RUN), "--only", name, "--json", f"{room}/json", "--dir", directory]
        command += ["--quick"] if quick or name in SHORTENED else []
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
        )
        late = False
        try:
            while process.poll() is None and not late:
                tick()
                late = clock() - began > limit
                time.sleep(0.1)
        finally:
            end(process)
            clean(process.pid, [directory, SHM])
        file = Path(room, "json")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        log.seek(0)
        output = log.read().decode(errors="replace")
    found: Figures = json.loads(text) if text else {"sections": {}}
    result: Figures = found["sections"].get(name) or {
        "quick": quick,
        "load": os.getloadavg()[0],
        "error": "",
        "tables": [],
    }
    if late:
        result["error"] = f"not done after {limit:.0f} s"
    elif process.returncode and not result["error"]:
        result["error"] = "an acquisition or a task was lost" if text else f"exit status {process.returncode}"
    if result["error"]:
        print("", *output.splitlines()[-25:], sep="\n    ", flush=True)
    seconds = clock() - began
    others = max(0.0, _busy_s() - busy - (_mine_s() - mine)) / seconds / (os.cpu_count() or 1)
    return condensed(result) | {"seconds": round(seconds, 1), "others": round(others, 2)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it stops its servers. Then kill it, and all that it has left."""
    if process.poll() is not None:
        return
    left = _family(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(TO_CLEAN_UP_S)
    except subprocess.TimeoutExpired:
        left |= _family(process.pid)
    for pid, started in left.items():
        if _started(pid) == started:  # and not another process with its number
            os.kill(pid, signal.SIGKILL)
    process.wait()


def clean(pid: int, parents: list[str]) -> None:
    """Remove what a section that was killed has left."""
    for parent in parents:
        for left in Path(parent).glob(f"{PREFIX}{pid}-*"):
            if (left / JOURNALLED).is_mount():
                subprocess.run(["umount", "--lazy", left / JOURNALLED], check=False)
            remove(str(left))


def _family(pid: int) -> dict[int, str]:
    """The process and its descendants, each with the time of its start."""
    found = {pid: _started(pid)}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            continue
        for child in children:
            found |= _family(int(child))
    return {one: started for one, started in found.items() if started}


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _busy_s() -> float:
    """The CPU time of all programs, without that of the kernel's own threads, such as those that write to a disk.

    What a virtual machine was denied counts.
    """
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    kernel = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == KERNEL_THREADS:
            kernel += int(fields[11]) + int(fields[12])
    return (user + nice + system + steal - kernel) / os.sysconf("SC_CLK_TCK")


def _mine_s() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)
