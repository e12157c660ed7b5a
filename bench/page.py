"""docs/benchmarks.md, from the figures."""

from __future__ import annotations

from collections.abc import Iterator

from figures import Figures, columns, doubts, tables_of
from groups import BY_NAME, GROUPS, SHORTENED, group_of
from plots import PLOTS
from questions import QUESTIONS, Question

OTHERS = "Other measurements"
MISSED = " †"

HEAD = """\
# Benchmarks

`make bench` measures this and writes this page, [its figures](benchmarks.json) and its plots. It takes at most 15
minutes. Do not edit the page: edit [bench](../bench).

Each table answers one question. It begins with the floor: the bare system calls, or the bare calls of a client, that no
correct program can do without. Our rows are bold. The rows of other packages follow. All contestants of a table take
turns in one run, so a ratio (x) means more than a time: a slow machine slows both sides. † marks a missed target: our
figure is worse than we want, or we are not far enough ahead of that package. [Missed targets](#missed-targets) lists
them.
"""

HOW = """\
## How it is measured

- *Turns.* All contestants, the floor included, take turns in short rounds. A ratio is the median of the ratios of the
  rounds. Hand-offs and waits are the exception: there, the ratio is that of the medians.
- *Processes.* Each contestant of the tables of free locks is a process of its own, because an import of one package can
  slow down another. The processes are started again several times ([measure.py](../bench/measure.py)).
- *Peers.* Each package is used as its documentation shows, with one object used again where that is possible. They do
  not all promise the same. [task_queues.py](../bench/task_queues.py) says what each queue promises.
- *Hand-offs.* The waiter has slept in the same call for at least 2 ms before the release. A package that polls meets
  the release at a random moment ([handoff.py](../bench/handoff.py)).
- *Contention.* The processes do nothing while they hold the lock, which is the worst case for a lock that serves in
  order. They also add to an unprotected counter. A lost addition fails the run
  ([contention.py](../bench/contention.py)).
- *Servers.* PostgreSQL, Redis and etcd run on the same machine, started by [servers.py](../tests/servers.py).
  PostgreSQL syncs every commit.
- *Other programs.* A run records how much of the processors other programs used. Above 10 %, the page says so on top.

## Run it

<!-- example: not run, because it takes minutes -->
```sh
make bench                        # everything, and writes this page
make bench ONLY=locks             # one group, or one section; the rest of the page stays
make bench-compare                # measures again, and reports each ratio that got 25 % worse; writes nothing
.venv/bin/python bench/run.py --only handoff --json handoff.json     # one section, in full, with all samples
.venv/bin/python bench/run.py --only handoff --dir /some/directory   # on another file system
.venv/bin/python bench/run.py --beside ../other-checkout             # the code of two checkouts, in one run
```
"""


def page(figures: Figures) -> str:
    parts = [HEAD, *_about(figures)]
    groups = dict.fromkeys([question.group for question in QUESTIONS])
    for group in groups:
        parts.append(f"## {group}\n")
        for question in QUESTIONS:
            if question.group == group:
                parts += _answer(figures, question)
    parts += _unasked(figures)
    parts += _missed(figures)
    parts.append(HOW)
    parts += _sections(figures)
    return "\n".join(parts).rstrip() + "\n"


def _about(figures: Figures) -> Iterator[str]:
    if found := doubts(figures):
        yield f"**Do not quote these figures:** {'; '.join(found)}.\n"
    machine, versions = figures["machine"], figures["versions"]
    yield "| | |\n|---|---|"
    for name, value in machine.items():
        yield f"| {name} | {value} |"
    compared = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"| compared with | {compared} |\n"


def _answer(figures: Figures, question: Question) -> Iterator[str]:
    yield f"### {question.title}\n"
    found = columns(figures, question)
    section = figures["sections"].get(question.section)
    if not any(found.values()):
        yield f"*Not measured: {section['error'] if section else 'not run yet'}.* `--only {question.section}`\n"
        return
    yield f"{question.text} `--only {question.section}`\n"
    yield f"| | {' | '.join(found)} |"
    yield f"|---|{'---:|' * len(found)}"
    for kind, rows in (("floor", question.floor), ("ours", question.ours), ("peers", question.peers)):
        for label, name in rows.items():
            if any(name in column for column in found.values()):
                text = f"**{label}**" if kind == "ours" else label
                cells = (_cell(column.get(name), kind) for column in found.values())
                yield f"| {text} | {' | '.join(cells)} |"
    yield ""
    for plot in question.plot.split():
        _, text, sections = PLOTS[plot]
        if all(tables_of(figures, section) for section in sections):
            yield f"![{text}](pictures/bench-{plot}.svg)\n"


def _cell(row: Figures | None, kind: str, mark: str = MISSED) -> str:
    if row is None:
        return "-"
    texts = [amount(row["value"], row.get("unit", ""))] if "value" in row else []
    if "ratio" in row and kind != "floor":
        texts.append(ratio(row["ratio"]))
    return ", ".join(texts) + (mark if kind != "floor" and row.get("missed") else "")


def ratio(value: float) -> str:
    return f"{value:,.0f} x" if value >= 20 else f"{value:.1f} x" if value >= 10 else f"{value:.2f} x"


def amount(value: float, unit: str) -> str:
    """1,234 µs is 1.2 ms; a rate has no fraction."""
    if unit in ("/s", "a second", "events a second"):
        return f"{value:,.0f}/s"
    for small, large in (("µs", "ms"), ("ms", "s")):
        if unit == small and value >= 1000:
            value, unit = value / 1000, large
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()


def _unasked(figures: Figures) -> Iterator[str]:
    """The tables of sections without a question."""
    asked = {question.section for question in QUESTIONS}
    names = [name for name in figures["sections"] if name not in asked]
    if names:
        yield f"## {OTHERS}\n"
    for name in names:
        for table in tables_of(figures, name):
            yield f"### {table['title']}\n\n`--only {name}`\n\n| | figure | |\n|---|---:|---|"
            for row in table["rows"]:
                yield f"| {row['name']} | {_cell(row, 'ours')} | {row.get('note', '')} |"
            yield ""


def _missed(figures: Figures) -> Iterator[str]:
    rows = [
        (name, table["title"], row)
        for name in figures["sections"]
        for table in tables_of(figures, name)
        for row in table["rows"]
    ]
    checks = sum(row.get("checks", 0) for _, _, row in rows)
    missed = [(name, title, row, target) for name, title, row in rows for target in row.get("missed", [])]
    yield "## Missed targets\n"
    yield f"{checks - len(missed)} of {checks} targets are met. A missed target fails nothing. A figure that is close"
    yield "to its target can be met in one run and missed in the next.\n"
    if missed:
        yield "| section | what | target | measured |\n|---|---|---|---|"
    for name, title, row, target in missed:
        yield f"| `{name}` | {title.partition(':')[0]}: {row['name']} | {target} | {_cell(row, 'ours', mark='')} |"
    yield ""


def _sections(figures: Figures) -> Iterator[str]:
    yield "## Sections\n"
    yield "The names for `ONLY=` and `--only`, and when each was measured.\n"
    yield "| section | group | date | commit | seconds | other programs | |"
    yield "|---|---|---|---|---:|---:|---|"
    for name, section in figures["sections"].items():
        notes = [] if not section["quick"] else ["shorter"] if name in SHORTENED else ["quick"]
        notes += [f"failed: {section['error']}"] if section["error"] else []
        cells = (f"`{name}`", group_of(name), section["date"], f"`{section['commit']}`")
        numbers = (f"{section['seconds']:.0f}", f"{section['others']:.0%}")
        yield f"| {' | '.join((*cells, *numbers, '; '.join(notes)))} |"
    left_out, shorter = (", ".join(f"`{name}`" for name in names) for names in (BY_NAME, SHORTENED))
    yield f"\nThe groups are {', '.join(f'`{group}`' for group in GROUPS)}."
    yield f"`make bench` leaves out {left_out}, which take minutes."
    yield f"It runs {shorter} with fewer rounds or smaller sizes."
    yield "`bench/run.py --only NAME` runs each in full. [Scale](scale.md) has the figures of `engines-scale`."
