"""The machine, and the versions of all that is compared."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVERS = {"PostgreSQL": "postgres", "Redis": "redis-server", "etcd": "etcd"}


def machine() -> dict[str, str]:
    """What must be the same for figures to stand on one page."""
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
    }


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def versions() -> dict[str, str]:
    """Of the servers and of the packages of the group `bench`, as far as they are installed."""
    found = {"SQLite": sqlite3.sqlite_version}
    for name, program in SERVERS.items():
        if number := _of_program(program):
            found[name] = number
    listed = re.search(r"^bench = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    for name in re.findall(r'"([\w.-]+)', listed[1] if listed else ""):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # not for this version of Python
            pass
    return found


def _of_program(name: str) -> str:
    """Debian keeps the server of PostgreSQL out of PATH."""
    path = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), "")
    if not path:
        return ""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"\d+\.\d+(\.\d+)?", text)
    return number[0] if number else ""


def commit() -> str:
    """With a plus if the package or the benchmark was changed since."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "src", "bench"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() + ("+" if changed.stdout.strip() else "") or "unknown"


def file_system(path: str) -> str:
    """The kind of the file system that the path is on."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind = line.split()[:3]
        if (path + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]
