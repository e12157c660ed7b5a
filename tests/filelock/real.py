"""The package filelock and programs that use it, fetched when a test asks for them. Nothing of them is in this tree."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

VERSION = "4.2.8"
REPLACED = Path(__file__).parent / "replaced"
needs_python_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason=f"filelock {VERSION} needs Python 3.11")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def directory() -> Path:
    """A new directory, which is removed when the tests have ended."""
    made = Path(mkdtemp(prefix="from-pypi-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def installed(*packages: str) -> Path:
    """A directory with these packages and what they need, for PYTHONPATH."""
    target = directory()
    pip("install", "--target", str(target), *packages)
    return target


@cache
def source() -> Path:
    """The source distribution of filelock, unpacked."""
    target = directory()
    pip("download", "--no-deps", "--no-binary", "filelock", f"filelock=={VERSION}", "--dest", str(target))
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extractall(target, filter="data")
        else:
            opened.extractall(target)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def environment(*path: Path | str, **more: str) -> dict[str, str]:
    """Variables for a child process that finds these directories first."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(str(one) for one in path), **more}
    found.pop("PYTEST_ADDOPTS", None)
    return found
