"""`python -O` drops asserts: none of them may check what a caller, a file or the system can cause."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import holdfast

SOURCE = Path(holdfast.__file__).parent


def tells_types_only(condition: ast.expr) -> bool:
    """`x is not None`, `isinstance` and `sys.platform == …` are for mypy: without them the next line fails anyway."""
    if isinstance(condition, ast.BoolOp):
        return all(map(tells_types_only, condition.values))
    if isinstance(condition, ast.Call):
        return ast.unparse(condition.func) == "isinstance"
    if not isinstance(condition, ast.Compare) or not isinstance(condition.left, ast.Name | ast.Attribute):
        return False
    (operator,), (right,) = condition.ops, condition.comparators
    if isinstance(operator, ast.IsNot):
        return isinstance(right, ast.Constant) and right.value is None
    return ast.unparse(condition.left) == "sys.platform"


def test_asserts_check_nothing_that_can_happen() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            checks = isinstance(node, ast.Assert) and not tells_types_only(node.test)
            expects = isinstance(node, ast.ExceptHandler) and node.type and "AssertionError" in ast.unparse(node.type)
            if checks or expects:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


WORK = """
import sys
from holdfast.tasks import TaskQueue, Worker
queue = TaskQueue(sys.argv[1])
queue.put("x", attempts=1)
with queue.claim() as task:
    pass
queue.put("y", attempts=1)
print(Worker(queue, ["false"]).run(drain=True).failed, queue.stats()["done"])
"""


def test_tasks_are_done_without_asserts(jobs: Path) -> None:
    done = subprocess.run([sys.executable, "-O", "-c", WORK, jobs], capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"
