"""Draw the terminal picture of the README from a real run: python scripts/picture.py

The commands below run one after another in a terminal of their own (a pty). What the terminal shows at the end becomes
docs/pictures/terminal.svg. Only the name of the temporary directory is replaced, by /srv/app.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import pyte

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "terminal.svg"
COLUMNS, LINES = 100, 40
COMMANDS = [
    "./build.py &",
    "holdfast run -n build.lock -- make; echo $?",
    "holdfast ls",
    "kill -9 %1; holdfast run build.lock -- echo 'my turn'",
    "holdfast tasks put --quiet jobs a.png b.png c.png d.png",
    "holdfast tasks work jobs --drain -j 2 -- ./resize.sh {}",
    "holdfast tasks stats jobs",
]
BUILD = """\
#!/usr/bin/env python
import time, holdfast

with holdfast.Lock("build.lock"):
    time.sleep(60)
"""
SCRIPTS = {"build.py": BUILD, "resize.sh": "#!/bin/sh\nsleep 0.2\necho resized $1\n"}
WIDTH, HEIGHT, MARGIN = 8.4, 19, 16
COLOURS = {
    "default": "#d6deeb",
    "red": "#ff6b6b",
    "green": "#7bd88f",
    "brown": "#f6c177",
    "yellow": "#f6c177",
    "blue": "#82aaff",
    "cyan": "#7fdbca",
    "magenta": "#c792ea",
    "white": "#ffffff",
    "black": "#7f8c9b",
}


def played(folder: Path) -> pyte.Screen:
    """The screen after all commands."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile"], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment,
        cwd=folder, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert shell.stdin
    for command in COMMANDS:
        stream.feed(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\r\n".encode())
        wait = "until holdfast status build.lock | grep -q LOCKED; do sleep 0.05; done" if command.endswith("&") else ""
        shell.stdin.write(f"{command}\n{wait}\nprintf '\\001'\n".encode())
        shell.stdin.flush()
        seen = b""
        while not seen.endswith(b"\x01"):
            seen += os.read(ours, 65536)
        shown = seen.rstrip(b"\x01").replace(bytes(folder), b"/srv/app")
        stream.feed(shown)
    shell.stdin.close()
    shell.wait()
    os.close(ours)
    return screen


def line_svg(screen: pyte.Screen, number: int) -> str:
    """One line: a `tspan` for each run of characters that look the same."""
    cells = [screen.buffer[number][column] for column in range(COLUMNS)]
    runs: list[tuple[tuple[str, bool], str]] = []
    for cell in cells:
        look = (COLOURS.get(cell.fg, COLOURS["default"]), cell.bold)
        if runs and runs[-1][0] == look:
            runs[-1] = (look, runs[-1][1] + cell.data)
        else:
            runs.append((look, cell.data))
    bold = ' font-weight="bold"'
    spans = "".join(
        f'<tspan fill="{fill}"{bold if is_bold else ""}>{escape(text)}</tspan>' for (fill, is_bold), text in runs
    )
    return f'<text x="{MARGIN}" y="{MARGIN + 40 + number * HEIGHT}" xml:space="preserve">{spans}</text>'


def svg(screen: pyte.Screen) -> str:
    used = max(number for number, line in enumerate(screen.display) if line.strip()) + 1
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), used * HEIGHT + 2 * MARGIN + 34
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 18 * at}" cy="{MARGIN + 4}" r="5.5" fill="{fill}"/>'
        for at, fill in enumerate(("#ff6b6b", "#f6c177", "#7bd88f"))
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14">'
        "<title>A terminal in which programs take turns with holdfast</title>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#101723" stroke="#5b6b80"/>'
    )
    return "\n".join([head, dots, *(line_svg(screen, number) for number in range(used)), "</svg>"]) + "\n"


def main() -> int:
    if shutil.which("bash") is None:
        print("The picture needs bash.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve() / "app"
        folder.mkdir()
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        screen = played(folder)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg(screen))
    print("\n".join(line.rstrip() for line in screen.display).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
