"""The server: uvicorn around the application. It prints its URL when it accepts connections."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

from .actions import Actions, Audit, audit_path
from .app import App
from .console import Console
from .security import LOOPBACK, Access

if TYPE_CHECKING:
    from types import FrameType

_GRACE_S = 2


class Server(uvicorn.Server):
    """Ends the streams of open pages when a signal comes. Else the server would wait for them."""

    app: App
    loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal is how this server ends: the exit status is 0. Uvicorn would raise the signal again."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.app.live.end)


def serve(options: argparse.Namespace, listener: socket.socket, token: str, user: str, password: str) -> int:
    """Serve until a signal comes."""
    console = Console(options.places, options.recursive, options.redact.split(","))
    audit = Audit(options.audit_log or audit_path()) if options.allow_actions else None
    app = App(console, Actions(console, audit))
    address, port = listener.getsockname()[:2]
    names = {options.address.lower(), *(name.lower() for name in options.allow_host)}
    names |= LOOPBACK if address in LOOPBACK or address in ("0.0.0.0", "::") else set()
    access = Access(frozenset(names), port, token, user, password)
    config = uvicorn.Config(
        app.asgi(access),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = Server(config)
    server.app = app
    host = f"[{address}]" if ":" in address else address
    url = f"http://{host}:{port}/" + (f"?token={token}" if token else "")
    print(f"Holdfast web: {url}", flush=True)
    if audit is not None:
        print(f"Actions are allowed. The audit log is {audit.path}", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    return 0
