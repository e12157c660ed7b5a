"""`holdfast web`: the options, and the server."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys

from ..errors import HoldfastError, UnsafePath, Unsupported
from ..owner import without_passwords

PASSWORD, TOKEN = "HOLDFAST_WEB_PASSWORD", "HOLDFAST_WEB_TOKEN"
PORT = 8017
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

EPILOG = f"""\
PLACE is a directory, a lock, a task queue, an event store, or the URL of a server:
postgresql://user@host/database, etcd://host:2379, redis://host:6379/0, smb://host/share/FILE

The server listens on 127.0.0.1 and prints a URL with a random token, without which it shows nothing. {TOKEN} in the
environment sets the token. Any other address needs --user, with the password in {PASSWORD} or --password-file.

exit status: 0 ended by a signal, 2 wrong usage, 3 the address cannot be used

examples:
  holdfast web /tmp/jobs
  holdfast web -r /srv/app postgresql://user@db/app --redact password,token
  {PASSWORD}=… holdfast web /srv/app --address 0.0.0.0 --user ops --allow-host tasks.example.org
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("places", metavar="PLACE", nargs="*", default=["."], help="directories and URLs (the current directory)")
    add("-r", "--recursive", action="store_true", help="also subdirectories")
    add("--address", metavar="A", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    add("--port", metavar="N", type=int, default=PORT, help=f"the port; 0: any free one ({PORT})")
    add("--user", metavar="NAME", help="ask for this user and a password, instead of the token")
    add("--password-file", metavar="FILE", help=f"a file with the password of --user (or set {PASSWORD})")
    add(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another host name that URLs of this server may have",
    )
    add("--allow-actions", action="store_true", help="let pages retry, cancel and delete tasks, and break lock files")
    add("--audit-log", metavar="FILE", help="where actions are written (~/.local/state/holdfast/web-audit.jsonl)")
    add("--redact", metavar="KEYS", default="", help="hide the values of these keys, such as password,token")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes. Return the exit status."""
    try:
        return _run(options)
    except (UnsafePath, ValueError) as error:
        print(f"holdfast web: {without_passwords(str(error))}", file=sys.stderr)
        return 2
    except (HoldfastError, OSError) as error:
        print(f"holdfast web: {without_passwords(str(error))}", file=sys.stderr)
        return 3


def _run(options: argparse.Namespace) -> int:
    try:
        from . import server
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        raise Unsupported(f"{package} is missing: pip install 'holdfast[web]'") from None
    _check_places(options.places)
    user, password = options.user or "", _password(options) if options.user else ""
    if options.address not in _LOOPBACK and not user:
        raise ValueError(
            f"--address {options.address} needs --user NAME, and the password in {PASSWORD} or --password-file. A "
            "token in a URL is for this machine only."
        )
    token = "" if user else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    with _listener(options.address, options.port) as listener:
        return server.serve(options, listener, token, user, password)


def _check_places(places: list[str]) -> None:
    """A scheme without an engine ends the command. A directory may come later, so a typing error is only a warning."""
    from ..locks.url import engine_of, is_url

    for place in places:
        if is_url(place):
            engine_of(place)
        elif not os.path.lexists(place):
            print(f"holdfast web: {place}: there is nothing here yet", file=sys.stderr, flush=True)


def _password(options: argparse.Namespace) -> str:
    password = os.environ.get(PASSWORD, "")
    if options.password_file:
        with open(options.password_file, encoding="utf-8") as file:
            password = file.read().strip()
    if not password:
        raise ValueError(f"--user needs a password: set {PASSWORD}, or give --password-file FILE")
    return password


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is a number from 0 to 65535, not {port}")
    try:
        return socket.create_server((address, port), family=family, backlog=512)
    except OSError as error:
        text = f"{address} port {port}: {os.strerror(error.errno or 0)}. Give another --port; --port 0 takes a free one"
        raise OSError(error.errno, text) from None
