"""`python -m holdfast.filelock --check DIR`."""

from __future__ import annotations

import pytest

from holdfast.filelock.__main__ import main

PROGRAM = """
import filelock
from filelock import FileLock, SoftReadWriteLock as S, Timeout
from filelock._api import BaseFileLock
lock = FileLock("x", poll_interval=0.1)
with lock.acquire(poll_interval=3, timeout=1):
    print(lock._context)
filelock.StrictSoftFileLock("x")
readers = filelock.ReadWriteLock("x")
class Mine(FileLock):
    def _acquire(self):
        pass
print(filelock.__version__)
"""


def test_every_line_that_changes_is_named(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(PROGRAM)
    assert main(["--check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix(f"{tmp_path}/a/b.py:").split(": ", 2)[:2] for line in lines[:-1]]
    assert found == [
        ["2", "import"],
        ["3", "import"],
        ["3", "unsupported"],
        ["4", "unsupported"],
        ["5", "note"],
        ["6", "note"],
        ["7", "unsupported"],
        ["8", "unsupported"],
        ["9", "note"],
        ["11", "unsupported"],
        ["13", "note"],
    ]
    assert "from holdfast.filelock import FileLock, SoftReadWriteLock as S, Timeout" in lines[1]
    assert lines[-1] == "2 imports to change, 4 notes, 5 uses that are not supported"


def test_a_program_that_works_ends_with_0(tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text("from filelock import FileLock as F\n\nwith F('x', timeout=3):\n    pass\n")
    (tmp_path / "other.py").write_text("print('no filelock')\n")
    (tmp_path / "broken.py").write_text("import something (\n")
    assert main(["--check", str(tmp_path)]) == 0
    expected = f"{file}:1: import: from holdfast.filelock import FileLock as F"
    assert capsys.readouterr().out.splitlines()[0] == expected


@pytest.mark.parametrize(("text", "line"), [("\nimport filelock (\n", 2), ("# coding: nothing\nimport filelock\n", 1)])
def test_a_file_that_cannot_be_checked_is_named(tmp_path, capsys, text, line):
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert main(["--check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}:{line}: note: this file was not checked: ")


def test_the_lines_are_right(tmp_path, capsys):
    """The proposed imports run."""
    file = tmp_path / "program.py"
    file.write_text(
        "import filelock as f\nfrom filelock.asyncio import AsyncSoftFileLock\nfrom filelock import Timeout\n"
    )
    main(["--check", str(file)])
    names: dict[str, object] = {}
    for line in capsys.readouterr().out.splitlines()[:-1]:
        exec(line.split(": ", 2)[2], names)
    assert {"f", "AsyncSoftFileLock", "Timeout"} <= names.keys()


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        main(["--check", str(tmp_path / "nothing")])
