"""Run the tests three times in a row while busy programs take all processors: python scripts/prove_load.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from parts import ROOT, clock

TIMES = 3
BUSY = "import os, signal, ctypes; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\nwhile True: pass"


def main() -> int:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    codes = []
    try:
        for number in range(1, TIMES + 1):
            began = time.monotonic()
            done = subprocess.run([sys.executable, "scripts/test.py", "-m", "not slow"], cwd=ROOT, check=False)
            codes.append(done.returncode)
            result = "passed" if done.returncode == 0 else "FAILED"
            print(f"run {number} of {TIMES} under load: {result} in {clock(time.monotonic() - began)}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
