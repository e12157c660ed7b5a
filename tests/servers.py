"""Real servers for the tests, on loopback.

    server = Postgres.start()       installs PostgreSQL if this process may. `Samba` starts in the same way
    server.url("database")          for a user without special rights
    server.kill()                   SIGKILL for every process of the server
    server.restart()                the same data and the same port
    server.stop()                   and its files are deleted

A process of tests has at most one server. The kernel ends the server if that process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from support import PATIENCE, is_alive, until

USER, PASSWORD = "tester", "not-to-be-seen"
SETTINGS: dict[str, object] = {
    "max_connections": 100,
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "autovacuum_naptime": "5s",
}


def cannot(why: str) -> None:
    """Skip the test, or fail it in CI, where every test must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def installed(package: str, find: object) -> Path:
    """Where a program is. Its Debian package is installed if the program is missing."""
    assert callable(find)
    if (found := find()) is None and sys.platform.startswith("linux"):
        with open(Path(tempfile.gettempdir()) / "holdfast-tests-apt.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of these tests wait until the package is there
            if (found := find()) is None:
                install(package)
                found = find()
    if found is None:
        cannot(f"{package}: not installed, and installing it needs root and apt-get")
    assert isinstance(found, Path)
    return found


def install(package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package]
    for each in (command, ["apt-get", "-q", "update"], command):
        done = subprocess.run(each, env=environment, capture_output=True, text=True, check=False)
        if each is command and done.returncode == 0:
            return
    cannot(f"{package}: apt-get cannot install it: {done.stderr.strip().splitlines()[-1:]}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def as_user(user: str, *command: object) -> list[str]:
    """The command as another user, if this is root. It gets SIGQUIT when this process dies."""
    prefix = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() == 0:
        prefix += ["--reuid", user, "--regid", user, "--clear-groups"]
    return [*prefix, *map(str, command)]


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found for child in children for found in (child, *descendants(child))]


class PgBouncer:
    """A connection pooler in front of a PostgreSQL server."""

    def __init__(self, server: Postgres, mode: str) -> None:
        program = installed("pgbouncer", lambda: next(iter(Path("/usr/sbin").glob("pgbouncer")), None))
        self.port = free_port()
        self._server = server
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "plain",
            "auth_file": server.directory / "users",
            "pool_mode": mode,
        }
        lines = ["[databases]", f"* = host=127.0.0.1 port={server.port}", "[pgbouncer]"]
        file = server.directory / "pgbouncer.ini"
        file.write_text("\n".join([*lines, *(f"{name}={value}" for name, value in settings.items())]))
        (server.directory / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        self.process = subprocess.Popen(as_user("postgres", program, "-q", file), stderr=subprocess.DEVNULL)
        until(self.is_ready)

    def is_ready(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def url(self, url: str) -> str:
        return url.replace(f":{self._server.port}/", f":{self.port}/")

    def __enter__(self) -> PgBouncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Postgres:
    def __init__(self, programs: Path, directory: Path, settings: dict[str, object]) -> None:
        self.programs = programs
        self.directory = directory
        self.settings = settings
        self.port = 0
        self.addresses = ["127.0.0.1"]
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, settings: dict[str, object] = SETTINGS) -> Postgres:
        def find() -> Path | None:
            found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
            return found[-1].parent if found else None

        programs = installed("postgresql", find)
        delete_left_over()
        # Not below the directory of pytest, which other users cannot enter.
        server = cls(programs, Path(tempfile.mkdtemp(prefix=f"holdfast-postgres-{os.getpid()}-")), settings)
        try:
            server.create()
            server.run()
        except BaseException:
            server.stop()
            raise
        return server

    def create(self) -> None:
        password = self.directory / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (self.directory, password):
                shutil.chown(path, "postgres", "postgres")
        options = ["-D", self.directory / "data", "-U", "postgres", "-A", "password", "--pwfile", password, "--no-sync"]
        options += ["--encoding=UTF8", "--locale=C", "--no-instructions"]
        self.check("initdb", *options)

    def check(self, program: str, *arguments: object) -> None:
        command = as_user("postgres", self.programs / program, *arguments)
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self) -> None:
        for _ in range(5):  # another program may take the port first
            self.port = self.port or free_port()
            self.restart()
            if self.process is not None and self.process.poll() is None:
                break
            self.port = 0
        with self.connect("postgres", user="postgres") as connection:
            connection.execute(f"create role {USER} login createdb password '{PASSWORD}'")

    def restart(self) -> None:
        """Start the server, and wait until it accepts connections."""
        settings = {**self.settings, "unix_socket_directories": self.directory, "port": self.port}
        settings["listen_addresses"] = ",".join(self.addresses)
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                as_user("postgres", self.programs / "postgres", "-D", self.directory / "data", *options),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the server
            )
        until(lambda: self.process is None or self.process.poll() is not None or self.is_ready())

    def is_ready(self) -> bool:
        import psycopg

        try:
            self.connect("postgres", user="postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self, database: str, user: str = USER):
        import psycopg

        return psycopg.connect(self.url(database, user), autocommit=True)

    def url(self, database: str, user: str = USER) -> str:
        return f"postgresql://{user}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def kill(self) -> None:
        assert self.process is not None
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        until(lambda: not any(is_alive(pid) for pid in pids))

    def shut_down(self) -> None:
        """As an administrator does it: open sessions end with an error, and the data is written."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Samba:
    """A file server with the share "store". It closes the files of a client that vanished after about 10 seconds."""

    user = "daemon"  # Samba needs an account of the system for each user

    def __init__(self, program: Path, directory: Path) -> None:
        self.program = program
        self.directory = directory
        self.share = directory / "share"
        self.port = 0
        self.addresses = ["127.0.0.1"]
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> Samba:
        if os.geteuid() != 0:
            cannot("samba: the server needs root")
        program = installed("samba", lambda: next(iter(Path("/usr/sbin").glob("smbd")), None))
        delete_left_over("samba")
        server = cls(program, Path(tempfile.mkdtemp(prefix=f"holdfast-samba-{os.getpid()}-")))
        try:
            server.share.mkdir()
            server.run()
        except BaseException:
            server.stop()
            raise
        return server

    def configure(self) -> None:
        private = ("state", "lock", "cache", "pid", "ncalrpc", "private")
        for name in private:
            (self.directory / name).mkdir(exist_ok=True)
        settings = {
            **{
                f"{name} {'dir' if name in ('ncalrpc', 'private') else 'directory'}": self.directory / name
                for name in private
            },
            "server role": "standalone server",
            "interfaces": " ".join(self.addresses),
            "bind interfaces only": "yes",
            "smb ports": self.port,
            "disable netbios": "yes",
            "load printers": "no",
            "printing": "bsd",
            "printcap name": "/dev/null",
            "disable spoolss": "yes",
            "server min protocol": "SMB2_02",
            "passdb backend": f"tdbsam:{self.directory}/private/passdb.tdb",
            "socket options": "TCP_NODELAY SO_KEEPALIVE TCP_KEEPIDLE=5 TCP_KEEPINTVL=2 TCP_KEEPCNT=3",
        }
        share = {"path": self.share, "read only": "no", "force user": "root"}
        lines = ["[global]", *_lines(settings), "[store]", *_lines(share)]
        lines += ["[readonly]", *_lines({**share, "read only": "yes"})]
        (self.directory / "smb.conf").write_text("\n".join(lines))

    def run(self) -> None:
        for _ in range(5):  # another program may take the port first
            self.port = free_port()
            self.restart()
            if self.process is not None and self.process.poll() is None:
                break

    def restart(self) -> None:
        """Start the server, and wait until it accepts connections."""
        self.configure()
        options = ["-F", "--no-process-group", "--debug-stdout", "-s", self.directory / "smb.conf"]
        if not (self.directory / "private/passdb.tdb").exists():
            change = ["smbpasswd", "-c", self.directory / "smb.conf", "-s", "-a", self.user]
            text = f"{PASSWORD}\n{PASSWORD}\n"
            done = subprocess.run(change, input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "TERM",
                    self.program,
                    "-F",
                    "--no-process-group",
                    "--debug-stdout",
                    *options,
                ],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # when it ends, it sends a signal to its group
            )
        until(lambda: self.process is None or self.process.poll() is not None or self.is_ready())

    def is_ready(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def url(self, path: str, user: str = user, password: str = PASSWORD) -> str:
        return f"smb://{user}:{password}@127.0.0.1:{self.port}/{path}"

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def kill(self) -> None:
        assert self.process is not None
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not any(is_alive(pid) for pid in pids))

    def shut_down(self) -> None:
        """As an administrator does it."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(PATIENCE)

    def allow(self, address: str) -> None:
        """Nothing to do: with a password, every machine may connect."""

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _lines(settings: dict[str, object]) -> list[str]:
    return [f"  {name} = {value}" for name, value in settings.items()]


class FarNetwork:
    """A network of its own, connected to the server by a cable that can be cut. A process enters it by its name."""

    def __init__(self, server: Postgres) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            cannot("network namespaces: need root and the command ip")
        self.name = f"holdfast{os.getpid()}"
        self._cable = f"hf{os.getpid()}"
        self._near, far = (f"10.203.{os.getpid() % 250}.{host}" for host in (1, 2))
        done = subprocess.run(["ip", "netns", "add", self.name], capture_output=True, text=True, check=False)
        if done.returncode:
            cannot(f"network namespaces: {done.stderr.strip()}")
        end = f"{self._cable}b"
        self._ip("link", "add", self._cable, "type", "veth", "peer", "name", end, "netns", self.name)
        self._ip("address", "add", f"{self._near}/24", "dev", self._cable)
        self._ip("-n", self.name, "address", "add", f"{far}/24", "dev", end)
        self._ip("-n", self.name, "link", "set", end, "up")
        self.connect()
        self._server = server
        with open(server.directory / "data/pg_hba.conf", "a") as rules:
            rules.write(f"host all all {far}/32 password\n")
        server.addresses.append(self._near)
        server.shut_down()
        server.restart()

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def connect(self) -> None:
        self._ip("link", "set", self._cable, "up")

    def cut(self) -> None:
        """Packets vanish in both directions. Nobody is told."""
        self._ip("link", "set", self._cable, "down")

    def url(self, url: str) -> str:
        return url.replace("@127.0.0.1:", f"@{self._near}:")

    def enter(self) -> str:
        """The code by which a process enters it."""
        return f"import ctypes, os\nctypes.CDLL(None).setns(os.open('/run/netns/{self.name}', os.O_RDONLY), 0x40000000)"

    def __enter__(self) -> FarNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("link", "delete", self._cable)
        self._ip("netns", "delete", self.name)
        self._server.addresses.remove(self._near)
        self._server.shut_down()
        self._server.restart()


def delete_left_over(kind: str = "postgres") -> None:
    """Delete the files of servers whose process of tests was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"holdfast-{kind}-*"):
        if not is_alive(int(directory.name.split("-")[2])):
            shutil.rmtree(directory, ignore_errors=True)
