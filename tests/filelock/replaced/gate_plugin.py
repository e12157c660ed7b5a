"""A plugin for pytest that runs filelock's tests: it takes those out that do not go through public names.

What a case uses is read from its source: its function, the fixtures and the helpers that this uses. The rules are in
`reason_against`. Written exceptions are in exclusions.txt beside this directory. The outcome goes to GATE_REPORT.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.filelock import ReadWriteLock
from holdfast.filelock.options import singletons

MISSING = re.compile(
    r"Strict|Lease|SoftReadWrite|MarkerSoft|OwnerMode|OwnerRecord|Compromise|SoftFileLockProtocolError"
)
PRIVATE_TEXT = re.compile(r"^_[a-z]\w+$|filelock\._|filelock\.asyncio\._|\b_context\b|\._[a-z]")
FINE = {("os", "_exit"), ("sys", "_getframe"), ("threading", "_shutdown")}
PATCHING = {"patch", "object", "setattr", "spy", "dict", "multiple", "setitem", "delattr"}
# A fixture of the tests empties this cache before each case.
ReadWriteLock._instances = singletons.objects
outcomes: dict[str, str] = {}
excluded: dict[str, str] = {}


def written_exclusions() -> dict[str, str]:
    lines = Path(os.environ["GATE_EXCLUSIONS"]).read_text("utf-8").splitlines()
    found: dict[str, str] = {}
    reason = ""
    for line in lines:
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            found[line.strip()] = reason
    return found


class Module:
    """The source of one module of tests: its functions, and what its names mean."""

    def __init__(self, file: str) -> None:
        self.tree = ast.parse(Path(file).read_text("utf-8"))
        self.definitions: dict[str, ast.AST] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.definitions[target.id] = node.value
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.partition(".")[0]] = (alias.name, "")


module_of = cache(Module)


def file_of_tests(name: str) -> str:
    """The file of a module of the tests; "" for any other module."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return file if "/tests/" in file else ""


def nodes_of(node: ast.AST) -> list[ast.AST]:
    """What a function does: all of it but the values of its parameters, which are judged case by case."""
    found = []
    parts = list(ast.iter_child_nodes(node))
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Call) and "parametrize" in ast.unparse(part.func):
            continue
        found.append(part)
        parts.extend(ast.iter_child_nodes(part))
    return found


def reason_in(node: ast.AST, file: str, seen: set[tuple[str, str]]) -> str:
    """Why this piece of source does not go through public names of classes that we have; or ""."""
    source = module_of(file)
    for part in [node, *nodes_of(node)]:
        reason = ""
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            reason = "private" if PRIVATE_TEXT.search(part.value) else "missing" if MISSING.search(part.value) else ""
        elif isinstance(part, ast.Attribute):
            owner = ast.unparse(part.value)
            if part.attr.startswith("_") and not part.attr.startswith("__") and (owner, part.attr) not in FINE:
                reason = "private"
            elif MISSING.search(part.attr):
                reason = "missing"
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name in ("_acquire", "_release"):
            reason = "private"
        elif isinstance(part, ast.Call) and is_patch_of_a_library(part, source):
            reason = "patches the standard library"
        elif isinstance(part, ast.Name):
            reason = reason_of_name(part.id, file, source, seen)
        if reason:
            return reason
    return ""


def is_patch_of_a_library(call: ast.Call, source: Module) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in PATCHING or not call.args:
        return False
    if not re.search(r"mocker|monkeypatch|patch", ast.unparse(function)):
        return False
    target = call.args[0]
    if isinstance(target, ast.Constant) and isinstance(target.value, str):
        return target.value.partition(".")[0] in sys.stdlib_module_names
    root = ast.unparse(target).partition(".")[0]
    return source.imported.get(root, ("", ""))[0].partition(".")[0] in sys.stdlib_module_names


def reason_of_name(name: str, file: str, source: Module, seen: set[tuple[str, str]]) -> str:
    if hasattr(builtins, name) or (file, name) in seen:
        return ""
    seen.add((file, name))
    if name in source.definitions:
        return reason_in(source.definitions[name], file, seen)
    origin, original = source.imported.get(name, ("", ""))
    if origin.startswith("filelock._"):
        return "private"
    if MISSING.search(original):
        return "missing"
    if other := file_of_tests(origin):
        return reason_of_name(original, other, module_of(other), seen)
    return ""


def reason_against(item: Any) -> str:
    function = inspect.unwrap(item.function)
    file = inspect.getfile(function)
    seen: set[tuple[str, str]] = set()
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if MISSING.search(f"{value!r} {getattr(value, '__name__', '')} {item.callspec.id}"):
            return "missing"
        if inspect.isfunction(value) and "/tests/" in inspect.getfile(value):
            reason = reason_of_name(value.__name__, inspect.getfile(value), module_of(inspect.getfile(value)), seen)
            if reason:
                return reason
    reason = reason_of_name(function.__name__, file, module_of(file), seen)
    for name in item.fixturenames:
        for definition in item._fixtureinfo.name2fixturedefs.get(name, ()):
            found = inspect.unwrap(definition.func)
            other = inspect.getfile(found)
            if not reason and "/tests/" in other and not name.startswith("_"):  # those are used by every case
                reason = reason_of_name(found.__name__, other, module_of(other), seen)
    return reason


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    written = written_exclusions()
    kept, dropped = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        names = (item.nodeid, function, function.partition("::")[0])
        reason = reason_against(item) or next((written[name] for name in names if name in written), "")
        (dropped if reason else kept).append(item)
        if reason:
            excluded[item.nodeid] = reason
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_runtest_logreport(report: Any) -> None:
    if (report.when == "call" or report.outcome != "passed") and outcomes.get(report.nodeid) != "failed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["GATE_REPORT"]).write_text(json.dumps({"outcomes": outcomes, "excluded": excluded}), "utf-8")
