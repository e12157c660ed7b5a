"""Sphinx's settings for the site that `make docs` builds. scripts/docs.py collects its pages."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from pygments.lexers.data import JsonLexer
from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from docstrings import as_rst

import holdfast

project = "Holdfast"
author = "Holdfast contributors"
project_copyright = author
version = release = holdfast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["tests", "scripts", "src", "bench", "docs/_static"]
root_doc = "index"
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"Holdfast {version}"
html_show_sphinx = False
html_copy_source = False
html_css_files = ["holdfast.css"]
html_static_path = ["_static"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
smartquotes = False
nitpicky = False  # the types of the standard library are elsewhere
add_module_names = False
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

# Parts of these classes are public to other modules of the package, but are no use to users.
INTERNAL = {
    "TaskQueue": {"claimer", "claimers", "new_claimer", "put_scheduled", "prune"},
    "Lock": {"release"},
    "LockFile": {"release"},
    "Semaphore": {"release"},
}


# What the modules call a type, and what users call it.
TYPES = {
    r"[~\w.]*\b(Default|DEFAULT|StrPath|HoldType|FileHold|TimeoutOption)\b": r"\1",
    r"\bTimeoutOption = DEFAULT": "float | None = ...",
    r"\bStrPath\b": "str | PathLike",
    r"(\| )?Default \| None = DEFAULT": r"\1None = ...",
    r"HoldType|FileHold": "Hold",
    r"= _ALL\b": "= Query()",
    r"\bPolicy\b": "Literal['proof', 'old', 'dead-and-old']",
}


def rename_types(_app: Any, _what: str, name: str, _thing: Any, _options: Any, text: str, returns: str) -> Any:
    for old, new in TYPES.items():
        text, returns = (part and re.sub(old, new, part) for part in (text, returns))
    if name.endswith(".aacquire"):  # Sphinx evaluates its type, which is a variable for type checkers only
        returns = "Hold"
    return text, returns


def convert(_app: Any, _what: str, name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    method = name.rpartition(".")[2]
    if not lines and inspect.iscoroutinefunction(thing):  # of an async twin, all is said already
        lines.append(f"`{method[1:]}` for asyncio and trio.")
    lines[:] = as_rst("\n".join(lines)).splitlines()


def leave_out(_app: Any, _what: str, name: str, thing: Any, _skip: bool, _options: Any) -> bool | None:
    """True: this name is not shown. A method is shown also without a docstring, if its name says all."""
    owner = getattr(thing, "__qualname__", "").partition(".")[0]
    internal = name in INTERNAL.get(owner, ()) or (name == "release" and isinstance(thing, property))
    if name.startswith("_") or internal:
        return True
    return False if callable(thing) or isinstance(thing, property) else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", rename_types)
    app.connect("autodoc-skip-member", leave_out)
    app.add_lexer("jsonl", JsonLexer)
    app.add_lexer("crontab", TextLexer)
