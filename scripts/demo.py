"""`make demo`: the five parts of Holdfast in 20 seconds. Each ends with a line that proves something.

The exit status is 0 if every line says what it should.
"""

from __future__ import annotations

import sys
import time

from demo_parts import appends, directory, server, tasks
from demo_screen import BOLD, DIM, GREEN, PLAIN, RED, end_progress
from demo_turns import turns

PARTS = [
    ("Turns on a lock", "five processes add 1 to a number; one is killed while it holds the lock", turns),
    ("A directory", "replaced again and again, while readers compare two of its files", directory),
    ("An event log", "four processes race for each seat: only one may sell it", appends),
    ("A task queue", "three workers, one is killed in the middle of a task", tasks),
    ("A lock on a server", "the holder is killed; the other process waits", server),
]
NEXT = f"""
{BOLD}What to look at next{PLAIN}
  . .venv/bin/activate; holdfast --help    the command, with examples to paste
  docs/tutorial.md                         ten minutes
  docs/which.md                            which lock do I need?
  make test, make docs                     the tests; the site
"""


def main() -> int:
    failed = 0
    for number, (title, what, part) in enumerate(PARTS, 1):
        began = time.monotonic()
        print(f"{BOLD}{number} of {len(PARTS)}  {title}{PLAIN}: {what}", flush=True)
        good, text = part()
        end_progress()
        mark = {True: f"{GREEN}ok{PLAIN}", False: f"{RED}FAILED{PLAIN}", None: "skipped"}[good]
        print(f"  {mark}: {text} {DIM}({time.monotonic() - began:.1f} s){PLAIN}\n", flush=True)
        failed += good is False
    print(NEXT.strip())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
