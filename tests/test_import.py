"""What `import holdfast` costs and declares: no module that a plain lock does not need, and types for its users."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faces import PATIENCE

import holdfast

NOT_NEEDED = {"asyncio", "anyio", "ctypes", "dataclasses", "inspect", "logging", "trio", "typing"}


def run(program: str, *args: object) -> str:
    # Without the site's own start-up files, which may import what they like.
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(holdfast.__file__))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


SHOW = "\nimport sys; print(*sys.modules)"
USES = {
    "import": "import holdfast",
    "lock": "import holdfast, sys\nwith holdfast.Lock(sys.argv[1]): pass",
    "shared": "import holdfast, sys\nwith holdfast.Lock(sys.argv[1], shared=True): pass",
    "kept": "import holdfast, sys\nwith holdfast.Lock(sys.argv[1], keep=True, timeout=5): pass",
    "semaphore": "import holdfast, sys\nwith holdfast.Semaphore(sys.argv[1], 2): pass",
}


@pytest.mark.parametrize("use", USES)
def test_an_uncontended_lock_loads_only_what_it_needs(use, tmp_path):
    loaded = set(run(USES[use] + SHOW, tmp_path / "x.lock").split())
    assert "holdfast" in loaded
    assert loaded & NOT_NEEDED == set()


def test_a_blocking_wait_loads_no_event_loop_and_no_ctypes(tmp_path):
    program = (
        "import holdfast, sys, threading\n"
        "lock = holdfast.Lock(sys.argv[1])\n"
        "hold = lock.acquire()\n"
        "waiter = threading.Thread(target=lambda: lock.acquire().release())\n"
        "waiter.start()\n"
        "while not holdfast.process.registry.lines: pass\n"
        "hold.release(); waiter.join()\n"
    )
    loaded = set(run(program + SHOW, tmp_path / "x.lock").split())
    assert loaded & (NOT_NEEDED - {"dataclasses", "inspect"}) == set()


def test_every_public_name_is_there():
    assert [name for name in holdfast.__all__ if not hasattr(holdfast, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        holdfast.Nonsense  # noqa: B018


def test_tasks_need_nothing_that_is_not_declared(tmp_path):
    """anyio does not bring sniffio any more, and trio is there only for those who use it."""
    program = (
        "import sys\n"
        "sys.path.append(sys.argv[2])\n"
        "sys.modules['sniffio'] = sys.modules['trio'] = None\n"
        "import asyncio, holdfast\n"
        "lock = holdfast.Lock(sys.argv[1], fair=False)\n"
        "async def work():\n"
        "    async with lock: await asyncio.sleep(0)\n"
        "async def main():\n"
        "    await asyncio.gather(*(work() for _ in range(3)))\n"
        "asyncio.run(main())\n"
        "print('ok')\n"
    )
    site = Path(importlib.util.find_spec("anyio").origin).parent.parent
    assert run(program, tmp_path / "x.lock", site) == "ok\n"


PROGRAM = """\
import os
from pathlib import Path

import holdfast
from holdfast import Hold, Lock, Semaphore, Status, Timeout


def use(path: str | bytes | Path) -> float:
    lock = Lock(path, shared=True, timeout=5, keep=True, fair=False, mode=0o600)
    with lock as hold:
        hold.check()
        lost: bool = hold.lost
        token: int | None = hold.token
        at: float = hold.acquired_at
    maybe = lock.try_acquire()
    if maybe is not None:
        maybe.release()
    with lock.acquire(timeout=None) as other:
        reveal_type(other)
    status: Status = lock.status()
    pids: list[int | None] = [holder.pid for holder in status.holders]
    return at


async def use_async() -> None:
    async with Semaphore("gpu", permits=4) as hold:
        reveal_type(hold)
    taken = await Lock("x").aacquire(timeout=1.5)
    await taken.arelease()
    try:
        await Lock("x").atry_acquire()
    except Timeout as error:
        where: str | None = error.path


def keep(hold: Hold) -> None:
    hold.release()


keep(Lock("x").acquire())
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_a_typed_program_passes_mypy_strict(tmp_path):
    assert (Path(holdfast.__file__).parent / "py.typed").exists()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import holdfast\nholdfast.Lock(3)\nholdfast.Lock('x').acquire().release(1)\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            str(tmp_path / "cache"),
            program,
            wrong,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=100,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.stderr == ""
    assert [line.partition(":")[0] for line in errors] == ["wrong.py", "wrong.py"], done.stdout
    assert "hold.Hold" in revealed[0] and "hold.Hold" in revealed[1]
