"""`python -m holdfast.filelock --check DIR` says what would change in a program with the new import."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .check import findings_in, python_files


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0: every use of filelock works with the new import; 1: some do not; 2: wrong arguments."""
    parser = argparse.ArgumentParser("python -m holdfast.filelock", description=__doc__)
    parser.add_argument("--check", metavar="DIR", required=True, help="a directory with Python programs, or one file")
    place = Path(parser.parse_args(arguments).check)
    if not place.exists():
        parser.error(f"{place} does not exist")
    counts = {"import": 0, "note": 0, "unsupported": 0}
    for file in python_files(place):
        for found in findings_in(file):
            counts[found.kind] += 1
            print(f"{file}:{found.line}: {found.kind}: {found.text}")
    imports, notes, unsupported = counts.values()
    print(f"{imports} imports to change, {notes} notes, {unsupported} uses that are not supported")
    return 1 if unsupported else 0


if __name__ == "__main__":
    sys.exit(main())
