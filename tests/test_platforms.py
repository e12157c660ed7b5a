"""Every platform module offers the same names with the same signatures; unsupported systems are refused clearly.

The modules are parsed, not imported: only one of them can be imported on any machine.
"""

from __future__ import annotations

import ast
import fcntl
import inspect
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from faces import PATIENCE

import holdfast
from holdfast import system

PACKAGE = Path(holdfast.__file__).parent
PLATFORMS = {
    "linux": ("common", "posix", "linux", "everywhere"),
    "macos": ("common", "posix", "macos", "everywhere"),
    "windows": ("common", "windows", "everywhere"),
}
CONSTANT = "constant"
ABSENT = "absent"  # a function or class that the platform does not have: None, or `_unsupported`


def public_names(platform: str) -> dict[str, Any]:
    """Each public name of a platform with its signature, `CONSTANT`, or for a class its methods."""
    nodes: dict[str, Any] = {}
    for module in PLATFORMS[platform]:
        for node in ast.parse((PACKAGE / "system" / f"{module}.py").read_text()).body:
            nodes.update(bound_by(node))
    return {name: shape_of(node, nodes) for name, node in nodes.items() if not name.startswith("_")}


def bound_by(node: ast.stmt) -> dict[str, Any]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name: node}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    bound: dict[str, Any] = {}
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            bound.update((name.id, value) for name, value in zip(target.elts, node.value.elts, strict=True))
        elif isinstance(target, ast.Name):
            bound[target.id] = node.value
    return {name: value for name, value in bound.items() if name != "TYPE_CHECKING"}


def shape_of(node: Any, nodes: dict[str, Any]) -> Any:
    if isinstance(node, ast.FunctionDef):
        return signature_of(node)
    if isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        return {item.name: signature_of(item) for item in methods if item.name == "__init__" or item.name[0] != "_"}
    if ast.unparse(node) in ("_unsupported", "None"):
        return ABSENT
    if isinstance(node, ast.Name) and node.id in nodes:
        return shape_of(nodes[node.id], nodes)
    known = standard_function(node)
    try:
        return CONSTANT if known is None else without_defaults(inspect.signature(known))
    except ValueError:  # os.utime does not tell its signature. It agrees with itself
        return known.__name__


def standard_function(node: Any) -> Any:
    """`os.read`, `fcntl.flock` and the like, also as `getattr(os, "link", …)`."""
    match = re.match(r"""(os|unpatched|fcntl)\.(\w+)$|getattr\((os), ['"](\w+)['"]""", ast.unparse(node))
    if match is None:
        return None
    module, name, other_module, other_name = match.groups()
    found = getattr({"os": os, "unpatched": os, "fcntl": fcntl}[module or other_module], name or other_name, None)
    return found if callable(found) else None


def signature_of(node: ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    nothing = ast.Constant(None)
    node.args.defaults = [nothing] * len(node.args.defaults)
    node.args.kw_defaults = [default and nothing for default in node.args.kw_defaults]
    return without_defaults(inspect.signature(eval(f"lambda {ast.unparse(node.args)}: None")))


def without_defaults(signature: inspect.Signature) -> list[tuple[str, bool, bool]]:
    """Name (empty if it cannot be used in a call), keyword only, optional."""
    return [
        (
            "" if parameter.kind is parameter.POSITIONAL_ONLY else name,
            parameter.kind is parameter.KEYWORD_ONLY,
            parameter.default is not parameter.empty,
        )
        for name, parameter in signature.parameters.items()
    ]


def agree(one: Any, other: Any) -> bool:
    if ABSENT in (one, other):
        return one == other or CONSTANT not in (one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agree(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return all(
            a is not None and b is not None and a[1:] == b[1:] and (a[0] == b[0] or not a[0] or not b[0])
            for a, b in zip_longest(one, other)
        )
    return bool(one == other)


NAMES = {platform: public_names(platform) for platform in PLATFORMS}


@pytest.mark.parametrize("platform", ["macos", "windows"])
def test_every_platform_has_the_names_and_signatures_of_linux(platform):
    assert sorted(NAMES["linux"]) == sorted(NAMES[platform])
    differing = {
        name: (shape, NAMES[platform][name])
        for name, shape in NAMES["linux"].items()
        if not agree(shape, NAMES[platform][name])
    }
    assert differing == {}


def test_what_was_parsed_is_what_is_imported():
    platform = {"linux": "linux", "darwin": "macos", "win32": "windows"}[sys.platform]
    assert [name for name in NAMES[platform] if not hasattr(system, name)] == []
    assert len(NAMES[platform]) > 60


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_package_uses_only_names_that_every_platform_has(platform):
    used = {
        node.attr
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "system"
    }
    assert sorted(used - NAMES[platform].keys()) == []


def test_every_documented_name_exists():
    table = [line for line in system.__doc__.splitlines() if line.startswith("    ")]
    documented = {name for line in table for name in re.split(r"  +", line.strip())[0].split(", ") if "." not in name}
    names = {name for name in documented if re.fullmatch(r"\w+", name)}
    assert {"open_fd", "lock_removal", "Watch", "HAS_FIFOS"} <= names
    assert sorted(names - NAMES["linux"].keys()) == []


def import_after(changes: str, use: str = "import holdfast", *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a child Python in which the standard library was changed before Holdfast is imported."""
    return subprocess.run(
        [sys.executable, "-c", f"{changes}\n{use}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("platform", ["freebsd14", "netbsd10", "openbsd7", "sunos5", "cygwin"])
def test_an_unsupported_system_is_named_by_the_error(platform):
    done = import_after(
        f"import fcntl, sys; sys.platform = {platform!r}\ndel fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_OFD_GETLK"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: Holdfast does not support {platform}, because it needs open-file-description locks "
        "(F_OFD_SETLK) as Linux and macOS have them: use Linux, macOS or Windows."
    )


USE_EVERY_LOCK = """
import os, sys
import holdfast
for number, lock in enumerate((
    holdfast.Lock(sys.argv[1]), holdfast.Semaphore(sys.argv[1], 2), holdfast.LockFile(sys.argv[1]),
)):
    with lock as hold:
        hold.check()
        assert number == 1 or lock.try_acquire() is None
assert not os.path.exists(sys.argv[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
@pytest.mark.parametrize(
    "changes",
    [
        "import os; del os.link",
        "import os; del os.mkfifo",
        "import fcntl; del fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_OFD_GETLK",
        "import sys; sys.platform = 'android'; import os; del os.link",
    ],
)
def test_locks_work_where_python_lacks_a_system_call(changes, path):
    done = import_after(changes, USE_EVERY_LOCK, path)
    assert (done.returncode, done.stderr) == (0, "")
