"""Run the blocks of one page in the current directory: python play.py < blocks.json. The first failure ends it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

LIMIT = 90.0  # seconds for a block
names: dict[str, Any] = {"__name__": "__main__"}
printed = ""


def fail(block: dict[str, Any], why: str) -> None:
    raise SystemExit(f"{block['page']}:{block['line']}: {why}")


def matches(wanted: str, found: str) -> bool:
    """`…` stands for any text. Spaces at the ends of lines do not count."""
    lines = ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (wanted, found)]
    return re.fullmatch(".*?".join(re.escape(part) for part in lines[0].split("…")), lines[1], re.S) is not None


def run_python(block: dict[str, Any]) -> str:
    """The block in the names of the page. Its lines have the numbers of the page in a traceback."""
    text = "\n" * block["line"] + block["text"]
    code = compile(text, block["page"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    wanted = re.match(r"raises ([\w.]+)", block["note"])
    output = io.StringIO()
    signal.signal(signal.SIGALRM, lambda *_: fail(block, f"does not end within {LIMIT:.0f} s"))
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with contextlib.redirect_stdout(output):
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
    except BaseException as error:
        if wanted is None or type(error).__name__ != wanted[1].rpartition(".")[2]:
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if wanted:
        fail(block, f"does not raise {wanted[1]}")
    return output.getvalue()


def shell(block: dict[str, Any], text: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-eu", "-o", "pipefail", "-c", text]
    try:
        return subprocess.run(
            command, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        fail(block, f"does not end within {LIMIT:.0f} s:\n{text}")
        raise


def run_sh(block: dict[str, Any]) -> str:
    if until := re.match(r'until "(.*)"', block["note"]):
        return run_until(block, until[1])
    wanted = re.match(r"exit (\d+)", block["note"])
    done = shell(block, block["text"])
    if done.returncode != (int(wanted[1]) if wanted else 0):
        fail(block, f"exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def run_until(block: dict[str, Any], text: str) -> str:
    """Run the block until it prints the text, then end it. It is a process group of its own."""
    process = subprocess.Popen(
        ["bash", "-eu", "-c", block["text"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    signal.alarm(int(LIMIT))  # ends this process if the text never comes
    seen = b""
    assert process.stdout
    try:
        while text.encode() not in seen:
            if not (more := os.read(process.stdout.fileno(), 65536)):
                fail(block, f"ended before it printed {text!r}:\n{seen.decode()}")
            seen += more
    finally:
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    return seen.decode()


def run_console(block: dict[str, Any]) -> str:
    steps = re.split(r"^\$ ", block["text"], flags=re.M)
    if steps[0].strip():
        fail(block, "the first line has to begin with '$ '")
    for step in steps[1:]:
        command, _, wanted = step.partition("\n")
        done = shell(block, f"exec 2>&1\n{command}")  # in the order in which a terminal shows it
        if not matches(wanted, done.stdout + done.stderr):
            fail(block, f"{command!r} prints\n{done.stdout}{done.stderr}\nand not\n{wanted}")
    return ""


def run_pycon(block: dict[str, Any]) -> str:
    test = doctest.DocTestParser().get_doctest(block["text"], names, block["page"], block["page"], block["line"])
    output = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(test, out=output.write, clear_globs=False).failed:
        fail(block, output.getvalue())
    names.update(test.globs)
    return ""


def parse(block: dict[str, Any]) -> str:
    if block["language"] == "toml":
        if sys.version_info >= (3, 11):
            import tomllib

            tomllib.loads(block["text"])
    elif block["language"] == "json":
        json.loads(block["text"])
    else:
        for line in block["text"].splitlines():
            json.loads(line)
    return ""


RUN = {"python": run_python, "sh": run_sh, "console": run_console, "pycon": run_pycon}


def main() -> None:
    global printed
    for block in json.load(sys.stdin):
        note = block["note"]
        if note.startswith("file "):
            with open(note.removeprefix("file "), "w", encoding="utf-8") as file:
                file.write(block["text"] + "\n")
        elif note.startswith("prints"):
            if not matches(block["text"], printed):
                fail(block, f"the block before it printed\n{printed}")
        elif block["run"]:
            printed = RUN.get(block["language"], parse)(block)


if __name__ == "__main__":
    main()
