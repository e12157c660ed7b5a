"""Python imports this at its start: from then on, `filelock` means `holdfast.filelock`, in every child process, too.

Its private modules are those of the real filelock, from the directory in FILELOCK_SOURCE, if that is set: helpers of
its tests use them. Nothing here imports them.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = os.environ.get("FILELOCK_SOURCE")


class Ours(Loader):
    """Finds a module of holdfast.filelock under its name in filelock."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"holdfast.{spec.name}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("filelock."):
            return None
        if not fullname.startswith("filelock._"):
            return ModuleSpec(fullname, Ours())
        if SOURCE is None or fullname.count(".") > 1:
            return None
        file = Path(SOURCE, *fullname.split("."))
        if file.is_dir():
            return spec_from_file_location(fullname, file / "__init__.py", submodule_search_locations=[str(file)])
        return spec_from_file_location(fullname, file.with_suffix(".py"))


sys.meta_path.insert(0, Finder())
for name in ("filelock", "filelock.version"):
    sys.modules[name] = importlib.import_module(f"holdfast.{name}")
