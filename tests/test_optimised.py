"""`python -O` drops asserts: none of them may check what a caller, a file or the system can cause."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast.tasks import TaskQueue

SOURCE = Path(holdfast.__file__).parent


def tells_types_only(condition: ast.expr) -> bool:
    """`x is not None` and `sys.platform == …` are for mypy: without them the next line fails all the same."""
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


def test_a_task_whose_times_are_no_text(jobs: Path) -> None:
    queue = TaskQueue(jobs)
    id = queue.put("x", id="own")
    file = jobs / "tasks" / id
    head, _, tail = file.read_text().partition('"put": "')
    file.write_text(f'{head}"put": 5{tail[tail.index(chr(34)) + 1 :]}')
    look = "import sys; from holdfast.tasks import TaskQueue; print(TaskQueue(sys.argv[1]).get(sys.argv[2]).put_at)"
    for option in ("-O", "-B"):
        done = subprocess.run(
            [sys.executable, option, "-c", look, jobs, id], capture_output=True, text=True, check=True
        )
        assert done.stdout == "None\n"
