"""`holdfast web` as a process, for tests of the console, and requests to it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from tempfile import TemporaryFile
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from support import PATIENCE


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str


_EXPECTED = ("Actions are allowed. ", "took the lock away from", ": there is nothing here yet\n")


class ConsoleServer:
    """A running `holdfast web`. Leaving the `with` block ends it and insists that it had no complaints."""

    def __init__(
        self, *words: object, port: int = 0, environment: dict[str, str] | None = None, prelude: str = ""
    ) -> None:
        self._prelude = prelude  # code that runs first
        self.words = [str(word) for word in words]
        self._environment = {**os.environ, **(environment or {})}
        self._begin(port)

    def _begin(self, port: int) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115
        start = ["-c", f"{self._prelude}\nfrom holdfast import __main__"] if self._prelude else ["-m", "holdfast"]
        command = [sys.executable, "-W", "error", *start, "web", "--port", str(port), *self.words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, env=self._environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("Holdfast web: "), (line, self.complaints())
        self.url = line.removeprefix("Holdfast web: ").strip()
        parts = urlsplit(self.url)
        assert parts.port is not None
        self.port = parts.port
        self.host = parts.netloc
        self.token = parse_qs(parts.query).get("token", [""])[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def at(self, path: str) -> str:
        """The URL of a page, with the token."""
        joint = "&" if "?" in path else "?"
        return f"http://{self.host}{path}" + (f"{joint}token={self.token}" if self.token else "")

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Send a request with these headers, and no others. `_` in a name stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            if body is not None:
                sent.setdefault("content-type", "application/x-www-form-urlencoded")
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask(path, authorization=f"Bearer {self.token}", **headers)

    def post(self, path: str, body: str, **headers: str) -> Answer:
        return self.ask(path, "POST", body, authorization=f"Bearer {self.token}", **headers)

    def stop(self) -> None:
        """End it as an administrator does. Connections of browsers are lost."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)

    def restart(self) -> None:
        """Start it again on the same port."""
        assert self.process.poll() is not None
        self._close()
        self._begin(self.port)

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def __enter__(self) -> ConsoleServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            complaints = "".join(
                line
                for line in self.complaints().splitlines(keepends=True)
                if not any(one in line for one in _EXPECTED)
            )
            self._close()
        if kind is None:
            assert complaints == "", complaints
            assert self.process.returncode in (0, -signal.SIGTERM)
        else:
            sys.stderr.write(complaints)


class Stream:
    """The live stream of a page: what the script of the page gets. `next()` waits for the page's next content."""

    def __init__(self, server: ConsoleServer, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        sent = {"accept": "text/event-stream", "authorization": f"Bearer {server.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("GET", path, headers=sent)
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            self.close()
            raise AssertionError(f"{path}: {self._answer.status}")
        self.id = ""

    def next(self) -> str:
        """The content of the next event."""
        lines: list[str] = []
        while True:
            line = self._answer.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("id: "):
                self.id = line[4:].strip()
            elif line.startswith("data: "):
                lines.append(line[6:])
            elif line == "\n" and lines:
                return "".join(lines)

    def until(self, text: str) -> str:
        """The first content that contains a text."""
        while text not in (found := self.next()):
            pass
        return found

    def close(self) -> None:
        self._answer.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slug(server: ConsoleServer, kind: str, name: str = "") -> str:
    """The path of the page of a queue ("queue") or a store ("store") whose name ends so."""
    page = server.get("/queues" if kind == "queue" else "/stores").text
    found = re.findall(rf'<h3><a href="(/{kind}/[^"]+)">([^<]*)</a>', page)
    (path,) = {path for path, shown in found if shown.endswith(name)}
    return str(path)
