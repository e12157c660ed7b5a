"""What a test has gone through, for docs/proof.md: schedules, kills, rounds.

`scripts/prove.py` names a file in HOLDFAST_EXPLORED and adds up the lines of it. Without that, nothing is written.
"""

from __future__ import annotations

import json
import os


def explored(**numbers: int) -> None:
    """Add to what the current test has gone through, for example `explored(rounds=2000)`."""
    file = os.environ.get("HOLDFAST_EXPLORED")
    if file:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        line = json.dumps({"test": test, **numbers}) + "\n"
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())  # in one piece: several processes write here
        finally:
            os.close(fd)
