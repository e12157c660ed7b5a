"""`make docs`: build the site in build/site. A warning of Sphinx is an error.

    python scripts/docs.py [TARGET]

The pages are README.md, docs/ and the files that a public project has at its top. The reference of the command is made
from its own parsers, and that of the API from the docstrings (docs/conf.py). All of it is collected in a temporary
directory with the layout of the repository, so that the links of the pages stay as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from site_pages import API, PAGES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
TOP = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
LINKED = ["tests", "scripts", "src", "bench", "LICENSE", "pyproject.toml", "Makefile"]
_COMMENT = re.compile(r"^<!-- example:.*?-->\n", re.S | re.M)
_LINK = re.compile(r"(?<!!)\[([^]\[]+)\]\(([^)#:\s]+)\)")
_NAME = re.compile(r"(?P<open>\]\((?:\.\./)*)README\.md")


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-docs-") as room:
        source = Path(room) / "source"
        collect(source)
        os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("src", "scripts"))
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-c", str(ROOT / "docs")]
        done = subprocess.run([*command, "-d", f"{room}/cache", str(source), str(target)], check=False)
    if done.returncode == 0:
        print(f"Open {target / 'index.html'}")
    return done.returncode


def collect(source: Path) -> None:
    """All pages, and links to the files of the repository that pages link to."""
    source.mkdir()
    for name in LINKED:
        (source / name).symlink_to(ROOT / name)
    (source / "docs").mkdir()
    for other in (ROOT / "docs").iterdir():
        if other.suffix != ".md":
            (source / "docs" / other.name).symlink_to(other)
    for name in TOP:
        write(source / name, (ROOT / name).read_text(encoding="utf-8"))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        write(source / page.relative_to(ROOT), page.read_text(encoding="utf-8"))
    write(source / "docs" / "reference" / "command.md", command_reference())
    for title, module, names in API:
        write(source / "docs" / "reference" / f"{module}.md", api_page(title, module, names))
    write(source / "index.md", (ROOT / "README.md").read_text(encoding="utf-8") + contents(source))


def write(path: Path, text: str) -> None:
    """Write a page. A link to a directory becomes its text: a site has no page for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _NAME.sub(r"\g<open>index.md", _COMMENT.sub("", text))
    text = _LINK.sub(lambda link: link[1] if (path.parent / link[2]).is_dir() else link[0], text)
    path.write_text(text, encoding="utf-8")


def contents(source: Path) -> str:
    """The menu. A page that nobody has put into a group is in the last one."""
    groups = {title: list(pages) for title, pages in PAGES.items()}
    known = {page for pages in groups.values() for page in pages}
    found = {str(page.relative_to(source).with_suffix("")) for page in (source / "docs").rglob("*.md")}
    found |= {Path(name).stem for name in TOP}
    groups["More"] = sorted(found - known)
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *(page for page in pages if page in found)])
        for title, pages in groups.items()
        if found & set(pages)
    ]
    return "\n\n" + "\n```\n\n".join(trees) + "\n```\n"


def command_reference() -> str:
    """What `--help` prints, of every command and every action."""
    os.environ["COLUMNS"] = "98"
    from holdfast.cli import COMMANDS, OVERVIEW, parser_of

    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}} {does}" for name, (_, does) in COMMANDS.items())
    parts = [
        "# Every command and option",
        "The parsers of the command wrote this page. [The command](../cli.md) explains how to use it.",
        fenced(OVERVIEW.format(commands=listed)),
    ]
    for name in COMMANDS:
        parser = parser_of(name)
        parts += [f"## holdfast {name}", fenced(parser.format_help())]
        for action in parser.actions:
            parts += [f"### holdfast {name} {action}", fenced(parser.action(action).format_help())]
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def api_page(title: str, module: str, names: dict[str, str]) -> str:
    """The classes and functions of a module. `made`: users get it from a call, so its constructor is not shown."""
    names = names | others(module)
    parts = [f"# {title}", f"```{{eval-rst}}\n.. module:: {module}\n```"]
    for name, how in names.items():
        short = name.rpartition(".")[2]
        directive = {"function": "autofunction", "exception": "autoexception"}.get(how, "autoclass")
        lines = [f".. {directive}:: {name}" + ("()" if how == "made" else "")]
        if how not in ("function", "exception"):
            lines += ["   :members:", "   :inherited-members: Exception, tuple"]
        parts += [f"## {short}", "```{eval-rst}\n" + "\n".join(lines) + "\n```"]
        if how == "made":
            parts.append(fields(getattr(import_module(module), name)))
    return "\n\n".join(parts) + "\n"


def others(module: str) -> dict[str, str]:
    """Public classes and functions of a module that the list of pages does not mention. Exceptions have a page."""
    mentioned = {name for _, _, names in API for name in names}
    public = {name: getattr(import_module(module), name) for name in import_module(module).__all__}
    kinds = {
        name: "class" if isinstance(thing, type) else "function" for name, thing in public.items() if callable(thing)
    }
    return {
        name: kind
        for name, kind in kinds.items()
        if name not in mentioned and not (kind == "class" and issubclass(public[name], Exception))
    }


def fields(kind: Any) -> str:
    """The fields of a record, and their types."""
    types = getattr(kind, "__annotations__", {})
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    return "\n".join(f"- `{name}: {types.get(name, 'Any')}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
