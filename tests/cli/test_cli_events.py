"""`holdfast events`, as a shell uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import descriptors, in_child, until

from holdfast import Lock
from holdfast.cli import main
from holdfast.events import Event, EventStore

HOLDFAST = [sys.executable, "-m", "holdfast", "events"]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return tmp_path / "shop"


def call(*words: object, text: str = "", status: int = 0) -> str:
    done = subprocess.run([*HOLDFAST, *map(str, words)], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_in_and_out(shop: Path, tmp_path: Path) -> None:
    line = '{"type": "OrderPlaced", "data": {"id": 7}, "tags": ["order:7"]}\n'
    assert call("append", shop, text=line + "\n" + line) == "1\n2\n"
    assert call("append", shop, "--batch", text=line * 3) == "5\n"
    found = rows(call("read", shop))
    assert [row["position"] for row in found] == [1, 2, 3, 4, 5]
    assert found[0]["data"] == {"id": 7} and found[0]["tags"] == ["order:7"] and found[2]["batch"][:2] == [3, 5]
    assert [row["position"] for row in rows(call("read", shop, "--after", 1, "--limit", 2, "--backwards"))] == [5, 4]
    assert (
        rows(call("read", shop, "--tag", "order:8")) == []
        and len(rows(call("read", shop, "--type", "OrderPlaced"))) == 5
    )
    assert call("head", shop) == "5\n" and json.loads(call("head", shop, "--json")) == {"head": 5}
    (tmp_path / "in.jsonl").write_text('{"type": "X"}\n')
    assert call("append", shop, tmp_path / "in.jsonl") == "6\n"
    call("export", shop, tmp_path / "out.jsonl")
    assert call("import", tmp_path / "copy", tmp_path / "out.jsonl") == "6\n"
    assert rows(call("export", tmp_path / "copy", "--tag", "order:7"))[0]["id"] == found[0]["id"]
    (shop / "index").mkdir(exist_ok=True)
    assert call("rebuild", shop) == ""


def test_conditions(shop: Path) -> None:
    event = '{"type": "OrderPlaced", "tags": ["order:7"]}'
    assert call("append", shop, "--unless-tag", "order:7", "--json-line", event) == "1\n"
    assert "event 1 matches" in call("append", shop, "--unless-tag", "order:7", "--json-line", event, status=1)
    assert "event 1 matches" in call("append", shop, "--unless-type", "OrderPlaced", "--json-line", event, status=1)
    assert call("append", shop, "--unless-tag", "order:7", "--after", 1, "--json-line", event) == "2\n"
    assert "event 2" in call("append", shop, "--after", 1, "--json-line", event, status=1)


def test_verify(shop: Path) -> None:
    EventStore(shop).append([Event("A"), Event("B")])
    assert call("verify", shop) == "2 events in 1 segment: good\n"
    path = shop / "events/0000000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"A"', b'"C"'))
    text = call("verify", shop, status=1)
    assert f"{path}, line 1 (byte 0): damaged" in text and "1 problem" in text
    report = json.loads(call("verify", shop, "--json", status=1))
    assert not report["ok"] and report["problems"][0]["line"] == 1
    assert "event 1 is damaged" in call("read", shop, status=3)


def test_errors(shop: Path, tmp_path: Path) -> None:
    assert "there is no event store here" in call("read", shop, status=3)
    assert not shop.exists()
    assert "line 1 is no event" in call("append", shop, text="{", status=2)
    assert "unknown field `tag`" in call("append", shop, text='{"type": "A", "tag": ["x"]}', status=2)
    assert "line 2 is no event" in call("append", shop, "--batch", text='{"type": "A"}\n{"type": 7}\n', status=2)
    assert EventStore(shop).head() == 0
    with Lock(shop / ".store.lock", keep=True):
        text = call("append", shop, "-w", 0.1, text='{"type": "A"}', status=1)
    assert f"pid {os.getpid()}" in text and "lock_timeout" in text
    assert "there is no action 'sing'" in call("sing", shop, status=2)


def test_tail(shop: Path) -> None:
    store = EventStore(shop)
    store.append(Event("Old"))
    tail = subprocess.Popen([*HOLDFAST, "tail", shop, "--limit", "2"], stdout=subprocess.PIPE)
    assert tail.stdout is not None
    try:
        until(lambda: "inotify" in str(descriptors(tail.pid)))
        store.append(Event("New"))
        assert json.loads(tail.stdout.readline())["type"] == "New"
        store.append(Event("Newer"))
        assert json.loads(tail.stdout.readline())["type"] == "Newer"
        assert tail.wait(30) == 0
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()
    assert [row["type"] for row in rows(call("tail", shop, "--after", 0, "--limit", 3))] == ["Old", "New", "Newer"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["append", "--tag", "x", "--json-line", '{"type": "A"}'], "unrecognized arguments: --tag"),
        (["append", "in.jsonl", "--json-line", '{"type": "A"}'], "not both"),
        (["read", "extra"], "unrecognized arguments: extra"),
        (["read", "--batch"], "unrecognized arguments: --batch"),
        (["read", "--unless-tag", "x"], "unrecognized arguments: --unless-tag"),
        (["head", "--after", "0"], "unrecognized arguments: --after"),
    ],
)
def test_an_option_that_an_action_does_not_have_is_refused(words: list[str], said: str, shop: Path) -> None:
    EventStore(shop).append(Event("A"))
    action, *rest = words
    assert said in call(action, shop, *rest, status=2)
    assert EventStore(shop).head() == 1


def test_pipes_have_a_name(shop: Path, tmp_path: Path) -> None:
    EventStore(shop).append(Event("A"))
    text = call("export", shop, "-")
    assert call("import", tmp_path / "copy", "-", text=text) == "1\n" and not os.path.exists("-")


@pytest.mark.parametrize("action", ["read", "head", "verify", "export"])
def test_nowhere_to_print_to(action: str, shop: Path) -> None:
    EventStore(shop).append(Event("A"))
    for to in (">&-", ">/dev/full"):
        line = f"{sys.executable} -m holdfast events {action} {shop} {to}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 3 and "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_store_that_may_not_be_read_is_not_reported_as_missing(
    in_memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shop = in_memory / "shop"
    EventStore(shop).append(Event("A"))
    in_memory.chmod(0o755)
    shop.chmod(0o700)
    assert main(["events", "head", str(shop)]) == 0  # and whatever is imported for it is

    def look() -> object:
        os.setuid(65534)
        return main(["events", "head", str(shop)])

    assert in_child(look) == 3 and "Permission denied" in capfd.readouterr().err


def test_subscriptions_are_listed_and_forgotten(shop: Path) -> None:
    store = EventStore(shop)
    store.append([Event("T"), Event("T")])
    assert call("subscriptions", shop) == "" and call("subscriptions", shop, "--json") == "[]\n"
    with store.subscribe("mailer") as events:
        assert next(events).position == 1 and next(events).position == 2
        text = call("subscriptions", shop)
        assert text.startswith(f"mailer: at 1 of 2, 1 event behind; active: pid {os.getpid()}")
        (row,) = json.loads(call("subscriptions", shop, "--json"))
        assert (row["name"], row["checkpoint"], row["head"], row["lag"], row["active"]) == ("mailer", 1, 2, 1, True)
        assert "not acquired within 0.1 s" in call("unsubscribe", shop, "mailer", "--wait", "0.1", status=1)
    assert call("subscriptions", shop) == "mailer: at 1 of 2, 1 event behind; no process consumes\n"
    assert call("unsubscribe", shop, "mailer") == "" and call("subscriptions", shop) == ""
    assert "has no subscription 'mailer'" in call("unsubscribe", shop, "mailer", status=1)


def test_forget_erases_the_data_of_a_tag(shop: Path) -> None:
    EventStore(shop).append([Event("T", "secret", {"person:7"}), Event("T", "other")])
    assert call("forget", shop, "person:7") == "1\n"
    assert [row["data"] for row in rows(call("read", shop))] == [None, "other"]
    assert call("forget", shop, "person:7", "--json") == '{"forgotten": 0}\n'
    assert "there is no event store here" in call("forget", shop / "none", "person:7", status=3)
