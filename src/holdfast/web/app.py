"""The pages: which URL shows what, and what a page listens to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..collect.locks import state_of
from ..errors import HoldfastError
from ..owner import without_passwords
from . import text, views
from .actions import Actions
from .console import Console
from .live import Content, Live
from .prometheus import metrics
from .security import Access, Guard
from .views import NotFound
from .watching import Topic, Watcher

View = Callable[[Console, views.Params], tuple[str, views.Context]]
_THREADS = 4
_MAX_FORM = 1 << 16  # bytes
_HERE = Path(__file__).parent
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


class App:
    """The application around a console."""

    def __init__(self, console: Console, actions: Actions) -> None:
        self.console, self.actions = console, actions
        self.watcher = Watcher()
        self.live = Live(self.watcher)
        self._threads = ThreadPoolExecutor(_THREADS, "holdfast-web")
        self._templates = Environment(
            loader=PackageLoader("holdfast.web"),
            autoescape=True,
            finalize=console.clean.final,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        clean = console.clean
        self._templates.filters |= {
            "when": text.when,
            "number": text.number,
            "count": text.count,
            "many": text.many,
            "decimal": lambda value: f"{value:.12g}",
            "json": lambda value: clean.json(value, 2),
            "line": clean.line,
            "query": text.query,
        }
        self._templates.globals |= {
            "state_of": state_of,
            "allow_actions": actions.allowed,
            "console": console,
            "states": views.STATES,
        }

    # Rendering.

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def render(self, view: View, params: views.Params, url: str) -> tuple[str, int]:
        """The content of <main>, and the status."""
        try:
            name, context = view(self.console, params)
            return self._fill(name, context, params, url), 200
        except NotFound as error:
            return self._fill("message.html", {"title": "Not here", "message": str(error)}, params, url), 404
        except (HoldfastError, OSError, ValueError) as error:
            message = without_passwords(str(error))
            return self._fill("message.html", {"title": "Cannot be read", "message": message}, params, url), 503

    def _fill(self, name: str, context: views.Context, params: views.Params, url: str) -> str:
        return self._templates.get_template(name).render(**context, params=params, here=url)

    def page(self, view: View, section: str, topics: Callable[[views.Params], list[Topic]]) -> Any:
        """A handler: the page as HTML, or the stream of its changes."""

        async def handle(request: Request) -> Response:
            params = params_of(request)
            seen = request.headers.get("last-event-id") or params.pop("_seen", "")
            given = {key: params[key] for key in request.query_params if key in params}
            query = urlencode(given, errors="surrogateescape")
            url = request.url.path + (f"?{query}" if query else "")

            async def main() -> str:
                html, _ = await self.in_thread(lambda: self.render(view, params, url))
                return str(html)

            if "text/event-stream" in request.headers.get("accept", ""):
                stream = self.live.stream(url, seen, main, lambda: topics(params))
                return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM)
            html, status = await self.in_thread(lambda: self.render(view, params, url))
            values = {"main": html, "section": section, "id": Content.of(html).id}
            return respond(self._templates.get_template("base.html").render(values), status)

        return handle

    # Topics.

    def all_topics(self, params: views.Params) -> list[Topic]:
        return self.console.topics

    def lock_topic(self, params: views.Params) -> list[Topic]:
        return [self.console.locks.topic]

    def queue_topic(self, params: views.Params) -> list[Topic]:
        found = self.console.queues.get(params["slug"])
        return [found.topic] if found else [self.console.locks.topic]

    def store_topic(self, params: views.Params) -> list[Topic]:
        found = self.console.stores.get(params["slug"])
        return [found.topic] if found else [self.console.locks.topic]

    # Everything.

    async def _metrics(self, request: Request) -> Response:
        found = await self.in_thread(lambda: metrics(self.console))
        return PlainTextResponse(found, media_type="text/plain; version=0.0.4")

    async def _confirm(self, request: Request) -> Response:
        params = params_of(request)
        if not self.actions.allowed:
            return PlainTextResponse("This server changes nothing. Start it with --allow-actions.", 403)
        html, status = await self.in_thread(lambda: self.render(self.actions.confirm, params, request.url.path))
        values = {"main": html, "section": "", "id": ""}
        return respond(self._templates.get_template("base.html").render(values), status)

    async def _act(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():  # its length may not be known before
            body += part
            if len(body) > _MAX_FORM:
                return PlainTextResponse("The form is too large. Nothing was done.", 413)
        sender = f"{request.scope['sender']} at {request.client.host if request.client else '?'}"
        name = params_of(request).get("name")
        params = {**request.path_params, **({} if name is None else {"name": name})}
        return await self.in_thread(lambda: self.actions.act(params, body, sender))  # type: ignore[no-any-return]

    def routes(self) -> list[Route | Mount]:
        page = self.page
        return [
            Route("/", page(views.overview, "overview", self.all_topics)),
            Route("/locks", page(views.locks, "locks", self.lock_topic)),
            Route("/lock", page(views.lock, "locks", self.lock_topic)),
            Route("/queues", page(views.queues, "queues", self.all_topics)),
            Route("/queue/{slug}", page(views.queue, "queues", self.queue_topic)),
            Route("/queue/{slug}/task", page(views.task, "queues", self.queue_topic)),
            Route("/stores", page(views.stores, "events", self.all_topics)),
            Route("/store/{slug}", page(views.store, "events", self.store_topic)),
            Route("/store/{slug}/event", page(views.event, "events", self.store_topic)),
            Route("/confirm", self._confirm),
            Route("/queue/{slug}/confirm", self._confirm),
            Route("/act", self._act, methods=["POST"]),
            Route("/queue/{slug}/act", self._act, methods=["POST"]),
            Route("/metrics", self._metrics),
            Route("/healthz", _healthz),
            Route("/favicon.ico", _favicon),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    def asgi(self, access: Access) -> Guard:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> Any:
            yield
            self.live.end()
            self.watcher.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

        return Guard(Starlette(routes=self.routes(), lifespan=lifespan), access)


def params_of(request: Request) -> dict[str, str]:
    """The parameters of a URL. `name` is that of a file, and so may have bytes that are not UTF-8."""
    query = request.scope["query_string"].decode("latin-1")
    names = [value for key, value in parse_qsl(query, errors="surrogateescape") if key == "name"]
    return {**request.query_params, **({"name": names[-1]} if names else {}), **request.path_params}


def respond(html: str, status: int = 200) -> Response:
    """An HTML page. Half characters, which file names and JSON can contain, are replaced."""
    return Response(html.encode(errors="replace"), status, media_type="text/html; charset=utf-8")


async def _favicon(request: Request) -> Response:
    """For pages without HTML. The others name the file."""
    return FileResponse(_HERE / "static/favicon.svg")


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")
