"""Real servers for the tests, on loopback.

    server = Postgres.start()       installs PostgreSQL if this process may. `Redis`, `Etcd` and `Samba` start so, too
    server.url("database")          for a user without special rights
    server.kill()                   SIGKILL for every process of the server
    server.restart()                the same data and the same port
    server.stop()                   and its files are deleted

A process of tests has at most one server of each kind. The kernel ends the server if that process dies.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from support import PATIENCE, is_alive, until

USER, PASSWORD = "tester", "not-to-be-seen"
LOGIN = f"root:{PASSWORD}"  # of etcd with users
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


class Proxy:
    """Forwards connections to the server. `cut` names a message of the client at which it cuts a connection: after the
    server has answered it, or before the server gets it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut: tuple[bytes, str] | None = None
        self.then: tuple[bytes, str] | None = None  # the cut behind that one
        self.cuts = 0
        self._sent = bytearray()  # by clients
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def counted(self, message: bytes) -> int:
        """How often clients sent a message that the server has answered."""
        return self._sent.count(message)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=self._forward, args=[client], daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        is_cut = False
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for source in ready:
                    try:
                        data = source.recv(1 << 16)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    if source is client:
                        self._sent += data
                    if source is client and self.cut is not None and self.cut[0] in data:
                        when, self.cut, self.then = self.cut[1], self.then, None
                        self.cuts += 1
                        is_cut = True
                        if when == "before":
                            return
                    elif source is server and is_cut:
                        return
                    (server if source is client else client).sendall(data)

    def cut_all(self) -> None:
        """Cut the connections that are open now."""
        for client in self._clients:
            with suppress(OSError):  # closed already
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the call of accept
        self._listener.close()


class Server:
    """One process of a server, with its children, its port and its directory."""

    kind = ""  # in the name of the directory
    user = "daemon"  # runs the server, if this is root

    def __init__(self) -> None:
        delete_left_over(self.kind)
        # Not below the directory of pytest, which other users cannot enter.
        self.directory = Path(tempfile.mkdtemp(prefix=f"holdfast-{self.kind}-{os.getpid()}-"))
        if os.geteuid() == 0:
            shutil.chown(self.directory, self.user)
        self.port = 0
        self.addresses = ["127.0.0.1"]
        self.tls: dict[str, Path] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def use_tls(self, files: dict[str, Path]) -> None:
        """Serve only clients with certificates. files: ca, cert, key, and client_cert and client_key for the clients

        The server has a second address, for which its certificate is not valid.
        """
        self.addresses = ["127.0.0.1", "127.0.0.2"]
        for name, file in files.items():
            self.tls[name] = Path(shutil.copy(file, self.directory / f"{name}.pem"))
            if os.geteuid() == 0 and "client" not in name:
                shutil.chown(self.tls[name], self.user)
            self.tls[name].chmod(0o600 if name != "ca" else 0o644)

    def command(self) -> list[object]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def run(self) -> None:
        """Start for the first time, on a port that is free."""
        for _ in range(5):  # another program may take the port first
            self.choose_port()
            if self.starts():
                return
        pytest.fail(f"{self.kind} does not start: {self.log()[-1000:]}", pytrace=False)

    def choose_port(self) -> None:
        self.port = free_port()

    def restart(self) -> None:
        """Start the server again. Another program may have its port for a moment."""
        until(self.starts)

    def starts(self) -> bool:
        """Start the server, and wait until it accepts connections. False: it has ended."""
        self.begin()
        until(lambda: self.process is None or self.process.poll() is not None or self.is_ready())
        return self.process is not None and self.process.poll() is None

    def begin(self) -> None:
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                as_user(self.user, *self.command()),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the server
            )

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


class Postgres(Server):
    kind = user = "postgres"

    def __init__(self, programs: Path, settings: dict[str, object]) -> None:
        super().__init__()
        self.programs = programs
        self.settings = settings

    @classmethod
    def start(cls, settings: dict[str, object] = SETTINGS, tls: dict[str, Path] | None = None) -> Postgres:
        def find() -> Path | None:
            found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
            return found[-1].parent if found else None

        programs = installed("postgresql", find)
        server = cls(programs, settings)
        try:
            server.create()
            if tls:
                server.use_tls(tls)
            server.run()
        except BaseException:
            server.stop()
            raise
        return server

    def create(self) -> None:
        password = self.directory / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(password, "postgres")
        options = ["-D", self.directory / "data", "-U", "postgres", "-A", "password", "--pwfile", password, "--no-sync"]
        options += ["--encoding=UTF8", "--locale=C", "--no-instructions"]
        self.check("initdb", *options)

    def use_tls(self, files: dict[str, Path]) -> None:
        super().use_tls(files)
        self.settings = {**self.settings, "ssl": "on"}
        for setting, name in (("ssl_ca_file", "ca"), ("ssl_cert_file", "cert"), ("ssl_key_file", "key")):
            self.settings[setting] = self.tls[name]
        rule = "hostssl all all 127.0.0.0/8 password clientcert=verify-ca"
        (self.directory / "data/pg_hba.conf").write_text(f"{rule}\n")

    def check(self, program: str, *arguments: object) -> None:
        command = as_user("postgres", self.programs / program, *arguments)
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self) -> None:
        super().run()
        with self.connect("postgres", user="postgres") as connection:
            connection.execute(f"create role {USER} login createdb password '{PASSWORD}'")

    def command(self) -> list[object]:
        settings = {**self.settings, "unix_socket_directories": self.directory, "port": self.port}
        settings["listen_addresses"] = ",".join(self.addresses)
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        return [self.programs / "postgres", "-D", self.directory / "data", *options]

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
        url = f"postgresql://{user}:{PASSWORD}@127.0.0.1:{self.port}/{database}"
        names = {"sslrootcert": "ca", "sslcert": "client_cert", "sslkey": "client_key"}
        return url + query({"sslmode": "verify-full"} if self.tls else {}, names, self.tls)

    def allow(self, address: str) -> None:
        """Accept connections from another machine. It takes effect with the next start."""
        with open(self.directory / "data/pg_hba.conf", "a") as rules:
            rules.write(f"host all all {address}/32 password\n")


class Redis(Server):
    """With a password. `restart` forgets all data."""

    kind = "redis"
    user = "redis"

    def __init__(self, program: Path) -> None:
        super().__init__()
        self.program = program
        self.max_memory = 0

    @classmethod
    def start(cls, tls: dict[str, Path] | None = None) -> Redis:
        server = cls(installed("redis-server", lambda: program("redis-server")))
        try:
            if tls:
                server.use_tls(tls)
            server.run()
        except BaseException:
            server.stop()
            raise
        return server

    def command(self) -> list[object]:
        options = {"port": self.port, "save": "", "appendonly": "no", "dir": self.directory, "requirepass": PASSWORD}
        options["maxmemory"] = self.max_memory
        if self.tls:
            options |= {"port": 0, "tls-port": self.port, "tls-ca-cert-file": self.tls["ca"]}
            options |= {"tls-cert-file": self.tls["cert"], "tls-key-file": self.tls["key"]}
        words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [self.program, *words, "--bind", *self.addresses]

    def is_ready(self) -> bool:
        import redis

        try:
            return bool(self.client().ping())
        except redis.RedisError:  # it is starting
            return False

    def client(self):
        import redis

        return redis.Redis.from_url(self.url("").rstrip("/"))

    def url(self, name: str, password: str = PASSWORD) -> str:
        names = {"ssl_ca_certs": "ca", "ssl_certfile": "client_cert", "ssl_keyfile": "client_key"}
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://:{password}@127.0.0.1:{self.port}/0/{name}{query({}, names, self.tls)}"

    def allow(self, address: str) -> None:
        """Nothing to do: with a password, every machine may connect."""


class Samba(Server):
    """A file server with the share "store". It closes the files of a client that vanished after about 10 seconds."""

    kind = "samba"
    user = "root"
    login = "daemon"  # Samba needs an account of the system for each user

    def __init__(self, program: Path) -> None:
        super().__init__()
        self.program = program
        self.share = self.directory / "share"
        self.share.mkdir()

    @classmethod
    def start(cls) -> Samba:
        if os.geteuid() != 0:
            cannot("samba: the server needs root")
        server = cls(installed("samba", lambda: next(iter(Path("/usr/sbin").glob("smbd")), None)))
        try:
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

    def command(self) -> list[object]:
        return [self.program, "-F", "--no-process-group", "--debug-stdout", "-s", self.directory / "smb.conf"]

    def begin(self) -> None:
        self.configure()
        if not (self.directory / "private/passdb.tdb").exists():
            change = ["smbpasswd", "-c", self.directory / "smb.conf", "-s", "-a", self.login]
            text = f"{PASSWORD}\n{PASSWORD}\n"
            done = subprocess.run(change, input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        super().begin()

    def shut_down(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(PATIENCE)

    def tool(self, *words: object) -> str:
        """Run a program of Samba, and return its output."""
        return samba_tool(self.directory, *words)

    def close_share(self, name: str) -> None:
        """Close all files of a share, as an administrator does it. Returns when the locks among them are closed."""
        self.tool("smbcontrol", "smbd", "close-share", name)
        until(lambda: " DENY_WRITE " not in self.tool("smbstatus", "-L"))

    def url(self, path: str, user: str = login, password: str = PASSWORD) -> str:
        return f"smb://{user}:{password}@127.0.0.1:{self.port}/{path}"

    def allow(self, address: str) -> None:
        """Nothing to do: with a password, every machine may connect."""


def samba_tool(directory: Path, program: object, *words: object) -> str:
    command = [program, "-s", directory / "smb.conf", *words]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def watches(pid: int) -> int:
    """How many clients of the Samba server of these tests have a directory open. pid: of the tests"""
    (directory,) = Path(tempfile.gettempdir()).glob(f"holdfast-samba-{pid}-*")
    return samba_tool(directory, "smbstatus", "-L").count(" DENY_NONE  0x81 ")


def _lines(settings: dict[str, object]) -> list[str]:
    return [f"  {name} = {value}" for name, value in settings.items()]


class EtcdNode(Server):
    kind = "etcd"

    def __init__(self, program: Path, name: str) -> None:
        super().__init__()
        self.program = program
        self.name = name
        self.peer_port = 0
        self.cluster: list[EtcdNode] = [self]

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def choose_port(self) -> None:
        if all(node.process is None for node in self.cluster):
            self.port, self.peer_port = free_port(), free_port()

    def command(self) -> list[object]:
        options = {
            "name": self.name,
            "data-dir": self.directory / "data",
            "listen-client-urls": ",".join(f"{self.scheme}://{address}:{self.port}" for address in self.addresses),
            "advertise-client-urls": f"{self.scheme}://127.0.0.1:{self.port}",
            "listen-peer-urls": f"http://127.0.0.1:{self.peer_port}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{self.peer_port}",
            "initial-cluster": ",".join(f"{node.name}=http://127.0.0.1:{node.peer_port}" for node in self.cluster),
            "heartbeat-interval": 50,
            "election-timeout": 500,
            "unsafe-no-fsync": "true",
        }
        known = subprocess.run([self.program, "--help"], capture_output=True, text=True, check=False)
        if "--unsafe-no-fsync" not in known.stdout + known.stderr:
            del options["unsafe-no-fsync"]
        if self.tls:
            options |= {"cert-file": self.tls["cert"], "key-file": self.tls["key"], "client-cert-auth": "true"}
            options["trusted-ca-file"] = self.tls["ca"]
        return [self.program, *(f"--{name}={value}" for name, value in options.items())]

    def ask(self, method: str, **request: object) -> dict[str, object]:
        body = json.dumps(request).encode()
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.tls["ca"]))
            context.load_cert_chain(self.tls["client_cert"], self.tls["client_key"])
        url = f"{self.scheme}://127.0.0.1:{self.port}/v3/{method}"
        with urllib.request.urlopen(url, body, timeout=5, context=context) as answer:
            found: dict[str, object] = json.loads(answer.read())
        return found

    def is_ready(self) -> bool:
        try:
            self.ask("kv/range", key="AA==")  # a read that needs a leader
        except (OSError, http.client.HTTPException):
            return False
        return True


class Etcd:
    """One node, or a cluster of three."""

    def __init__(self, nodes: list[EtcdNode]) -> None:
        self.nodes = nodes

    @classmethod
    def start(cls, number: int = 1, tls: dict[str, Path] | None = None) -> Etcd:
        found = installed("etcd-server", lambda: program("etcd"))
        server = cls([EtcdNode(found, f"n{index}") for index in range(number)])
        try:
            for node in server.nodes:
                node.cluster = server.nodes
                if tls:
                    node.use_tls(tls)
                node.choose_port()
            server.restart()
        except BaseException:
            server.stop()
            raise
        return server

    def restart(self) -> None:
        """Start the nodes that do not run, and wait until all of them answer."""

        def starts() -> bool:
            for node in self.nodes:
                if node.process is None or node.process.poll() is not None:
                    node.begin()
            return self.is_ready()

        until(starts)

    def is_ready(self) -> bool:
        return all(node.is_ready() for node in self.nodes)

    @property
    def directory(self) -> Path:
        return self.nodes[0].directory

    @property
    def addresses(self) -> list[str]:
        return self.nodes[0].addresses

    def allow(self, address: str) -> None:
        """Nothing to do: every machine may connect."""

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def shut_down(self) -> None:
        for node in self.nodes:
            node.shut_down()

    def require_password(self) -> None:
        """From now on, only `LOGIN` may use it."""
        ask = self.nodes[0].ask
        ask("auth/user/add", name="root", password=PASSWORD)
        ask("auth/role/add", name="root")
        ask("auth/user/grant", user="root", role="root")
        ask("auth/enable")

    def kill_leader(self) -> EtcdNode:
        """Kill the leader, and return it. The other nodes elect another one."""
        for node in self.nodes:
            status = node.ask("maintenance/status")
            header = status["header"]
            assert isinstance(header, dict)
            if header["member_id"] == status["leader"]:
                node.kill()
                return node
        raise AssertionError("the cluster has no leader")

    def url(self, name: str, user: str = "") -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        tls = self.nodes[0].tls
        names = {"ca": "ca", "cert": "client_cert", "key": "client_key"}
        return f"{'etcds' if tls else 'etcd'}://{user and user + '@'}{hosts}/{name}{query({}, names, tls)}"

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class FarNetwork:
    """A network of its own, connected to the server by a cable that can be cut. A process enters it by its name."""

    def __init__(self, server: Postgres | Redis | Etcd) -> None:
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
        server.allow(far)
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
        return url.replace("127.0.0.1:", f"{self._near}:")

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


def query(given: dict[str, str], names: dict[str, str], files: dict[str, Path]) -> str:
    """The parameters of a URL: `given`, and those that name the files of TLS. Nothing if there are none."""
    found = [f"{name}={value}" for name, value in given.items()]
    found += [f"{name}={files[file]}" for name, file in names.items() if file in files]
    return "?" + "&".join(found) if found else ""


def program(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)


def delete_left_over(kind: str) -> None:
    """Delete the files of servers whose process of tests was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"holdfast-{kind}-*"):
        if not is_alive(int(directory.name.split("-")[2])):
            shutil.rmtree(directory, ignore_errors=True)
