"""Every code block of README.md and docs/ runs. `pages` says how a page marks what its blocks need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.pages import LANGUAGES, ROOT, SHOWN, Block, blocks, in_tests, pages

PAGES = {str(page.relative_to(ROOT)): page for page in pages() if page.exists()}
READY = sorted(PAGES)
NAMED = {"redis": "redis_server", "etcd": "etcd_server"}  # the fixture of each scheme
NEEDS = {"docs/from-eventsourcing.md": "eventsourcing"}  # a package that Python 3.10 does not have


def play(found: list[Block], room: Path, request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    def server(scheme: str) -> str:
        if scheme == "postgresql":
            return str(request.getfixturevalue("postgres"))
        url = str(request.getfixturevalue(NAMED[scheme]).url(""))
        return url.removesuffix("/0/").rstrip("/")

    text = [
        {**vars(block), "text": in_tests(block.text, server) if block.is_run else block.text, "run": block.is_run}
        for block in found
    ]
    environment = {**os.environ, "HOME": str(room), "NO_COLOR": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [sys.executable, str(Path(__file__).with_name("play.py"))]
    return subprocess.run(
        command, input=json.dumps(text), cwd=room, env=environment, text=True, capture_output=True, check=False
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READY)
def test_every_block_of_a_page_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = list(blocks(PAGES[name]))
    if not any(block.is_run or block.note for block in found):
        assert all(block.language in SHOWN for block in found)
        return
    done = play(found, tmp_path, request)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", READY)
def test_every_block_has_a_language_that_is_run_or_only_shown(name: str) -> None:
    unknown = [block.where for block in blocks(PAGES[name]) if block.language not in LANGUAGES | SHOWN]
    assert not unknown, f"a language for these, as tests/docs/pages.py lists them: {unknown}"


@pytest.mark.parametrize("name", READY)
def test_a_block_that_is_not_run_says_why(name: str) -> None:
    notes = [(block.where, block.note) for block in blocks(PAGES[name]) if block.note.startswith("not run")]
    assert not [where for where, note in notes if not re.match(r"not run, because \w+", note)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\n1 / 0\n```", "ZeroDivisionError"),
        ("```sh\nexit 3\n```", "exit status 3"),
        ("```console\n$ echo one\ntwo\n```", "and not\ntwo"),
        ("```pycon\n>>> 1 + 1\n3\n```", "Expected"),
        ("```json\n{]\n```", "JSONDecodeError"),
        ("<!-- example: raises KeyError -->\n```python\npass\n```", "does not raise KeyError"),
        ("```sh\necho one\n```\n<!-- example: prints -->\n```text\ntwo\n```", "printed\none"),
    ],
)
def test_a_block_that_is_wrong_fails(text: str, why: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(f"# Wrong\n\n{text}\n")
    done = play(list(blocks(page)), tmp_path, request)
    assert done.returncode != 0
    assert "wrong.md" in done.stderr or why in done.stderr
    assert why in done.stderr


def test_blocks_share_names_files_and_setups(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = tmp_path / "right.md"
    page.write_text("""# Right
<!-- example: setup sh
mkdir site
-->
<!-- example: file add.py -->
```python
a = 1
```
```python
import add
print(add.a, await __import__("asyncio").sleep(0, 2))
```
<!-- example: prints -->
```text
1 …
```
<!-- example: exit 4 -->
```sh
cd site
exit 4
```
<!-- example: until "ready" -->
```sh
echo ready; sleep 1000
```
```console
$ echo one two
one …
```
""")
    sys_path = "```python\nimport sys\nsys.path.insert(0, '')\n```\n"
    page.write_text(page.read_text().replace("# Right\n", f"# Right\n{sys_path}"))
    done = play(list(blocks(page)), tmp_path, request)
    assert done.returncode == 0, done.stderr


def test_urls_become_those_of_the_servers_of_the_tests() -> None:
    servers: dict[str, Any] = {"postgresql": "postgresql://t:p@127.0.0.1:5/d", "redis": "redis://127.0.0.1:6"}
    text = "a('postgresql://ci@db/ops?name=deploy') redis://cache:6379/0/nightly"
    wanted = "a('postgresql://t:p@127.0.0.1:5/d?name=deploy') redis://127.0.0.1:6/0/nightly"
    assert in_tests(text, servers.__getitem__) == wanted
