"""Reads Python programs for their uses of the package filelock.

    import          an import to change
    note            works, and does something else
    unsupported     does not work

Only what the source says is found: not `getattr`, and not what a lock does that another module has made.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

from . import __all__
from .unsupported import MISSING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
_CLASSES = {name for name in __all__ if name.endswith("FileLock")} | {"ReadWriteLock", "AsyncReadWriteLock"}
_NOTES = {
    "poll_interval": "has no effect: waiters are woken by the release",
    "poll_intervall": "has no effect: waiters are woken by the release",
    "executor": "has no effect: no attempt needs a thread",
    "run_in_executor": "has no effect: no attempt needs a thread",
    "loop": "has no effect: a lock that is dropped is released at once",
    "fallback_to_soft": "has no effect: a file system without flock raises holdfast.Unsupported",
    "close_error_policy": "has no effect: an error of close is always raised",
}
_METHODS = {"acquire", "acquire_read", "acquire_write", "read_lock", "write_lock"}
_OVERRIDDEN = {"_acquire", "_release", "_context"}
_READ_WRITE_NOTE = "does not exclude the one of filelock, whose file is a database: change all programs at once"


class Finding:
    """One line of a program that uses filelock."""

    __slots__ = ("kind", "line", "text")

    def __init__(self, line: int, kind: str, text: str) -> None:
        self.line = line
        self.kind = kind
        self.text = text


def python_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for directory, names, files in os.walk(place):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(directory, name) for name in sorted(files) if name.endswith((".py", ".pyi")))


def findings_in(file: Path) -> list[Finding]:
    """The uses of filelock in one file, from top to bottom. A file that names it and cannot be read gets a note."""
    try:
        text = file.read_bytes()
        if b"filelock" not in text:
            return []
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = getattr(error, "lineno", None) or 1
        return [Finding(line, "note", f"this file was not checked: {getattr(error, 'msg', None) or error}")]
    reader = _Reader()
    reader.visit(tree)
    return sorted(reader.findings, key=lambda found: found.line) if reader.uses_filelock else []


class _Reader(ast.NodeVisitor):
    """Walks through a program. `_names`: the names of filelock by the names under which the program imports them."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.uses_filelock = False
        self._names: dict[str, str] = {}
        self._modules: set[str] = set()

    def _add(self, node: ast.AST, kind: str, text: str) -> None:
        self.findings.append(Finding(getattr(node, "lineno", 1), kind, text))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] != "filelock":
                continue
            self.uses_filelock = True
            self._modules.add(alias.asname or "filelock")
            if alias.name.startswith("filelock._"):
                self._add(node, "unsupported", f"{alias.name} is a private module of filelock")
            else:
                self._add(node, "import", f"from holdfast import filelock{_as(alias.asname)}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.partition(".")[0] != "filelock":
            return
        self.uses_filelock = True
        if module.startswith("filelock._"):
            self._add(node, "unsupported", f"{module} is a private module of filelock")
            return
        names = ", ".join(f"{alias.name}{_as(alias.asname)}" for alias in node.names)
        self._add(node, "import", f"from holdfast.{module} import {names}")
        for alias in node.names:
            self._names[alias.asname or alias.name] = alias.name
            self._judge_name(node, alias.name)

    def _judge_name(self, node: ast.AST, name: str) -> None:
        if name in MISSING:
            self._add(node, "unsupported", f"{name}: see docs/filelock.md for what to use instead")
        elif name.startswith("_") and not name.startswith("__"):
            self._add(node, "unsupported", f"{name} is a private name of filelock")
        elif name in ("ReadWriteLock", "AsyncReadWriteLock"):
            self._add(node, "note", f"{name} {_READ_WRITE_NOTE}")
        elif name in ("__version__", "version"):
            self._add(node, "note", f"{name} is the version of Holdfast")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            self._judge_name(node, node.attr)
        elif node.attr in _OVERRIDDEN:
            self._add(node, "unsupported", f"{node.attr} is a private name of filelock, if this is a lock of it")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(self._name_of(base) in _CLASSES for base in node.bases):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name in _OVERRIDDEN:
                    self._add(part, "unsupported", f"{part.name} of a subclass is never called")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        made = self._name_of(node.func)
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        for keyword in node.keywords:
            if (made in _CLASSES or is_method) and keyword.arg in _NOTES:
                self._add(keyword.value, "note", f"{keyword.arg} {_NOTES[keyword.arg]}")
        self.generic_visit(node)

    def _name_of(self, node: ast.expr) -> str:
        """The name of filelock that an expression means, or ""."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        is_of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if is_of_module and node.value.id in self._modules else ""  # type: ignore[attr-defined]


def _as(name: str | None) -> str:
    return f" as {name}" if name else ""
