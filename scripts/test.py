"""Run the tests: python scripts/test.py [options of pytest]

Files that take long are parts of their own, the others share some. A part that fails prints its output at once.
"""

from __future__ import annotations

import sys

from parts import ROOT, Part, files, guess, guesses, run

MIN_PART_S = 15.0  # a part of less than this spends too much of it on starting up


def parts(options: list[str]) -> list[Part]:
    known = guesses()
    found: list[Part] = []
    small: list[str] = []
    gathered = 0.0
    for file in files():
        name = str(file.relative_to(ROOT))
        seconds = guess(Part(name, [name], []), known)
        if seconds >= MIN_PART_S:
            found.append(Part(name, [name], options))
            continue
        small.append(name)
        gathered += seconds
        if gathered >= MIN_PART_S:
            found.append(together(small, options))
            small, gathered = [], 0.0
    return [*found, together(small, options)] if small else found


def together(names: list[str], options: list[str]) -> Part:
    return Part(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", names, options)


if __name__ == "__main__":
    sys.exit(not run(parts(sys.argv[1:])))
