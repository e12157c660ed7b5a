"""What `holdfast web` serves without a browser: metrics, live streams, servers as places, and the work it does."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import servers
from console_server import ConsoleServer, Stream, slug
from large import fill_queue, fill_store
from support import Peer, descriptors, processor_ticks, until

import holdfast
from holdfast import Lock, LockFile
from holdfast.events import Event, EventStore
from holdfast.tasks import TaskQueue
from holdfast.web import live, watching

Start = Callable[..., ConsoleServer]
PeerStart = Callable[..., Peer]


def samples(text: str) -> dict[str, float]:
    """/metrics as Prometheus reads it."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge" and family.documentation
        for one in family.samples:
            found[one.name + "".join(f" {value}" for _, value in sorted(one.labels.items()))] = one.value
    return found


# Metrics.


def test_metrics_are_read_by_prometheus(console: Start, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs", retry_after=0)
    queue.put_all(range(3), attempts=1)
    claim = queue.claim()
    assert claim is not None
    claim.fail("no")
    running = queue.claim()
    assert running is not None
    queue.pause()
    store = EventStore(str(in_memory / "shop"))
    store.append([Event("A")] * 5)
    store.project("totals", lambda total, event: total + 1, 0)
    store.append([Event("A")] * 2)
    name = str(in_memory / 'a "strange\\name".lock')
    with LockFile(name).acquire():
        found = samples(console(in_memory).get("/metrics").text)
    jobs, shop = queue.name, store.path
    assert {state: found[f"holdfast_tasks {jobs} {state}"] for state in ("ready", "running", "failed", "done")} == {
        "ready": 1, "running": 1, "failed": 1, "done": 0
    }  # fmt: skip
    assert found[f"holdfast_queue_paused {jobs}"] == 1 and found[f"holdfast_queue_workers {jobs} busy"] == 1
    assert found[f"holdfast_events_head {shop}"] == 7 and found[f"holdfast_events_lag projection totals {shop}"] == 2
    assert found[f"holdfast_lock_held file {name}"] == 1 and found[f"holdfast_lock_stale file {name}"] == 0
    running.complete()


def test_large_numbers_keep_all_their_digits() -> None:
    from holdfast.web import prometheus

    class Console:
        pass

    console: Any = Console()
    original, prometheus._samples = prometheus._samples, lambda _: [("holdfast_events_head", {"store": "s"}, 123456789)]
    try:
        assert 'holdfast_events_head{store="s"} 123456789\n' in prometheus.metrics(console)
    finally:
        prometheus._samples = original


def test_healthz_needs_no_token_and_tells_nothing(console: Start, tmp_path: Path) -> None:
    answer = console(tmp_path).ask("/healthz")
    assert (answer.status, answer.text) == (200, "ok\n")


def test_a_place_that_cannot_be_read_is_shown_with_the_reason(console: Start, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "queue.db").write_bytes(b"this is no database" * 100)
    server = console(tmp_path, tmp_path / "nothing", "redis://127.0.0.1:1/0")
    text = server.get("/").text
    assert "nothing: No such file" in text and "127.0.0.1:1" in text and "Traceback" not in text
    assert server.get(slug(server, "queue")).status == 503
    found = samples(server.get("/metrics").text)
    assert found[f"holdfast_unreadable {tmp_path}/nothing"] == 1 and found[f"holdfast_unreadable {tmp_path}/jobs"] == 1


def test_a_lock_whose_name_is_not_utf_8_has_a_page(console: Start, tmp_path: Path) -> None:
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.lock"))
    with Lock(path).acquire():
        server = console(tmp_path)
        (link,) = re.findall(r'href="(/lock\?name=[^"]*)"', server.get("/locks").text)
        assert "%E9" in link
        assert server.get(link).status == 200


def test_a_lock_file_whose_name_is_not_utf_8_can_be_broken(console: Start, tmp_path: Path) -> None:
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.lock"))
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(holdfast.LockLost))
        stack.enter_context(LockFile(path).acquire())
        text = server.get(f"/confirm?action=break&name={quote(os.fsencode(path))}").text
        (url,) = re.findall(r'<form method="post" action="([^"]*)"', text)
        hidden = dict(re.findall(r'name="(\w+)" value="([^"]*)"', text))
        other = server.post("/act?name=%E9", urlencode(hidden))
        assert other.status == 409 and "is not a lock file that is held" in other.text
        assert server.post(html.unescape(url), urlencode(hidden)).status == 303
    assert [json.loads(line)["outcome"] for line in (tmp_path / "audit").read_text().splitlines()] == [
        *("begins", "failed"),
        *("begins", "done"),
    ]


def test_a_kernel_lock_cannot_be_broken(console: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "x.lock")
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    with Lock(path).acquire() as hold:
        assert "Break" not in server.get(f"/lock?name={path}").text
        assert server.get(f"/confirm?action=break&name={path}").status == 404
        assert server.post(f"/act?name={path}", "action=break&holder=").status == 409
        hold.check()


@pytest.mark.parametrize(
    "path",
    ["/queue/x", "/queue/x/task?id=1", "/store/x", "/store/x/event?position=1", "/lock?name=x", "/lock", "/nothing"],
)
def test_a_page_that_is_not_there_is_a_404(console: Start, tmp_path: Path, path: str) -> None:
    assert console(tmp_path).get(path).status == 404


def test_an_empty_place_shows_commands_that_work(console: Start, tmp_path: Path) -> None:
    """The commands to try are run as they are shown, and fill the page."""
    server = console(tmp_path)
    found = re.findall(r"<pre><code>(.*?)</code></pre>", server.get("/").text, re.S)
    assert len(found) == 3
    bin = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    for text in found:
        for line in html.unescape(text).splitlines():
            command = line.replace("sleep 60", "true").replace("tasks work jobs", "tasks work jobs --drain")
            subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environment, check=True, capture_output=True)
    text = server.get("/").text
    assert f"{tmp_path}/jobs" in text and f"{tmp_path}/shop" in text and "OrderPlaced" in text
    assert "<b>3</b> done" in text


# The same data as the command.


def test_the_page_shows_what_ls_and_tasks_ls_print(console: Start, in_memory: Path, start_peer: PeerStart) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put_all([{"n": n} for n in range(4)])
    claim = queue.claim()
    assert claim is not None
    peer = start_peer(path=str(in_memory / "x.lock"))
    peer.do("hold = Lock(path).acquire()")
    with LockFile(str(in_memory / "y.lock"), tag="v2").acquire():
        server = console(in_memory)
        locks = json.loads(_holdfast("ls", "--json", in_memory))
        text = server.get("/locks").text
        assert len(locks) == 2 and text.count('<tr data-key="row-') == 2
        for lock in locks:
            row = text[text.index(f'data-key="row-{lock["path"]}"') :].partition("</tr>")[0]
            assert lock["state"] in row and f"pid {lock['holders'][0]['pid']}" in row and (lock["tag"] or "") in row
        tasks = json.loads(_holdfast("tasks", "ls", "--json", in_memory / "jobs"))
        text = server.get(slug(server, "queue")).text
        for task in tasks:
            row = text[text.index(f'data-key="task-{task["id"]}"') :].partition("</tr>")[0]
            assert task["state"] in row and f"{{&#34;n&#34;: {task['payload']['n']}}}" in row
    claim.complete()
    peer.do("hold.release()")


def _holdfast(*words: object) -> str:
    command = [sys.executable, "-m", "holdfast", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Live streams.


def test_a_stream_sends_a_page_only_if_it_differs(console: Start, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put(1, id="a")
    server = console(in_memory)
    path = slug(server, "queue")
    with Stream(server, path) as first:
        first.until("task-a")
        with Stream(server, path, last_event_id=first.id) as again:
            queue.put(2, id="b")
            assert "task-b" in again.next(), "what the reader has is not sent again"


@pytest.mark.parametrize("page", ["/queues", "/stores"])
def test_a_page_that_was_empty_shows_what_is_made_later(console: Start, in_memory: Path, page: str) -> None:
    """No other page was opened before. The directory is there for a while before the files in it."""
    server, later = console(in_memory), in_memory / "later"
    with Stream(server, page) as stream:
        stream.next()
        until(lambda: _is_quiet(server.pid))
        later.mkdir()
        until(lambda: _is_quiet(server.pid))
        began = time.monotonic()
        if page == "/queues":
            TaskQueue(later).put(1)
        else:
            EventStore(str(later)).append(Event("A"))
        stream.until("later")
        assert time.monotonic() - began < live._SAFETY_S / 2, "by an event, and not by the look once a minute"


def test_open_pages_show_a_queue_and_a_store_that_were_deleted_and_made_again(console: Start, in_memory: Path) -> None:
    """Also if both are there again before the server has looked."""
    queue, store = TaskQueue(in_memory / "jobs"), EventStore(str(in_memory / "shop"))
    queue.put(1, id="before")
    store.append(Event("Before"))
    server = console(in_memory)
    with Stream(server, slug(server, "queue")) as tasks, Stream(server, slug(server, "store")) as events:
        tasks.until("task-before")
        events.until("Before")
        server.process.send_signal(signal.SIGSTOP)
        shutil.rmtree(in_memory / "jobs")
        shutil.rmtree(in_memory / "shop")
        TaskQueue(in_memory / "jobs").put(2, id="after")
        EventStore(str(in_memory / "shop")).append(Event("After"))
        server.process.send_signal(signal.SIGCONT)
        assert "task-before" not in tasks.until("task-after")
        assert "Before" not in events.until("After")


def test_a_page_that_waited_for_a_server_once_is_rendered_again_soon() -> None:
    """A server that restarts lets a page wait for half a minute, and not for four times as long afterwards."""
    assert live.pauses(0.01) == (live._MIN_GAP_S, live._SAFETY_S)
    assert live.pauses(0.5) == (2.0, 600.0)
    assert live.pauses(30.0) == (5.0, 600.0)


def test_a_directory_that_gets_watched_is_looked_at_once_more(tmp_path: Path) -> None:
    """A file may have been made there after the look, and before the watch."""

    async def main() -> None:
        watcher, topic = watching.Watcher(), watching.Topic("locks", [str(tmp_path)])
        watcher.use([topic])
        (tmp_path / "below").mkdir()
        topic.directories.add(str(tmp_path / "below"))
        version = topic.version
        for _ in range(2):
            watcher.watch(topic)
            assert topic.version == version + 1
        watcher.leave([topic])

    asyncio.run(main())


def test_a_server_without_open_pages_watches_nothing(console: Start, in_memory: Path) -> None:
    """When the last page is closed, the inotify instance is closed, too, and the server sleeps."""
    TaskQueue(in_memory / "jobs").put(1)
    server = console(in_memory)

    def is_watching() -> bool:
        return "anon_inode:inotify" in descriptors(server.pid).values()

    assert not is_watching()
    with Stream(server, "/") as one, Stream(server, slug(server, "queue")) as other:
        one.next()
        other.next()
        until(is_watching)
    until(lambda: not is_watching())


def test_fifty_open_pages_cost_almost_no_processor_time(console: Start, in_memory: Path) -> None:
    """Within 3 seconds in which nothing happens, the server uses less than 3 % of a processor. See bench/web.py."""
    queue = TaskQueue(in_memory / "jobs")
    queue.put_all(range(100))
    store = EventStore(str(in_memory / "shop"))
    store.append([Event("A")] * 100)
    with ExitStack() as stack, Lock(str(in_memory / "x.lock")).acquire():
        server = console(in_memory)
        jobs, shop = slug(server, "queue"), slug(server, "store")
        paths = ["/", "/locks", jobs, shop, f"/lock?name={in_memory}/x.lock", f"{jobs}/task?id=_1"]
        streams = [
            stack.enter_context(Stream(server, f"{paths[n % 6]}{'&' if '?' in paths[n % 6] else '?'}n={n}"))
            for n in range(50)
        ]
        for stream in streams:
            stream.next()
        until(lambda: _is_quiet(server.pid))
        queue.put("last", id="last")
        for place in range(2, 50, 6):
            streams[place].until("task-last")  # they are open, and learn of it


def _is_quiet(pid: int) -> bool:
    before = processor_ticks(pid)
    time.sleep(3)
    return processor_ticks(pid) - before <= 9


# Large queues and stores.


@pytest.mark.parametrize("engine", ["local", "postgres"])
def test_lists_of_a_large_queue_answer_at_once(
    console: Start, in_memory: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    """100,000 tasks, and counts that stop at 10,000 and say so. The long version: bench/web.py."""
    number = 100_000
    place = str(in_memory / "jobs") if engine == "local" else request.getfixturevalue("postgres")
    queue = TaskQueue(place)
    fill_queue(queue, number)
    queue.close()
    server = console(place)
    jobs = slug(server, "queue")
    text = server.get(jobs).text
    assert "Counting stops at 10,000." in text and ">10,000+<" in text
    for query in ("", "?state=pending", "?state=done&before=5000", "?function=resize", "?text=img-77", "?text=nowhere"):
        until(lambda query=query: _seconds(server, jobs + query) < 0.2)  # a busy machine gets more than one chance
    assert len(set(_walk(server, f"{jobs}?state=failed&text=file"))) == 200
    found = [int(id[1:]) for id in _walk(server, f"{jobs}?key=k3")]
    assert found and found == sorted(set(found), reverse=True), "the newest task comes first, and each comes once"


def _seconds(server: ConsoleServer, path: str) -> float:
    began = time.monotonic()
    assert server.get(path).status == 200
    return time.monotonic() - began


def _walk(server: ConsoleServer, path: str, pages: int = 4) -> Iterator[str]:
    """The ids of the tasks of some pages, by their links."""
    for _ in range(pages):
        text = server.get(path).text
        yield from re.findall(r'<tr data-key="task-([^"]*)"', text)
        following = re.search(r'rel="next" href="([^"#]*)', text)
        assert following is not None
        path = html.unescape(following[1])


def test_a_filter_finds_a_task_behind_the_window(console: Start, in_memory: Path) -> None:
    """A page searches 10,000 tasks, says so, and "Older" goes on."""
    queue = TaskQueue(in_memory / "jobs")
    queue.put("needle", id="needle")
    fill_queue(queue, 30_000, only_waiting=True)
    queue.close()
    server = console(in_memory)
    path = f"{slug(server, 'queue')}?text=needle"
    text = server.get(path).text
    assert "A page searches about" in text and "task-needle" not in text and "among those that were searched" in text
    assert list(_walk(server, path, 3)) == []
    while (following := re.search(r'rel="next" href="([^"#]*)', text)) is not None:
        text = server.get(html.unescape(following[1])).text
    assert "task-needle" in text


def test_a_large_store_answers_at_once(console: Start, in_memory: Path) -> None:
    fill_store(EventStore(str(in_memory / "shop")), 50_000)
    server = console(in_memory)
    shop = slug(server, "store")
    for query in ("", "?type=OrderPaid", "?tag=customer:7", "?before=20000", "?tag=none"):
        until(lambda query=query: _seconds(server, shop + query) < 0.2)
    assert "order:7<" in server.get(f"{shop}?type=OrderPaid&tag=order:7").text


# Servers.


def test_a_queue_and_a_store_on_postgresql(console: Start, postgres: str, tmp_path: Path) -> None:
    queue = TaskQueue(postgres, retry_after=0)
    queue.put({"to": "ada"}, id="a", attempts=1)
    store = EventStore(postgres)
    store.append(Event("OrderPlaced", {"n": 1}, tags=["order:1"]))
    server = console(postgres, "--allow-actions", "--audit-log", tmp_path / "audit")
    jobs, shop = slug(server, "queue"), slug(server, "store")
    assert servers.PASSWORD not in server.get("/").text + jobs + shop
    with Stream(server, jobs) as page, Stream(server, shop) as events, Stream(server, "/") as overview:
        assert "task-a" in page.next() and "event-1" in events.next()
        overview.until("OrderPlaced")
        claim = queue.claim()
        assert claim is not None
        page.until("busy")
        claim.fail("broken")
        page.until("broken")
        store.append(Event("OrderPaid", {"n": 2}))
        events.until("OrderPaid")
        reader = store.subscribe("mailer")
        next(reader)
        events.until("mailer")
        reader.close()
        assert server.post(f"{jobs}/act", "action=retry&state=failed&text=BROKEN").status == 303
        page.until("pending</span>")
    assert queue.get("a").state == "pending"
    queue.schedule("nightly", {"a": 1}, every=60)
    page_text = server.get(f"{jobs}?text=100%25").text + server.get(f"{jobs}?text=ADA&function=&key=").text
    assert "No task matches" in page_text and 'data-key="task-a"' in page_text and "nightly" in page_text
    assert samples(server.get("/metrics").text)[f"holdfast_tasks {queue.name} ready"] == 1
    queue.close()
    store.close()


def test_all_pending_tasks_are_cancelled_also_those_that_wait_for_their_key(console: Start, tmp_path: Path) -> None:
    with closing(TaskQueue(tmp_path / "jobs", durable=False)) as queue:
        queue.put_all(range(5), key="k")
        queue.put_all(range(5), key="r", rate="1/h")
        server = console(tmp_path / "jobs", "--allow-actions", "--audit-log", tmp_path / "audit")
        assert server.post(f"{slug(server, 'queue')}/act", "action=cancel&state=pending").status == 303
        assert queue.stats()["cancelled"] == 10


@pytest.mark.parametrize("kind", ["redis", "etcd", "postgres"])
def test_locks_on_servers(console: Start, kind: str, request: pytest.FixtureRequest, start_peer: PeerStart) -> None:
    if kind == "postgres":
        root = request.getfixturevalue("postgres")
        url = f"{root}?name=deploy"
    else:
        root = request.getfixturevalue(f"{kind}_server").url("").rstrip("/")
        url = f"{root}/deploy"
    peer = start_peer(url=url)
    server = console(root)
    with Stream(server, "/locks") as page:
        page.next()
        peer.do("hold = holdfast.lock(url).acquire()")
        text = page.until("deploy")
        assert f"pid {peer.pid}" in text and servers.PASSWORD not in text
        peer.do("hold.release()")
        while f"pid {peer.pid}" in page.next():
            pass


def test_a_server_that_comes_back_is_shown_again(console: Start, redis_server: servers.Redis) -> None:
    url = redis_server.url("").rstrip("/")
    redis_server.kill()
    try:
        server = console(url)
        text = server.get("/").text
        assert servers.PASSWORD not in text and "redis://" in text and 'class="bad"' in text
        with Stream(server, "/locks") as page:
            page.next()
            redis_server.restart()
            with holdfast.lock(f"{url}/deploy").acquire():
                page.until("deploy")
    finally:
        if not redis_server.is_ready():
            redis_server.restart()


def test_the_exit_status_is_0_after_a_signal(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with ConsoleServer(tmp_path) as server:
            assert server.ask("/healthz").status == 200
            with Stream(server, "/") as page:
                page.next()
                server.process.send_signal(number)
                assert server.process.wait(30) == 0
