"""The menu of the site, and the names in its API reference."""

PAGES = {
    "Begin": ["docs/install", "docs/tutorial", "docs/which"],
    "How to": ["docs/howto", "docs/cli", "docs/tasks", "docs/events", "docs/engines", "docs/web"],
    "Coming from": [
        "docs/filelock",
        "docs/from-flock",
        "docs/from-redis",
        "docs/from-task-queues",
        "docs/from-eventsourcing",
    ],
    "Understand": ["docs/concepts", "docs/guarantees", "docs/proof", "docs/scale", "docs/benchmarks"],
    "Look up": [
        "docs/reference/command",
        "docs/reference/holdfast",
        "docs/reference/holdfast.tasks",
        "docs/reference/holdfast.events",
        "docs/reference/holdfast.fence",
        "docs/reference/holdfast.metrics",
        "docs/exceptions",
        "docs/formats",
        "docs/troubleshooting",
    ],
    "Take part": ["CONTRIBUTING", "docs/architecture", "SECURITY", "CHANGELOG"],
}

LOCKS = dict.fromkeys(("Lock", "LockFile", "Semaphore", "TaskLocks", "AtomicDir"), "class")
LOCKS |= {"lock": "function", "semaphore": "function", "Hold": "made", "Status": "made"}
TASKS = {"TaskQueue": "class", "Worker": "class", "TaskFunction": "made", "Claim": "made", "Task": "made"}
TASKS |= {"Summary": "made"} | dict.fromkeys(("NoSuchTask", "QueueFull", "WorkerFailed"), "exception")
EVENTS = {"EventStore": "class", "Event": "class", "StoredEvent": "made", "Query": "class", "QueryItem": "class"}
EVENTS |= {"AppendCondition": "class", "Projection": "class", "Decision": "made", "Reading": "made"}
EVENTS |= {"Subscription": "made", "SubscriptionStatus": "made", "Report": "made", "Problem": "made"}

# A page for each module: its title, and what it shows. "made": users get it from a call.
API = [
    ("API: locks and directories", "holdfast", LOCKS),
    ("API: tasks", "holdfast.tasks", TASKS),
    ("API: events", "holdfast.events", EVENTS),
    ("API: fencing", "holdfast.fence", {"Fence": "class", "check": "function"}),
    ("API: metrics", "holdfast.metrics", {"snapshot": "function", "export_prometheus": "function"}),
]
