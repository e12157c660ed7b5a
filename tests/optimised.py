"""A plugin of pytest, for `make test-optimised`: the package runs as with `python -O`, the tests keep their asserts.

`holdfast` is compiled without asserts in this process and in its forks. Programs that the tests start run with -O.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)
        return code


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "holdfast":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def pytest_report_header() -> str:
    return "holdfast, and every program that the tests start: as with python -O"


if "holdfast" in sys.modules:
    raise ImportError("this has to be loaded before holdfast: pytest -p optimised")
os.environ["PYTHONOPTIMIZE"] = "1"
sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
