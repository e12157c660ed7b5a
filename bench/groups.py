"""Which sections of run.py `make bench` measures together, in a shorter form, or not at all."""

from __future__ import annotations

# What `make bench ONLY=…` calls the groups, and the sections in them, by the beginning of their names.
GROUPS: dict[str, tuple[str, ...]] = {
    "locks": (
        "keep",
        "ephemeral",
        "lockfile",
        "durable",
        "filelock",
        "handoff",
        "flock-loop",
        "contention",
        "throughput",
        "waiters",
    ),
    "directories": ("directory",),
    "tasks": ("tasks",),
    "events": ("events",),
    "engines": ("engines",),
    "web": ("web",),
    "command": ("import", "command"),
    "others": ("",),
}


# What `make bench` leaves out, because it takes minutes and fills gigabytes: run.py --only measures these.
BY_NAME = ("events-many", "tasks-many-postgres", "engines-scale")
# What `make bench` measures with few rounds, or smaller: run.py --only measures them in full.
SHORTENED = (
    "directory",
    "engines-handoff",
    "events-conditional",
    "events-million",
    "events-peers",
    "events-postgres",
    "events-processes",
    "events-takeover",
    "flock-loop",
    "handoff",
    "tasks",
    "tasks-idle",
    "tasks-many",
    "tasks-postgres",
    "tasks-wake",
)


def group_of(section: str) -> str:
    return next(group for group, starts in GROUPS.items() if section.startswith(starts))
