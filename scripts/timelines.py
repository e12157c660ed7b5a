"""Draw the failure timelines of docs/concepts.md: python scripts/timelines.py

Each becomes docs/pictures/timeline-NAME.svg. Time runs downwards. A step that does harm is red, and the step with which
Holdfast prevents it is green. The pictures are readable on a light and on a dark page.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from textwrap import wrap

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
LANE, MARGIN, HEAD, LINE, PAD, GAP = 250, 12, 30, 17, 8, 8
LETTERS = 31  # in a line of a box
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 } .head { font-weight: 600; text-anchor: middle }
.lane { stroke: #94a3b8; stroke-width: 2; stroke-dasharray: 3 4 } rect { fill: #e8eef6; stroke: #64748b }
.bad { fill: #fde2e1; stroke: #c2352b } .good { fill: #dcf3e3; stroke: #1f8a4c } .page { fill: #fff; stroke: none }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } rect { fill: #273447; stroke: #8aa0bb }
.bad { fill: #5a2320; stroke: #f08a80 } .good { fill: #1d4a30; stroke: #6fd096 } .page { fill: #131a24 } }
"""

# The lanes, and the steps in the order of time: the lane, what happens there, "bad" or "good".
TIMELINES: dict[str, tuple[str, list[str], list[tuple[int, str, str]]]] = {
    "deleted": (
        "A lock on a file that was deleted",
        ["A holds x", "B waits", "C comes"],
        [
            (1, "opens x", ""),
            (0, "unlinks x, closes it", ""),
            (1, "gets the kernel lock of the deleted file", ""),
            (2, "creates x, gets its lock", ""),
            (1, "without a comparison: B and C both hold x", "bad"),
            (1, "with it: x is another file now, so B starts again", "good"),
        ],
    ),
    "sharers": (
        "Two sharers release: which one removes the file?",
        ["A shares", "B shares", "C tries to share, once"],
        [
            (0, "unlocks", ""),
            (0, "tries an exclusive lock: B is in the way", ""),
            (1, "unlocks", ""),
            (1, "gets the exclusive lock, to remove x", ""),
            (2, "without the removal byte: busy, though only sharers used x", "bad"),
            (2, "with it: B only removes the file, so C tries again", "good"),
            (1, "unlinks x", ""),
        ],
    ),
    "gives-up": (
        "The waiter for which the file was left gives up",
        ["A holds x", "B waits"],
        [
            (0, "checks: there is a queue, so x stays", ""),
            (1, "leaves the queue", ""),
            (1, "checks: A holds the lock, so A will see to x", ""),
            (0, "unlocks", ""),
            (0, "without another check: x stays for ever", "bad"),
            (0, "checks once more: no queue. Removes x", "good"),
        ],
    ),
    "wake-up": (
        "A release between the attempt and the sleep",
        ["A holds x", "B waits"],
        [
            (1, "tries: busy", ""),
            (0, "releases x: an event that nobody awaits", ""),
            (1, "registers for events, sleeps: for ever", "bad"),
            (1, "so B registers first, tries again, and then sleeps", "good"),
        ],
    ),
    "stale": (
        "Two processes find the same stale lock file",
        ["A", "B"],
        [
            (0, "reads x: stale", ""),
            (1, "reads x: stale", ""),
            (0, "unlinks x, creates x: holds it", ""),
            (1, "unlinks x, which is A's, creates x: two holders", "bad"),
            (1, "with the removal byte: x is not the file that B has read, so B leaves it alone", "good"),
        ],
    ),
    "token": (
        "A token that is too small",
        ["A", "B"],
        [
            (0, "reads the clock: 10", ""),
            (1, "reads the clock: 11", ""),
            (1, "creates x: holds it with token 11, releases it", ""),
            (0, "creates x: holds it with token 10", "bad"),
            (0, "so A reads the clock when x is there: token 12", "good"),
        ],
    ),
    "paused": (
        "A holder that was paused writes with a lock that it lost",
        ["A holds a lease", "B", "the resource"],
        [
            (0, "has token 7, is paused", ""),
            (1, "the lease ends: B gets the lock, token 8", ""),
            (2, "accepts the write with token 8", ""),
            (0, "goes on, and writes", ""),
            (2, "without tokens: overwrites what B wrote", "bad"),
            (2, "with tokens: refuses 7, because it has seen 8", "good"),
        ],
    ),
    "directory": (
        "A directory that is replaced with two renames",
        ["the writer", "a reader"],
        [
            (0, "renames site to site.old", ""),
            (1, "opens site/index.html: no such file", "bad"),
            (0, "dies here: there is no site at all", "bad"),
            (0, "the kernel exchanges both names at once; a plan on disk says how to go on after a crash", "good"),
        ],
    ),
    "snapshot": (
        "A version is removed while it is read",
        ["a reader", "the writer"],
        [
            (0, "opens site: version 1", ""),
            (1, "exchanges: site is version 2", ""),
            (1, "removes version 1 under the reader's hands", "bad"),
            (0, "locks version 1, shared; starts again if it is not site any more", "good"),
            (1, "cannot lock version 1 exclusively, so it stays", "good"),
        ],
    ),
    "appends": (
        "Two processes append under a condition",
        ["A", "B"],
        [
            (0, "reads: the last position is 5, the condition holds", ""),
            (1, "reads: the last position is 5, the condition holds", ""),
            (0, "writes event 6", ""),
            (1, "writes event 6: A's event is lost, and both conditions were true", "bad"),
            (1, "with one lock around reading, checking and writing: B reads 6, and its condition fails", "good"),
        ],
    ),
    "worker": (
        "A worker is killed in the middle of a task",
        ["worker 1", "worker 2"],
        [
            (0, "claims task 7, keeps a kernel lock", ""),
            (0, "is killed with SIGKILL", ""),
            (1, "with a lease: waits until the lease has ended", "bad"),
            (1, "the kernel released the lock: claims task 7 at once", "good"),
        ],
    ),
}  # fmt: skip


def svg(title: str, lanes: list[str], steps: list[tuple[int, str, str]]) -> str:
    width = LANE * len(lanes) + 2 * MARGIN
    parts, y = [], MARGIN + HEAD
    for lane, text, kind in steps:
        lines = wrap(text, LETTERS)
        height = LINE * len(lines) + PAD
        x = MARGIN + LANE * lane + 8
        marked = f' class="{kind}"' if kind else ""
        parts.append(f'<rect{marked} x="{x}" y="{y}" width="{LANE - 16}" height="{height}" rx="5"/>')
        parts += [
            f'<text x="{x + 9}" y="{y + PAD / 2 + 13 + LINE * at:g}">{escape(line)}</text>'
            for at, line in enumerate(lines)
        ]
        y += height + GAP
    bottom = y + MARGIN
    heads = []
    for at, name in enumerate(lanes):
        middle = MARGIN + LANE * at + LANE // 2
        heads.append(f'<line class="lane" x1="{middle}" y1="{MARGIN + 22}" x2="{middle}" y2="{bottom - 8}"/>')
        heads.append(f'<text class="head" x="{middle}" y="{MARGIN + 14}">{escape(name)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width}" height="{bottom}" rx="8"/>'
    )
    return "\n".join([head, *heads, *parts, "</svg>"]) + "\n"


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    for name, (title, lanes, steps) in TIMELINES.items():
        (PICTURES / f"timeline-{name}.svg").write_text(svg(title, lanes, steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
