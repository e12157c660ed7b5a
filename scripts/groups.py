"""Print the requirements of dependency groups of pyproject.toml, for a pip that does not know `--group` yet."""

import re
import sys
from pathlib import Path

text = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text()
section = text.split("[dependency-groups]", 1)[1].split("\n[", 1)[0]
for group in sys.argv[1:]:
    listed = re.search(rf"^{group} = \[(.*?)\]$", section, re.S | re.M)
    if listed is None:
        sys.exit(f"no dependency group {group!r}")
    print(*re.findall(r'"([^"]+)"', listed[1]), sep="\n")
