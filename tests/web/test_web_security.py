"""Who may see and change what in `holdfast web`. Plain HTTP requests, as a browser or another program sends them."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from console_server import ConsoleServer, slug
from support import PATIENCE

from holdfast import LockFile
from holdfast.events import Event, EventStore
from holdfast.tasks import TaskQueue
from holdfast.web.text import Cleaner

Start = Callable[..., ConsoleServer]
PAGES = ["/", "/locks", "/queues", "/stores", "/metrics", "/static/app.js", "/confirm?action=break&name=x", "/nothing"]
PASSWORD = {"HOLDFAST_WEB_PASSWORD": "correct horse"}
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A server for tests that change nothing."""
    with ConsoleServer(tmp_path_factory.mktemp("plain")) as server:
        yield server


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A start that is refused."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "holdfast", "web", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# The token.


def test_the_server_listens_on_loopback_and_prints_a_url_with_a_random_token(console: Start, tmp_path: Path) -> None:
    one, other = console(tmp_path), console(tmp_path)
    assert one.host.startswith("127.0.0.1:") and other.host.startswith("127.0.0.1:")
    assert len(one.token) >= 32 and one.token != other.token
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.2", one.port)) != 0


@pytest.mark.parametrize("path", PAGES)
def test_without_the_token_no_page_is_shown(plain: ConsoleServer, path: str) -> None:
    server = plain
    for answer in (
        server.ask(path),
        server.ask(path, cookie=f"holdfast_{server.port}=wrong"),
        server.ask(path, cookie='"'),
        server.ask(path, "POST", "action=pause"),
    ):
        assert answer.status in (401, 403)
        assert server.words[0] not in answer.text and server.token not in answer.text


def test_a_wrong_token_shows_nothing(plain: ConsoleServer) -> None:
    assert plain.ask("/?token=wrong").status == 401
    for proof in ("Bearer wrong", basic("", plain.token)):
        assert plain.ask("/", authorization=proof).status == 401


def test_the_printed_url_sets_a_cookie_that_scripts_and_other_sites_do_not_get(plain: ConsoleServer) -> None:
    server = plain
    answer = server.ask(f"/locks?text=a%26b&token={server.token}")
    cookie = answer.headers["set-cookie"]
    assert answer.status == 200 and 'url=/locks?text=a%26b"' in answer.text
    assert server.token not in answer.text + cookie, "the next page does not contain the token"
    assert {"httponly", "samesite=strict"} <= {part.strip().lower() for part in cookie.split(";")}
    assert server.ask("/locks", cookie=cookie.partition(";")[0]).status == 200
    assert server.ask(f"//evil.example/?token={server.token}").text.count('url=/evil.example/"') == 1


def test_the_environment_can_set_the_token(console: Start, tmp_path: Path) -> None:
    server = console(tmp_path, environment={"HOLDFAST_WEB_TOKEN": "t" * 40})
    assert server.token == "t" * 40 and server.get("/").status == 200


# Other addresses.


def test_another_address_needs_a_user_and_a_password(tmp_path: Path) -> None:
    done = run(tmp_path, "--address", "0.0.0.0", "--port", 0)
    assert done.returncode == 2 and "--user" in done.stderr and "Traceback" not in done.stderr
    done = run(tmp_path, "--address", "0.0.0.0", "--port", 0, "--user", "ops")
    assert done.returncode == 2 and "HOLDFAST_WEB_PASSWORD" in done.stderr
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert run(tmp_path, "--user", "ops", "--password-file", empty).returncode == 2


def test_a_user_with_a_password_from_the_environment_or_a_file(console: Start, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("correct horse\n")
    for words, environment in (([], PASSWORD), (["--password-file", file], {})):
        server = console(tmp_path, "--address", "0.0.0.0", "--user", "ops", *words, environment=environment)
        assert "token" not in server.url
        host = f"127.0.0.1:{server.port}"
        assert server.ask("/", host=host, authorization=basic("ops", "correct horse")).status == 200
        refused = server.ask("/", host=host)
        assert refused.status == 401 and refused.headers["www-authenticate"].startswith("Basic")
        wrong = [("ops", "x"), ("x", "correct horse")]
        assert {server.ask("/", host=host, authorization=basic(*one)).status for one in wrong} == {401}
        assert server.ask("/", host=host, authorization="Basic !").status == 401


def test_wrong_passwords_are_tried_one_after_another(console: Start, tmp_path: Path) -> None:
    """Many connections do not guess faster than one."""
    from concurrent.futures import ThreadPoolExecutor
    from time import monotonic

    server = console(tmp_path, "--user", "ops", environment=PASSWORD)
    began = monotonic()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda guess: server.ask("/", authorization=basic("ops", guess)).status, "abcd"))
    assert found == [401] * 4 and monotonic() - began >= 4 * 0.5


# Other sites.


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "169.254.169.254"])
def test_a_foreign_name_of_the_server_is_refused(plain: ConsoleServer, host: str) -> None:
    """Else a site whose name resolves to 127.0.0.1 could read the pages."""
    server = plain
    assert server.get("/", host=host).status == 421
    assert server.ask("/healthz", host=host).status == 421


def test_allow_host_adds_a_name(console: Start, tmp_path: Path) -> None:
    server = console(tmp_path, "--allow-host", "tasks.example.org")
    assert server.get("/", host="tasks.example.org").status == 200
    assert server.get("/", host="Tasks.Example.org:443").status == 200
    assert server.get("/", host="example.org").status == 421


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_may_only_link_here(plain: ConsoleServer, site: str) -> None:
    server = plain
    link = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert server.get("/", sec_fetch_site=site, **link).status == 200
    assert server.get("/", sec_fetch_site=site, sec_fetch_mode="no-cors", sec_fetch_dest="script").status == 403
    assert server.get("/", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe").status == 403
    assert server.get("/", sec_fetch_site=site, sec_fetch_mode="cors", sec_fetch_dest="empty").status == 403
    assert server.get("/", sec_fetch_site="same-origin", sec_fetch_mode="cors").status == 200


def test_a_form_of_another_site_is_refused(console: Start, tmp_path: Path) -> None:
    queue = TaskQueue(tmp_path / "jobs")
    queue.put(1)
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    act = f"{slug(server, 'queue')}/act"
    cookie = server.ask(f"/?token={server.token}").headers["set-cookie"].partition(";")[0]
    refused: list[dict[str, str]] = [
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{server.port + 1}"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "cross-site", "origin": f"http://{server.host}"},
        {"sec_fetch_site": "same-site", "origin": f"http://{server.host}"},
        {},
    ]
    for headers in refused:
        assert server.ask(act, "POST", "action=pause", cookie=cookie, **headers).status == 403, headers
    assert not queue.is_paused and not (tmp_path / "audit").exists()
    assert server.ask(act, "POST", "action=pause", cookie=cookie, origin=f"http://{server.host}").status == 303
    assert queue.is_paused


def test_an_origin_that_is_no_url_is_foreign(plain: ConsoleServer) -> None:
    assert plain.ask("/act", "POST", "action=pause", origin="http://[").status == 403
    assert plain.complaints() == ""


def test_a_form_without_end_is_not_kept_in_memory(console: Start, tmp_path: Path) -> None:
    """A body in chunks does not say how long it is."""
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        head = f"POST /act HTTP/1.1\r\nHost: {server.host}\r\nAuthorization: Bearer {server.token}\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"%x\r\n%s\r\n" % (1 << 14, b"a" * (1 << 14))
        connection.sendall(chunk * 5)  # and no end
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 413 ")
    assert server.post("/act", "a=" + "a" * (1 << 17)).status == 413
    assert server.post("/act", "action=nothing").status == 404


# Headers, and what is shown.


@pytest.mark.parametrize("path", ["/", "/metrics", "/static/app.js", "/healthz", "/nothing"])
def test_every_answer_forbids_foreign_scripts_frames_and_caches(plain: ConsoleServer, path: str) -> None:
    headers = plain.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'" and "unsafe" not in str(policy)
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin" and headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_pages_have_no_inline_script_or_style(console: Start, tmp_path: Path) -> None:
    queue = TaskQueue(tmp_path / "jobs")
    queue.put({"a": 1}, id="a")
    hold = LockFile(str(tmp_path / "x.lock")).acquire()
    server = console(tmp_path, "--allow-actions", "--audit-log", tmp_path / "audit")
    jobs = slug(server, "queue")
    for path in ("/", "/locks", "/queues", jobs, f"{jobs}/task?id=a", f"{jobs}/confirm?action=pause"):
        text = server.get(path).text
        assert text.count("<script") == 1 and "<script src=" in text and "style=" not in text and " onclick" not in text
    hold.release()


def test_values_of_secret_keys_are_redacted_in_every_view(console: Start, tmp_path: Path) -> None:
    secret = "hunter2"
    queue = TaskQueue(tmp_path / "jobs", retry_after=0)
    payload = {"password": secret, "deep": [{"Token": [secret]}], "user": "ada"}
    queue.put(payload, id="a", attempts=1)
    queue.put(f'{{"token": "{secret}", "user": "bob"}}', id="b", attempts=1)  # as `holdfast tasks put` stores it
    queue.schedule("nightly", payload, every=60)
    for _ in "ab":
        claim = queue.claim()
        assert claim is not None
        claim.fail(
            ValueError(
                f"login failed: password={secret}, {{'token': '{secret}'}} --password {secret} https://u:{secret}@h/"
            )
        )
    store = EventStore(str(tmp_path / "shop"))
    store.append(Event("Login", payload, tags=[f"token:{secret}", "user:7"], metadata={"password": secret}))
    hold = LockFile(str(tmp_path / "x.lock"), tag=f"token={secret}").acquire()
    server = console(tmp_path, "--redact", "password,token")
    jobs, shop = slug(server, "queue"), slug(server, "store")
    paths = ["/", "/locks", f"/lock?name={tmp_path}/x.lock", jobs, f"{jobs}/task?id=a", f"{jobs}/task?id=b", shop]
    for path in (*paths, f"{shop}/event?position=1", "/metrics"):
        text = server.get(path).text
        assert secret not in text, path
    assert "[redacted]" in server.get(f"{jobs}/task?id=a").text and "ada" in server.get(f"{jobs}/task?id=a").text
    assert "user:7" in server.get(shop).text and "bob" in server.get(f"{jobs}/task?id=b").text
    assert ">b<" in server.get(f"{jobs}?text=b").text
    assert not [part for part in (secret, "login", "ada") if ">a<" in server.get(f"{jobs}?text={part}").text], (
        "a search does not tell what is in payloads and errors"
    )
    hold.release()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("bad {'password': ['SECRET', 'SECRET'], 'user': 'ada'}", "bad {'password': [redacted], 'user': 'ada'}"),
        ("token={'a': [{'b': \"it's SECRET]\"}]} user=ada", "token=[redacted] user=ada"),
        ('"token": [\n  "SECRET"\n], "user": "ada"', '"token": [redacted], "user": "ada"'),
        ("{'password': b'SECRET', 'user': 'ada'}", "{'password': [redacted], 'user': 'ada'}"),
        ("Login(password=SecretStr('SECRET'), user='ada')", "Login(password=[redacted], user='ada')"),
        ("[('token', 'SECRET'), ('user', 'ada')]", "[('token', [redacted]), ('user', 'ada')]"),
        ("Token: Bearer SECRET\nuser: ada", "Token: [redacted]\nuser: ada"),
        ('password="""SECRET" SECRET""" ada', "password=[redacted] ada"),
        (r"{\"token\": \"a \\\"SECRET\\\"\", \"user\": 1}", r"{\"token\": [redacted], \"user\": 1}"),
        (r"{\\\"token\\\": \\\"SECRET\\\", \\\"user\\\": 1}", r"{\\\"token\\\": [redacted], \\\"user\\\": 1}"),
        ("password='SECRET and so on, cut", "password=[redacted]"),
        ("token=[SECRET, cut", "token=[redacted]"),
        ("token=, user=ada", "token=, user=ada"),
    ],
)
def test_a_secret_in_a_text_is_redacted_to_its_end(text: str, shown: str) -> None:
    clean = Cleaner(["password", " token", ""])
    assert clean(text) == clean(clean(text)) == shown


def test_passwords_of_urls_are_shown_nowhere(console: Start, tmp_path: Path) -> None:
    url = "redis://:" + "hunter2" + "@127.0.0.1:1/0"
    queue = TaskQueue(tmp_path / "jobs")
    queue.put({"from": url, "to": [url]}, id="a")
    queue.put(f"copy {url}", id="b")
    server = console(tmp_path, url, "postgresql://ci:hunter2@127.0.0.1:1/ops")
    jobs = slug(server, "queue")
    for path in ("/", "/locks", "/queues", "/stores", "/metrics", jobs, f"{jobs}/task?id=a", f"{jobs}/task?id=b"):
        text = server.get(path).text
        assert "hunter2" not in text, path
    assert "redis://:***@127.0.0.1:1/0" in server.get(f"{jobs}/task?id=a").text


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "99999"],
        ["--address", "203.0.113.7", "--user", "x"],
        ["/nothing/here", "--port", "1", "--nope"],
        ["nosuch://host"],
    ],
)
def test_a_wrong_start_is_one_line_and_an_exit_status(words: list[str]) -> None:
    done = run(*words, **PASSWORD)
    assert done.returncode in (2, 3) and "Traceback" not in done.stderr and "Holdfast web:" not in done.stdout


def test_a_port_in_use_names_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = run(tmp_path, "--port", listener.getsockname()[1])
    assert done.returncode == 3 and "--port 0" in done.stderr and done.stderr.count("\n") == 1


def test_a_place_that_does_not_exist_yet_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = run(tmp_path, tmp_path / "typo", "--port", listener.getsockname()[1])
    assert done.stderr.startswith(f"holdfast web: {tmp_path}/typo: there is nothing here yet\n")


def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    for package in ("starlette", "uvicorn", "jinja2"):
        code = f"import sys; sys.modules[{package!r}] = None; from holdfast.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, "web", str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3 and f"{package} is missing" in done.stderr and "holdfast[web]" in done.stderr
