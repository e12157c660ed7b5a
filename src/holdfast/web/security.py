"""Every request passes here first.

    1. The name in Host must be one of this server. (Else a foreign name that resolves to 127.0.0.1 could read pages.)
    2. A page of another site may link to a page here, and nothing else: Sec-Fetch-Site and Origin are checked.
    3. The request must prove its sender: with the token (in the printed URL, then in a cookie, or as `Authorization:
       Bearer`), or with the user's password (HTTP Basic).

/healthz needs no proof and says nothing but "ok". Every answer carries headers that forbid foreign scripts, frames and
caches.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode
from collections.abc import Collection
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import anyio
from markupsafe import escape
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_DELAY_S = 0.5  # after a wrong token or password
_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "frame-ancestors", "object-src")),
        "form-action 'self'",
    ]
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer", browsers send forms with `Origin: null`
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
# A cookie with SameSite=Strict is not sent with a redirect that begins at a link of another site. So the page that sets
# it loads the next one.
_WELCOME = """<!doctype html><meta charset="utf-8"><title>Holdfast</title>
<meta http-equiv="refresh" content="0;url={}"><p>Opening Holdfast…"""
_WHO = (
    "Holdfast: open the URL that holdfast web has printed. It contains the token of this server; a new start makes a "
    "new one."
)


@dataclass(frozen=True)
class Access:
    """The hosts, the token and the user whose requests are answered."""

    names: Collection[str]  # that Host may contain, without the port
    port: int
    token: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def cookie(self) -> tuple[str, str]:
        """Name and value. Cookies do not belong to a port, so the name contains it."""
        return f"holdfast_{self.port}", hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()

    def sender_of(self, headers: Headers) -> str | None:
        """The name for the audit log. None: the request proves nothing."""
        scheme, _, proof = headers.get("authorization", "").partition(" ")
        if self.token:
            if scheme.lower() == "bearer" and _equal(proof, self.token):
                return "bearer of the token"
            cookies: SimpleCookie = SimpleCookie()
            try:
                cookies.load(headers.get("cookie", ""))
            except Exception:  # a damaged cookie proves nothing
                return None
            name, value = self.cookie
            return "holder of the URL" if name in cookies and _equal(cookies[name].value, value) else None
        try:
            given = b64decode(proof).decode() if scheme.lower() == "basic" else ""
        except ValueError:
            return None
        return self.user if _equal(given, f"{self.user}:{self.password}") else None


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def host_of(headers: Headers) -> str:
    try:
        return (urlsplit(f"//{headers.get('host', '')}").hostname or "").lower()
    except ValueError:
        return ""


def is_foreign(method: str, headers: Headers) -> bool:
    """Was the request begun by a page of another site?"""
    site = headers.get("sec-fetch-site")
    if method in ("GET", "HEAD"):
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site not in (None, "same-origin", "none") and not is_link
    origin = headers.get("origin")
    if site in ("cross-site", "same-site"):
        return True
    if origin is not None:
        try:
            return urlsplit(origin).netloc != headers.get("host")
        except ValueError:
            return True
    if site is not None:
        return site != "same-origin"
    # Not a browser. A program that proves itself with a token means it; a cookie or a password may be a browser's.
    return not headers.get("authorization", "").lower().startswith("bearer ")


class Guard:
    """The checks, around the application."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access
        self._wrong = anyio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = await self._refusal(scope)
        await (answer or self._app)(scope, receive, with_headers)

    async def _refusal(self, scope: Any) -> Response | None:
        """The answer to a request that must not reach the application."""
        headers, access = Headers(scope=scope), self._access
        if host_of(headers) not in access.names:
            return PlainTextResponse("This server has another name. See --allow-host.", 421)
        if is_foreign(scope["method"], headers):
            return PlainTextResponse("A page of another site has sent this request.", 403)
        if scope["path"] == "/healthz":
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = dict(query).get("token")
        if access.token and token is not None and scope["method"] == "GET" and _equal(token, access.token):
            return self._welcome(scope["path"], [pair for pair in query if pair[0] != "token"])
        sender = access.sender_of(headers)
        if sender is None:
            if token is not None or "authorization" in headers:
                async with self._wrong:  # one after another, however many connections guess
                    await anyio.sleep(_DELAY_S)
            basic = {"www-authenticate": 'Basic realm="Holdfast", charset="UTF-8"'} if access.user else None
            return PlainTextResponse(_WHO if access.token else "User and password, please.", 401, basic)
        scope["sender"] = sender
        return None

    def _welcome(self, path: str, query: list[tuple[str, str]]) -> Response:
        target = "/" + quote(path.lstrip("/\\")) + (f"?{urlencode(query)}" if query else "")
        answer = HTMLResponse(_WELCOME.format(escape(target)))
        name, value = self._access.cookie
        answer.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return answer
