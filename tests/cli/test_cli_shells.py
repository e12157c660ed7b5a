"""Completion in zsh and fish, which scripts/unpack.sh fetches."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import unpacked

from holdfast.cli.completion import FOLDER

pytestmark = [pytest.mark.slow]

CHECKOUT = Path(__file__).parents[2]
FISH = """
function __fish_complete_path; end
source $argv[1]
for line in 'holdfast ru' 'holdfast run --sha' 'holdfast completion z' 'holdfast dir ro'
    complete -C $line
end
"""
ZSH = """
fpath=($1 $2/usr/share/zsh/functions/Completion $2/usr/share/zsh/functions/Completion/{Base,Unix,Zsh,Linux})
module_path=($2/usr/lib/*/zsh/*(/))
autoload -Uz compinit && compinit -u -D && print -r -- ${_comps[holdfast]}
"""


@pytest.fixture(scope="module")
def root() -> Path:
    return unpacked("shells", "zsh", "zsh-common", "fish", "fish-common", "libpcre2-32-0")


def test_fish(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "try.fish"
    script.write_text(FISH)
    libraries = ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu*")))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "HOME": str(tmp_path)}
    done = subprocess.run(
        [root / "usr/bin/fish", "--no-config", script, FOLDER / "holdfast.fish"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert offered == ["run", "--shared", "zsh", "rollback"], done


def test_zsh(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "try.zsh"
    script.write_text(ZSH)
    subprocess.run([root / "bin/zsh", "-n", FOLDER / "_holdfast"], check=True)
    done = subprocess.run([root / "bin/zsh", "-f", script, FOLDER, root], capture_output=True, text=True, check=False)
    assert done.stdout == "_holdfast\n", done
