"""`make release-check`: build sdist and wheel into dist/, check them, install the wheel in a clean environment, use it.

Each step prints a line. The first one that fails ends it. Nothing is uploaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# In the sdist, so that distributions can run the tests and build the pages.
IN_SDIST = ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile", "docs/cli.md"]
IN_SDIST += ["tests/servers.py", "scripts/test.py", "src/holdfast/py.typed"]
IN_WHEEL = ["holdfast/__init__.py", "holdfast/py.typed", "holdfast/cli/completions/holdfast.bash"]
IN_WHEEL += ["holdfast/web/static", "holdfast/web/templates"]
USE = """
import asyncio, holdfast
with holdfast.Lock("x.lock", timeout=5) as hold:
    assert holdfast.Lock("x.lock").try_acquire() is None
async def main():
    async with holdfast.LockFile("y.lock", tag="release"):
        pass
asyncio.run(main())
queue = holdfast.TaskQueue("jobs")
queue.put("a")
with queue.claim() as task:
    assert task.payload == "a"
print("holdfast", holdfast.__version__, "from", holdfast.__file__)
"""


def main() -> int:
    try:
        wheel, sdist = build()
        check_contents(wheel, sdist)
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        say("twine finds nothing wrong with the metadata")
        use(wheel)
    except (subprocess.CalledProcessError, AssertionError) as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    if "[project.urls]" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        say("note: pyproject.toml has no [project.urls] yet. Add the repository before the first release")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def run(*words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(words, cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST))
    [wheel], [sdist] = list(DIST.glob("*.whl")), list(DIST.glob("*.tar.gz"))
    say(f"built {wheel.name} and {sdist.name}")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in IN_WHEEL if not any(found.startswith(name) for found in names)]
    assert not missing, f"the wheel lacks {missing}"
    strange = [name for name in names if not name.startswith(("holdfast/", "holdfast-"))]
    assert not strange, f"the wheel has {strange}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_SDIST if name not in inside]
    assert not missing, f"the sdist lacks {missing}"
    strange = [name for name in inside if name.startswith((".venv", "build/", "dist/")) or "__pycache__" in name]
    assert not strange, f"the sdist has {strange[:5]}"
    say(f"the wheel has {len(names)} files, the sdist {len(inside)}")


def use(wheel: Path) -> None:
    """Install the wheel where nothing of this checkout is, and use it from an empty directory."""
    with tempfile.TemporaryDirectory(prefix="holdfast-release-") as made:
        room = Path(made)
        venv.create(room / "venv", with_pip=True)
        scripts = room / "venv" / ("Scripts" if os.name == "nt" else "bin")
        python = str(next(scripts.glob("python*")))
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel))
        (empty := room / "empty").mkdir()
        text = run(python, "-I", "-W", "error", "-c", USE, cwd=empty)
        assert str(room) in text, f"another Holdfast was imported: {text}"
        command = str(scripts / "holdfast")
        assert "my turn" in run(command, "run", "z.lock", "--", python, "-c", "print('my turn')", cwd=empty)
        assert run(command, "--version", cwd=empty).startswith("holdfast ")
        run(command, "doctor", ".", cwd=empty)
        say(f"the wheel works in a clean environment: {text.split(' from ')[0]}")


if __name__ == "__main__":
    sys.exit(main())
