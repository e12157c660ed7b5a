"""`holdfast web` in a real browser: other processes change things, and the open page shows it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import pytest
from console_server import ConsoleServer, slug
from scene import Scene
from support import Peer, until

from holdfast import Lock, LockFile, Semaphore
from holdfast.events import Event, EventStore
from holdfast.tasks import TaskQueue

if TYPE_CHECKING:
    from browser import Tab
    from playwright.sync_api import Page

Start = Callable[..., ConsoleServer]
Tabs = Callable[..., "Tab"]
PeerStart = Callable[..., Peer]

XSS = (
    """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>' " ` </pre></main>"""
    "{{7919*7919}}"
)


@pytest.fixture(autouse=True)
def _needs_a_browser(chromium: object) -> None:
    """The tabs wait as long as `until` does, which is less than the minute between two looks without an event."""


def shows(page: Page, text: str, where: str = "main") -> None:
    """Wait until a part of the page shows a text."""
    page.locator(where).filter(has_text=text).first.wait_for()


def hides(page: Page, text: str) -> None:
    becomes(page, "!document.querySelector('main').innerText.includes(wanted)", text)


def becomes(page: Page, expression: str, wanted: object = None) -> None:
    """Wait until an expression is true. The page's policy forbids `wait_for_function`, which calls eval()."""
    until(lambda: page.evaluate(f"(wanted) => {expression}", wanted))


def never_reloaded(page: Page) -> Callable[[], bool]:
    """Mark the document. A page that was loaded again has lost the mark."""
    page.evaluate("window.mark = 1")
    return lambda: bool(page.evaluate("window.mark === 1"))


# Live changes.


def test_locks_are_shown_while_other_processes_acquire_wait_and_release(
    console: Start, tab: Tabs, tmp_path: Path, start_peer: PeerStart
) -> None:
    path = str(tmp_path / "build.lock")
    holder, waiter = start_peer(path=path), start_peer(path=path)
    server = console(tmp_path)
    page = tab(server).open("/locks")
    shows(page, "No locks here")
    kept = never_reloaded(page)
    holder.do("hold = Lock(path).acquire()")
    shows(page, f"pid {holder.pid}", "tbody tr")
    assert page.locator("tbody tr .badge").inner_text() == "held"
    waiter.begin("waited = Lock(path).acquire()")
    becomes(page, "document.querySelector('tbody tr td[data-label=Waiting]').innerText === '1'")
    page.click("tbody tr a")
    shows(page, f"pid {waiter.pid}", ".waiters li")
    holder.do("hold.release()")
    waiter.answer()
    shows(page, f"acquired by pid {waiter.pid}", ".timeline")
    shows(page, f"released by pid {holder.pid}", ".timeline")
    waiter.do("waited.release()")
    shows(page, "free", "h1")
    page.click("text=Overview")
    shows(page, "No locks here")
    assert not kept(), "a click loads another page"


def test_a_lock_file_whose_holder_is_killed_needs_attention(
    console: Start, tab: Tabs, tmp_path: Path, start_peer: PeerStart
) -> None:
    path = str(tmp_path / "deploy.lock")
    holder = start_peer(path=path)
    page = tab(console(tmp_path)).open("/")
    shows(page, "Nothing. No stale lock", "section")
    kept = never_reloaded(page)
    holder.do("hold = holdfast.LockFile(path, tag='v1', fence=True).acquire()")
    shows(page, "held", "tbody tr")
    assert "#1" in page.inner_text("tbody tr") and "v1" in page.inner_text("tbody tr")
    holder.kill()
    shows(page, "is stale", ".attention")
    assert kept()
    page.click(".attention a")
    shows(page, "no: it is dead", ".facts")
    with LockFile(path).acquire():
        shows(page, f"lost: taken away from pid {holder.pid}", ".timeline")
        assert page.locator(".facts dt:text('Losses seen') + dd").inner_text() == "1"


def test_a_semaphore_shows_its_permits(console: Start, tab: Tabs, tmp_path: Path) -> None:
    semaphore = Semaphore(str(tmp_path / "gpu.sem"), 2)
    page = tab(console(tmp_path)).open("/locks")
    with semaphore.acquire():
        shows(page, "1 of 2 taken")
        with Semaphore(semaphore.name, 2).acquire():
            shows(page, "2 of 2 taken")
            shows(page, "held", ".badge")


def test_a_queue_shows_what_workers_do(console: Start, tab: Tabs, in_memory: Path, start_peer: PeerStart) -> None:
    jobs = str(in_memory / "jobs")
    page = tab(console(in_memory)).open("/queues")
    shows(page, "No task queue here")
    worker = start_peer(path=jobs)
    worker.do("from holdfast.tasks import TaskQueue; queue = TaskQueue(path, retry_after=0)")
    worker.do("queue.put({'name': 'a.png'}, id='a', attempts=1)")
    page.click("h3 a")  # it has appeared
    page.wait_for_selector("#live[data-state=live]")
    kept = never_reloaded(page)
    shows(page, "No worker.")
    shows(page, "a.png", "tr[data-key=task-a]")
    worker.do("claim = queue.claim()")
    shows(page, "busy", "tr[data-key^=worker-]")
    worker.do("claim.progress(3, 8, 'pages')")
    shows(page, "3/8 pages", "tr[data-key^=worker-]")
    assert page.get_attribute("tr[data-key^=worker-] progress", "value") == "3"
    worker.do("claim.fail('no such file')")
    shows(page, "no such file", "tr[data-key=task-a]")
    page.wait_for_selector(".stat.failed:not(.none)")
    shows(page, "1 failed, at most 1 in a minute", "figcaption")
    worker.do("queue.claim()")
    shows(page, "idle", "tr[data-key^=worker-]")
    worker.do("queue.schedule('nightly', every=3600)")
    shows(page, "in ", "tr[data-key=schedule-nightly]")
    assert kept()


def test_a_dead_worker_needs_attention_until_another_one_takes_over(
    console: Start, tab: Tabs, in_memory: Path, start_peer: PeerStart
) -> None:
    jobs = str(in_memory / "jobs")
    queue = TaskQueue(jobs)
    queue.put(1, id="a")
    worker = start_peer(path=jobs)
    worker.do("from holdfast.tasks import TaskQueue; claim = TaskQueue(path).claim()")
    page = tab(console(in_memory)).open("/")
    shows(page, "Nothing.", "section")
    worker.kill()
    shows(page, "1 task of dead workers", ".attention")
    with queue.claim(timeout=30):  # type: ignore[union-attr]
        shows(page, "Nothing.", "section")


def test_a_task_shows_its_attempts_its_result_and_what_it_printed(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs", retry_after=0)
    queue.put({"to": ["ada"]}, id="a", attempts=2, key="mail", timeout=5)
    server = console(in_memory)
    page = tab(server).open(f"{slug(server, 'queue')}/task?id=a")
    shows(page, "waits", ".timeline .now")
    claim = queue.claim()
    assert claim is not None
    shows(page, "runs", ".timeline .now")
    claim.fail(ValueError("no such user"))
    shows(page, "ValueError: no such user", ".timeline")
    claim = queue.claim(timeout=30)
    assert claim is not None
    shows(page, "attempt 2 by", ".timeline")
    claim.complete({"sent": 17})
    shows(page, '"sent": 17', "pre")
    assert (
        "done" in page.inner_text("h1") and '"ada"' in page.inner_text("main") and "2 of 2" in page.inner_text(".facts")
    )


def test_events_arrive_on_an_open_page_and_can_be_filtered(console: Start, tab: Tabs, in_memory: Path) -> None:
    store = EventStore(str(in_memory / "shop"))
    store.append([Event("OrderPlaced", {"n": n}, tags=[f"order:{n}"]) for n in range(3)])
    server = console(in_memory)
    page = tab(server).open(slug(server, "store"))
    kept = never_reloaded(page)
    rows = page.locator("tr[data-key^=event-]")
    assert rows.count() == 3
    store.append(Event("OrderPaid", {"by": "card"}, tags=["order:1", "eu"]))
    shows(page, "OrderPaid", "tr[data-key=event-4]")
    page.fill("input[name=tag]", "order:1")
    becomes(page, "document.querySelectorAll('tr[data-key^=event-]').length === 2")
    page.fill("input[name=type]", "OrderPaid")
    becomes(page, "document.querySelectorAll('tr[data-key^=event-]').length === 1")
    store.append([Event("OrderPaid", {}, tags=["order:9"]), Event("OrderPaid", {"again": 1}, tags=["order:1"])])
    page.wait_for_selector("tr[data-key=event-6]")
    assert rows.count() == 2 and kept(), "the filter holds for what arrives, too"
    page.click("tr[data-key=event-6] a")
    shows(page, '"again": 1', "pre")
    page.click("text=Previous")
    shows(page, "order:9", ".facts")


def test_subscriptions_and_projections_show_how_far_behind_they_are(
    console: Start, tab: Tabs, in_memory: Path, start_peer: PeerStart
) -> None:
    path = str(in_memory / "shop")
    store = EventStore(path)
    store.append([Event("A", {"n": n}) for n in range(1200)])
    reader = start_peer(path=path)
    page = tab(console(in_memory)).open("/")
    reader.do("from holdfast.events import EventStore; store = EventStore(path); events = store.subscribe('mailer')")
    reader.do("next(events).position")
    shows(page, "subscription mailer of", ".attention")
    shows(page, f"pid {reader.pid}", "tr[data-key=follower-subscription-mailer]")
    reader.do("for _ in range(1199): next(events)")
    reader.do("events.acknowledge()")
    shows(page, "up to date", "tr[data-key=follower-subscription-mailer]")
    hides(page, "events behind")
    store.project("totals", lambda total, event: total + 1, 0)
    shows(page, "up to date", "tr[data-key=follower-projection-totals]")
    store.append(Event("A", {}))
    becomes(
        page,
        "document.querySelector('tr[data-key=follower-projection-totals] td[data-label=Behind]').innerText === '1'",
    )
    reader.kill()
    shows(page, "nobody consumes", "tr[data-key=follower-subscription-mailer]")


# Filters, pages, keys.


def test_a_filter_applies_while_it_is_typed_and_stays_in_the_address(
    console: Start, tab: Tabs, in_memory: Path
) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put_all([{"n": n} for n in range(120)])
    queue.put({"find": "me <now>"}, id="needle", key="k")
    server = console(in_memory)
    page = tab(server).open(slug(server, "queue"))
    rows = page.locator("tr[data-key^=task-]")
    assert rows.count() == 50
    page.click("text=Older")
    page.wait_for_selector("tr[data-key=task-_70]")
    page.click("text=Newest")
    page.wait_for_url("**/queue/*")
    page.wait_for_selector("#live[data-state=live]")
    page.fill("input[name=text]", "me <now>")
    becomes(page, "document.querySelectorAll('tr[data-key^=task-]').length === 1")
    assert "text=me+%3Cnow%3E" in page.url and page.evaluate("document.activeElement.name") == "text"
    queue.put({"find": "ME <NOW>"}, id="second")
    page.wait_for_selector("tr[data-key=task-second]")
    assert page.input_value("input[name=text]") == "me <now>", "an update does not take away what is typed"
    page.reload()
    page.wait_for_selector("tr[data-key=task-second]")
    assert rows.count() == 2
    page.select_option("select[name=state]", "done")
    shows(page, "No task matches")


def test_an_update_takes_away_neither_the_focus_nor_what_is_typed(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put(1, id="late", delay=3600)
    queue.schedule("nightly", every=3600)
    server = console(in_memory)
    page = tab(server).open(slug(server, "queue"))
    page.focus("tr[data-key=task-late] a")
    queue.put(2, id="first", key="key")
    page.wait_for_selector("tr[data-key=task-first]")
    assert page.evaluate("document.activeElement.textContent") == "late", "a row was inserted before this one"
    page.focus("input[name=key]")
    page.keyboard.type("ke")
    page.wait_for_selector("tr[data-key=task-late]", state="detached")
    queue.cancel("late")  # what is above the field disappears
    queue.unschedule("nightly")
    page.wait_for_selector("tr[data-key=schedule-nightly]", state="detached")
    hides(page, "Of the pending ones")
    page.keyboard.type("y")
    page.wait_for_selector("tr[data-key=task-first]")
    assert page.input_value("input[name=key]") == "key"
    assert page.evaluate("document.activeElement.name") == "key"


def test_pages_can_be_used_with_the_keyboard_only(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put_all(range(3))
    server = console(in_memory)
    page = tab(server).open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url("**/queues")
    page.focus("h3 a")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue/*")
    page.wait_for_selector("#live[data-state=live]")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.textContent") == "_3"
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/task?id=_2")
    page.go_back()
    page.wait_for_url("**/queue/*")
    page.wait_for_selector("#live[data-state=live]")
    page.keyboard.press("/")
    page.keyboard.type("gqj")
    assert page.input_value("input[name=function]") == "gqj", "keys in a field are text"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.wait_for_selector("#live[data-state=live]")
    page.keyboard.press("p")
    page.wait_for_selector("#live[data-state=paused]")


def test_times_are_relative_and_exact_on_hover(console: Start, tab: Tabs, tmp_path: Path) -> None:
    begun = time()
    with LockFile(str(tmp_path / "x.lock")).acquire():
        page = tab(console(tmp_path), timezone_id="Europe/Berlin").open("/locks")
        shown = page.locator("td[data-label=Since] time")
        assert re.fullmatch(r"\d+ s", shown.inner_text())
        moment = page.evaluate("Date.parse(document.querySelector('td time').dateTime)") / 1000
        assert abs(moment - begun) < 30 and re.search(
            r"\d:\d\d:\d\d.*\n20\d\d-\d\d-\d\dT.*Z", shown.get_attribute("title")
        )
        before = shown.inner_text()
        becomes(page, "document.querySelector('td time').innerText !== wanted", before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_400_pixels_and_has_enough_contrast(
    console: Start, tab: Tabs, in_memory: Path, scheme: str
) -> None:
    with Scene(in_memory) as scene:
        scene.queue.put({"long": "x" * 300, "list": ["y" * 90] * 3}, id="z" * 80, key="k" * 60)
        server = console(in_memory, "--allow-actions", "--audit-log", in_memory / "audit")
        jobs, shop = slug(server, "queue"), slug(server, "store")
        one = tab(server, viewport={"width": 400, "height": 800}, color_scheme=scheme)
        for path in ("/", "/locks", f"/lock?name={in_memory}/build.lock", jobs, f"{jobs}/task?id={'z' * 80}", shop):
            page = one.open(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
            assert page.evaluate(CONTRAST) == [], path
        for action in ("retry", "purge"):
            page.goto(f"http://{server.host}{jobs}/confirm?action={action}&state=failed")
            page.wait_for_selector(".confirm")
            assert page.evaluate(CONTRAST) == [], action


# The contrast of each text to its background must be at least 4.5 (WCAG AA). Returns those that have less.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => { const f = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const back = (node) => { for (; node; node = node.parentElement) {
    const found = parse(getComputedStyle(node).backgroundColor); if (found.length < 4 || found[3] === 1) return found; }
    return [255, 255, 255]; };
  const bad = new Set();
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest("tr.new") || node.closest("option")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.add(node.outerHTML.slice(0, 90));
  }
  return [...bad];
}"""


# A payload is text.


def test_html_and_javascript_in_data_are_text(
    console: Start, tab: Tabs, in_memory: Path, start_peer: PeerStart
) -> None:
    name = XSS.replace("/", "")
    queue = TaskQueue(in_memory / f"jobs {name}", retry_after=0)
    queue.put(XSS, id="printed", attempts=1)
    command = [sys.executable, "-m", "holdfast", "tasks", "work", queue.name, "--drain", "--"]
    subprocess.run([*command, "sh", "-c", 'echo "$1"; exit 1', "-", "{}"], capture_output=True, check=False)
    queue.put(XSS, id="raised", attempts=1)
    claim = queue.claim()
    assert claim is not None
    try:
        raise ValueError(XSS)
    except ValueError as error:
        claim.fail(error)
    queue.put(1, id="returned")
    claim = queue.claim()
    assert claim is not None
    claim.complete({XSS: [XSS]})
    queue.put({XSS: XSS}, id=XSS, attempts=1, key=XSS)
    claim = queue.claim()
    assert claim is not None
    claim.progress(1, 2, XSS)
    claim.fail(ValueError(XSS))
    queue.schedule(XSS, XSS, every=60)
    store = EventStore(str(in_memory / f"shop {name}"))
    store.append(Event(XSS, {"a": XSS}, tags=[XSS, "b"], metadata={XSS: XSS}))
    store.project(XSS, lambda state, event: state + 1, 0)
    lock = str(in_memory / f"{name}.lock")
    with LockFile(lock, tag=XSS[:60]).acquire():
        server = console(in_memory, "--allow-actions", "--audit-log", in_memory / "audit")
        one = tab(server)
        jobs, shop = slug(server, "queue"), slug(server, "store")
        page = one.open("/")
        for path in ("/", "/locks", "/queues", jobs, "/stores", shop):
            page = one.open(path)
            _is_text_only(page)
        page.click("tr[data-key^=event-] td a")
        shows(page, XSS, "h1")
        _is_text_only(page)
        one.open(jobs).click("tr[data-key^=task-] a")
        shows(page, XSS, ".name")
        _is_text_only(page)
        for id, part in (("printed", "Output"), ("raised", "Traceback"), ("returned", "Result")):
            page = one.open(f"{jobs}/task?id={id}")
            shows(page, "<img src=x", f"section:has(h2:text-is('{part}')) pre")
            _is_text_only(page)
        one.open(jobs).click("tr[data-key^=task-] a")
        page.click("text=Retry…")
        shows(page, XSS, ".confirm")
        _is_text_only(page)
        one.open("/locks").click("tbody tr a")
        shows(page, "lock file", ".facts")
        _is_text_only(page)
        store.append(Event("Later", {"b": XSS}))  # a live update goes another way into the page
        page = one.open(shop)
        store.append(Event("Live", {"c": XSS}))
        shows(page, "<script>", "tr[data-key=event-3]")
        _is_text_only(page)


def _is_text_only(page: Page) -> None:
    assert page.title() != "owned"
    assert page.locator("main img, main script, main [onerror]").count() == 0 and page.locator("main").count() == 1
    assert str(7919 * 7919) not in page.inner_text("h1")


# Connections.


def test_a_lost_connection_is_shown_and_comes_back(console: Start, tab: Tabs, tmp_path: Path) -> None:
    server = console(tmp_path, environment={"HOLDFAST_WEB_TOKEN": "t" * 40})
    one = tab(server)
    page = one.open("/locks")
    kept = never_reloaded(page)
    server.stop()
    page.wait_for_selector("#live[data-state=lost]")
    assert page.locator("#lost").is_visible() and "Trying again" in page.inner_text("#lost")
    with Lock(str(tmp_path / "x.lock")).acquire():
        server.restart()
        page.wait_for_selector("#live[data-state=live]")
        shows(page, "x.lock", "tbody tr")
        assert not page.locator("#lost").is_visible() and kept()
    one.errors[:] = [error for error in one.errors if "ERR_" not in error]


def test_a_server_that_hangs_and_goes_on_catches_up(console: Start, tab: Tabs, tmp_path: Path) -> None:
    server = console(tmp_path)
    page = tab(server).open("/locks")
    server.process.send_signal(signal.SIGSTOP)
    with Lock(str(tmp_path / "x.lock")).acquire():
        server.process.send_signal(signal.SIGCONT)
        shows(page, "x.lock", "tbody tr")
    shows(page, "No locks here")


def test_a_page_that_was_paused_catches_up(console: Start, tab: Tabs, tmp_path: Path) -> None:
    server = console(tmp_path)
    one, other = tab(server), tab(server)
    paused, live = one.open("/locks"), other.open("/locks")
    paused.click("#live")
    paused.wait_for_selector("#live[data-state=paused]")
    with Lock(str(tmp_path / "x.lock")).acquire():
        shows(live, "x.lock", "tbody tr")
        assert "x.lock" not in paused.inner_text("main")
        paused.click("#live")
        shows(paused, "x.lock", "tbody tr")


def test_two_browsers_see_the_same_and_each_other_s_actions(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put(1, id="a")
    server = console(in_memory, "--allow-actions", "--audit-log", in_memory / "audit")
    jobs = slug(server, "queue")
    one, other = tab(server).open(jobs), tab(server).open(f"{jobs}?state=pending")
    queue.put(2, id="b")
    for page in (one, other):
        page.wait_for_selector("tr[data-key=task-b]")
    one.click("text=Pause…")
    one.click(".confirm button")
    for page in (one, other):
        page.wait_for_selector("h1 .badge.paused")
    other.click("text=Resume…")
    other.click(".confirm button")
    for page in (one, other):
        page.wait_for_selector("h1 .badge.paused", state="detached")


# Actions.


def test_without_allow_actions_there_is_nothing_to_press(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs")
    queue.put(1, id="a")
    server = console(in_memory)
    jobs = slug(server, "queue")
    one = tab(server)
    for path in ("/", jobs, f"{jobs}/task?id=a"):
        page = one.open(path)
        assert page.locator("form[method=post], .actions, a[href*=confirm]").count() == 0
    assert server.get(f"{jobs}/confirm?action=pause").status == 403
    assert server.post(f"{jobs}/act", "action=pause").status == 403 and not queue.is_paused


def test_actions_ask_first_and_are_written_to_the_audit_log(console: Start, tab: Tabs, in_memory: Path) -> None:
    queue = TaskQueue(in_memory / "jobs", retry_after=0)
    for id in "abc":
        queue.put(id, id=id, attempts=1)
        claim = queue.claim()
        assert claim is not None
        claim.fail("broken" if id != "c" else "other")
    queue.put(0, id="newest")  # the newest task is never deleted
    audit = in_memory / "audit.jsonl"
    server = console(in_memory, "--allow-actions", "--audit-log", audit)
    jobs = slug(server, "queue")
    page = tab(server).open(f"{jobs}?state=failed&text=broken")
    page.click("text=Retry…")
    shows(page, "Retry 2 tasks?", "h1")
    page.click("text=Leave it")
    page.wait_for_selector("tr[data-key=task-a]")
    assert not audit.exists() and queue.get("a").state == "failed"
    page.click("text=Retry…")
    page.click(".confirm button")
    shows(page, "Done: retry, 2 tasks", ".flash")
    assert [queue.get(id).state for id in "abc"] == ["pending", "pending", "failed"]
    page.goto(f"http://{server.host}{jobs}/task?id=c")
    page.click("text=Delete…")
    page.click(".confirm button")
    shows(page, "Done: purge, 1 task", ".flash")
    page.goto(f"http://{server.host}{jobs}/task?id=a")
    page.click("text=Cancel…")
    page.click(".confirm button")
    shows(page, "cancelled", "h1")
    assert "c" not in queue and queue.get("a").state == "cancelled"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["action"], line["outcome"]) for line in lines] == [
        *((action, outcome) for action in ("retry", "purge", "cancel") for outcome in ("begins", "done"))
    ]
    assert lines[1]["tasks"] == {"state": "failed", "text": "broken"} and lines[1]["number"] == 2
    assert lines[1]["target"] == queue.name and "127.0.0.1" in lines[1]["sender"] and audit.stat().st_mode & 0o77 == 0


def test_a_lock_file_is_broken_only_if_its_holder_is_still_the_one_that_was_shown(
    console: Start, tab: Tabs, tmp_path: Path, start_peer: PeerStart
) -> None:
    path = str(tmp_path / "deploy.lock")
    first, second = start_peer(path=path), start_peer(path=path)
    first.do("hold = holdfast.LockFile(path).acquire()")
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    one = tab(server)
    page = one.open(f"/lock?name={path}")
    page.click("text=Break…")
    shows(page, f"pid {first.pid}", ".confirm")
    first.do("hold.release()")
    second.do("hold = holdfast.LockFile(path).acquire()")
    page.click(".confirm button")
    shows(page, "another holder by now", "body")
    one.errors.clear()  # the browser reports the status 409
    page = one.open(f"/lock?name={path}")
    page.click("text=Break…")
    page.click(".confirm button")
    shows(page, "free", "h1")
    shows(page, "broken here", ".timeline .bad")
    second.do("import pytest")
    second.do("with pytest.raises(holdfast.LockLost): hold.release()")
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "audit").read_text().splitlines()]
    assert outcomes == ["begins", "failed", "begins", "done"]


def test_the_scene_of_the_pictures_is_what_the_docs_say(console: Start, tab: Tabs, in_memory: Path) -> None:
    with Scene(in_memory) as scene:
        page = tab(console(in_memory)).open("/")
        shows(page, "backup.lock is stale", ".attention")
        shows(page, "2 failed tasks", ".attention")
        shows(page, "3 of 4 taken")
        shows(page, "python build.py", "tbody")
        scene.build.end()
        lock = Lock(str(in_memory / "build.lock"))
        until(lambda: [one.pid for one in lock.status().holders] in [[one.pid] for one in scene.waiters])
        shows(page, f"pid {lock.status().holders[0].pid}", "section[aria-labelledby=locks]")
