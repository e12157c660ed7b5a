"""Data about locks, queues and event stores, for `ls`, `top`, `tasks ls`, `tasks watch` and the web console.

kinds     what kind of lock a file is
locks     the locks in directories and on servers, and one of them as JSON
tasks     a queue: what runs, what failed, and a task as JSON

Nothing here prints or asks.
"""
