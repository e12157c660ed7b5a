"""The house: imports point downwards, no two modules import each other, and each module is of a size to read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast
from holdfast import system

PACKAGE = Path(holdfast.__file__).parent
# From the bottom up. A module may import from its own line and from the lines above it.
LAYERS = [
    {"errors"},
    {"system"},
    {"process", "paths", "json_text", "fence"},
    {"files", "owner", "metrics", "wait"},
    {"watch", "status", "postgres", "sqlite"},
    {"locks"},
    {"filelock"},
    {"atomicdir", "events", "tasks"},  # within events: the face above `events.log`, see below
    {"collect", "eventsourcing"},
    {"web"},
    {"cli"},
]
MAX_LINES = {"events/log/view.py": 500}
# Calls of the file system, or of another process. Facts about this process (os.getpid, os.geteuid) are no such calls.
# Functions that walk along a path or through a tree are allowed: os.makedirs, os.walk, os.fwalk, shutil.rmtree and
# shutil.copytree.
SYSTEM_CALLS = {
    *("access", "chmod", "chown", "close", "copy_file_range", "fchmod", "fchown", "fdatasync", "fstat", "fsync"),
    *("ftruncate", "getxattr", "kill", "lchown", "link", "listdir", "listxattr", "lseek", "lstat", "mkdir"),
    *("mkfifo", "mknod", "open", "pread", "pwrite", "read", "readlink", "remove", "removexattr", "rename", "replace"),
    *("rmdir", "scandir", "sendfile", "setxattr", "stat", "symlink", "sync", "truncate", "unlink", "utime", "write"),
    *("path.exists", "path.getmtime", "path.getsize", "path.isdir", "path.isfile", "path.islink", "path.ismount"),
    *("path.lexists", "path.samefile"),
}
# The events are still to be changed. The command has pipes and a terminal, and its doctor
# tests the file system itself. `collect` looks at paths that may be anything.
CALL_DIRECTLY = {"system", "events", "collect", "web", "cli"}
SIGNALS = {("tasks.supervised", "os.kill")}
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(module: str, file: Path) -> set[str]:
    """The modules that are loaded together with this one: not those that functions import, or that types need."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()

    def visit(statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.ImportFrom) and statement.level:
                above = package[: len(package) - statement.level + 1]
                base = ".".join(above + ([statement.module] if statement.module else []))
                names = {f"{base}.{name.name}".lstrip(".") for name in statement.names}
                found.update(name if name in MODULES else base for name in names)
            elif isinstance(statement, ast.If):
                if ast.unparse(statement.test) != "TYPE_CHECKING":
                    visit(statement.body)
                visit(statement.orelse)
            elif isinstance(statement, ast.Try):
                visit(statement.body)

    visit(ast.parse(file.read_text("utf-8")).body)
    return found - {module}


GRAPH = {module: imports_of(module, file) for module, file in MODULES.items() if module not in ("__init__", "__main__")}


def layer_of(module: str) -> int:
    if not module:  # the public names, for commands
        return len(LAYERS) - 1
    room = module.partition(".")[0]
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def test_every_module_belongs_to_a_layer() -> None:
    assert {module.partition(".")[0] for module in GRAPH} == set().union(*LAYERS)


@pytest.mark.parametrize("module", GRAPH)
def test_imports_point_downwards(module: str) -> None:
    above = {other for other in GRAPH[module] if layer_of(other) > layer_of(module)}
    assert above == set()
    beside = {other.partition(".")[0] for other in GRAPH[module] if layer_of(other) == layer_of(module)}
    if layer_of(module) == layer_of("events"):  # the rooms of the three faces do not know each other
        assert beside <= {module.partition(".")[0]}


def test_no_module_imports_itself_in_a_circle() -> None:
    finished: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in finished:
            for other in GRAPH.get(module, ()):
                follow(other, (*way, module))
            finished.add(module)

    for module in GRAPH:
        follow(module, ())


ENGINES = ("events.log", "events.postgres")


@pytest.mark.parametrize(
    "module", [module for module in GRAPH if module.startswith("events.") and not module.startswith(ENGINES)]
)
def test_the_face_of_events_knows_its_engines_only_through_the_port(module: str) -> None:
    """They are imported when one is opened."""
    assert {other for other in GRAPH[module] if other.startswith(ENGINES)} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_one_idea(module: str) -> None:
    file = MODULES[module]
    lines = len(file.read_text("utf-8").splitlines())
    assert lines <= MAX_LINES.get(file.relative_to(PACKAGE).as_posix(), 450)


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_longer_than_a_screen(module: str) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))) if isinstance(node, functions)]
    assert [node.name for node in nodes if (node.end_lineno or 0) - node.lineno >= 60] == []


FACES = ["locks.base", "locks.hold", "locks.engine"]
FACES += ["events.store", "events.engine", "events.requests", "events.conditions", "events.decisions"]
FACES += ["events.projections", "events.reading"]


@pytest.mark.parametrize("module", FACES)
def test_the_face_knows_no_path_descriptor_or_inode(module: str) -> None:
    """So that an engine on a server can stand behind it."""
    assert not GRAPH[module] & {"files", "paths", "system", "watch", "owner"}
    names = {
        node.attr for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))) if isinstance(node, ast.Attribute)
    }
    assert not names & {"fd", "inode", "st_ino", "st_dev", "stat", "unlink"}


@pytest.mark.parametrize("module", [module for module in GRAPH if module.partition(".")[0] not in CALL_DIRECTLY])
def test_system_calls_are_made_through_system(module: str) -> None:
    direct = [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8")))
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) == "open" or ast.unparse(node.func).removeprefix("os.") in SYSTEM_CALLS)
        and ast.unparse(node.func).startswith(("os.", "open"))
        and (module, ast.unparse(node.func)) not in SIGNALS
    ]
    assert direct == []


def test_one_function_tells_whether_a_path_still_names_an_inode() -> None:
    """`files.named`. Others compare the inodes of open files only."""
    found = [
        f"{module}: {ast.unparse(node)}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if ast.unparse(side).startswith("inode_of(") and "fstat(" not in ast.unparse(side)
    ]
    assert found == ["files: inode_of(st) == inode"]


def test_the_docstring_of_system_lists_exactly_the_names_that_exist() -> None:
    table = [line[4:54] for line in (system.__doc__ or "").splitlines() if line.startswith("    ")]
    listed = {name for line in table for name in line.replace(",", " ").split()}
    constants = {name for name in vars(system) if name.isupper() and not name.startswith(("WATCH_", "HAS_", "TELLS_"))}
    modules = {name for name, value in vars(system).items() if hasattr(value, "__spec__")}
    exist = {name for name in vars(system) if not name.startswith("_")} - constants - modules - {"annotations"}
    assert listed == exist
