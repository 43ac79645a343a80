"""`make page`: serves the page of a run that goes on or has ended; a controller does the same.

    browser ──► host ──► token ──► GET  /            the page
               allowed   cookie    GET  /static/...  its script and style, plotly's script
                                   GET  /api/...     what it draws, as JSON
                                   POST /api/tune    from the page itself alone

Text of a model is data here: JSON that the page's script shows as text, and nothing else of what it
gets may run, by the Content-Security-Policy.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import math
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.commands.tune import tune
from controller.page.curves import curves, depth, time_parts, titles
from controller.page.samples import Filter, describe
from controller.page.watched import WatchedRun
from controller.report.timeline import LANE_KINDS, find_lanes, find_timeline
from controller.run_dir import RunDir
from controller.watch.stages import RECENT_S, stages
from host.http_server import HttpLimits, ServerConfig, read_body
from host.loop_thread import LoopThread
from host.network import is_loopback, listen_for
from trainer_pool.data.trained import Trained, read_trained

STATIC = Path(__file__).with_name("static")
TYPES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
HEADERS = {
    # Plotly styles what it draws by attributes, and saves pictures through data URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
LIMITS = HttpLimits(max_connections=128)
EVERYWHERE = ("0.0.0.0", "::")
MAX_RUNS = 8
"""Held at a time, of those beside the page's own."""
MAX_BODY_BYTES = 1000
BEGIN_S = 30.0
"""Longest wait for the first look at a run, at the end."""
LANES_S, MAX_BARS = 60.0, 1500
NO_TOKEN = "open the address that was printed when the page began, with its ?token=...\n"


def make_app(run: WatchedRun, token: str, hosts: Sequence[str]) -> Starlette:
    """`hosts`: names and addresses by which it may be asked for, so that no page of another site
    gets in under a name of its own (DNS rebinding)."""
    page = _Page(run)
    return Starlette(
        routes=[
            Route("/", lambda request: _static("index.html")),
            Route("/static/{name}", lambda request: _static(request.path_params["name"])),
            Route("/api/state", page.state),
            Route("/api/curves", page.curves),
            Route("/api/areas", page.areas),
            Route("/api/groups", page.groups),
            Route("/api/group", page.group),
            Route("/api/timeline", page.timeline),
            Route("/api/tune", page.tune, methods=["POST"]),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(_Guarded, token=token),
        ],
        exception_handlers={ValueError: _say_damage, OSError: _say_damage},
    )


class _Guarded:
    """Asks each request for the token, which the first one may bring in its address."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        # Cookies are not kept apart by port: two pages of a machine need two names.
        self._cookie = f"leash_{sha256(self._token).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._choose(scope)(scope, receive, send_headers)

    def _choose(self, scope: Scope) -> ASGIApp:
        request = Request(scope)  # which passes over what is no cookie of others on this host
        if self._is_token(request.cookies.get(self._cookie, "")):
            return self._app
        given = request.query_params.get("token", "")
        if scope["path"] != "/" or not self._is_token(given):
            return PlainTextResponse(NO_TOKEN, 401)
        found = RedirectResponse("/", 303)
        found.set_cookie(self._cookie, given, httponly=True, samesite="lax")
        return found

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


def _static(name: str) -> Response:
    if name == "plotly.min.js":
        kept = {"cache-control": "private, max-age=3600", "content-encoding": "gzip"}
        return Response(_plotly(), media_type="text/javascript", headers=kept)
    if name not in TYPES:
        raise HTTPException(404)
    return FileResponse(STATIC / name, media_type=TYPES[name])


@cache
def _plotly() -> bytes:
    """Plotly's script, of its own package, in a third of its bytes: ssh -L may be a slow way."""
    spec = find_spec("plotly")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return gzip.compress(path.read_bytes(), 4)  # 6 takes twice the time for a twentieth less


def _say_damage(request: Request, error: Exception) -> Response:
    """A file of the run's folder cannot be read."""
    return PlainTextResponse(str(error), 500)


def _json(found: object) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")


class _Page:
    def __init__(self, run: WatchedRun) -> None:
        self._own = run
        self._root = run.dir.path.parent
        self._others: dict[str, WatchedRun] = {}
        self._trained: Trained | None = None
        """As found last: a group is asked for again with each of its trajectories."""
        self._lock = threading.Lock()

    def _names(self) -> list[str]:
        return sorted(file.parent.name for file in self._root.glob("*/run.json"))

    def _run(self, name: str) -> WatchedRun:
        if name in ("", self._own.dir.name):
            return self._own
        with self._lock:
            if name not in self._others:
                if name not in self._names():
                    raise HTTPException(404, "there is no such run; choose one from the list")
                if len(self._others) == MAX_RUNS:
                    del self._others[next(iter(self._others))]
                self._others[name] = WatchedRun(RunDir(path=self._root / name))
            return self._others[name]

    def state(self, request: Request) -> Response:
        runs = [name for name in self._names() if name != self._own.dir.name]
        return _json({**self._own.state(), "others": runs, "titles": titles()})

    def curves(self, request: Request) -> Response:
        kind, _, name = request.query_params.get("metric", "").partition("/")
        by_time = request.query_params.get("by") == "time"
        names = request.query_params.getlist("run")[: MAX_RUNS + 1] or [self._own.dir.name]
        found = {run: self._run(run).records() for run in names}
        since_s = _since(request)
        return _json(
            {r: curves(of, kind, name, since_s, by_time=by_time) for r, of in found.items()}
        )

    def areas(self, request: Request) -> Response:
        # Not part of the state: the verdict would wait for it.
        records, since_s = self._own.records(), _since(request)
        recent_s = RECENT_S if self._own.state()["is_live"] else math.inf
        found = {"depth": depth(records, since_s), "time": time_parts(records, since_s)}
        return _json({**found, "stages": stages(records, recent_s)})

    def groups(self, request: Request) -> Response:
        given = request.query_params
        bounds = {
            of: (
                _number(given.get(f"min_{of}") or "-inf", float),
                _number(given.get(f"max_{of}") or "inf", float),
            )
            for of in ("reward", "length")
        }
        index, left = self._own.groups()
        start = _number(given.get("start", "0"), int)
        total, rows = index.page(Filter(task=given.get("task", ""), bounds=bounds), max(0, start))
        tasks, every = index.tasks, len(index.rows)
        found = {"total": total, "every": every, "left": left, "tasks": tasks, "rows": rows}
        return _json(found)

    def group(self, request: Request) -> Response:
        given = request.query_params
        place, start = (_number(given.get(name, "0"), int) for name in ("trajectory", "start"))
        index, _ = self._own.groups()
        try:
            recorded = index.find(given.get("id", ""))
            trained, name = self._trained, recorded.group.group_id
            if trained is None or trained.group_id != name:
                self._trained = trained = read_trained(
                    self._own.dir.path, recorded.group, self._own.largest_staleness()
                )
            return _json(describe(recorded, place, start, self._own.decode, trained))
        except (KeyError, ValueError, FileNotFoundError):
            raise HTTPException(
                404, "there is no such group (any more); choose one from the list"
            ) from None

    def timeline(self, request: Request) -> Response:
        given = request.query_params.get("version")
        records = self._own.records()
        found = find_timeline(records, _number(given, int) if given else None)
        lanes = find_lanes(records, LANES_S, MAX_BARS)
        return _json({"version": found, "lanes": lanes, "kinds": LANE_KINDS})

    async def tune(self, request: Request) -> Response:
        """Sets buffer.max_staleness, for the page itself alone: a form of another site can send
        neither this type nor this origin."""
        origin = f"{request.url.scheme}://{request.headers.get('host')}"
        is_json = request.headers.get("content-type") == "application/json"
        if request.headers.get("origin") != origin or not is_json:
            raise HTTPException(403, "only the page itself may change the run; use `make tune`")
        body = await read_body(request, MAX_BODY_BYTES)
        try:
            wanted = msgspec.json.decode(body, type=dict[str, int])["max_staleness"]
            change = [f"buffer.max_staleness={wanted}"]
            await run_in_threadpool(tune, self._own.dir, change)
        except (ValueError, KeyError, OSError) as error:
            raise HTTPException(400, str(error)) from None
        self._own.look_again()
        return _json({"max_staleness": wanted})


def _since(request: Request) -> float:
    return float(_number(request.query_params.get("since") or "inf", float))


def _number(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise HTTPException(400, f"{text!r} is no number; give one") from None


def serve_page(run_dir: RunDir, *, host: str, port: int) -> None:
    """Serves until a signal. Raises ValueError for an address at which it cannot listen."""
    server, listener, url, _ = _prepare(run_dir, host, port, "PORT")
    print(f"the page of {run_dir.name}: {url}\nCtrl-C ends it", flush=True)
    if not is_loopback(host):
        print("Nothing is encrypted: use it in a network of your own, or through ssh -L")
    server.run(sockets=[listener])


class PageServer:
    """The page in a thread of the controller; `close` it. Raises ValueError for a port in use."""

    def __init__(self, run_dir: RunDir, host: str, port: int) -> None:
        found = _prepare(run_dir, host, port, "run.page_port")
        self._server, listener, self.url, self._begins = found
        self._loop = LoopThread("page")
        self._serving = self._loop.run(self._start(listener))

    async def _start(self, listener: socket.socket) -> asyncio.Task[None]:
        return asyncio.create_task(self._server.serve(sockets=[listener]))

    def close(self) -> None:
        self._loop.stop(self._end())
        self._begins.join(BEGIN_S)

    async def _end(self) -> None:
        self._server.should_exit = True
        await self._serving


def _allowed(host: str) -> list[str]:
    """As a browser writes it, without the port."""
    others = ["127.0.0.1", "localhost"] if is_loopback(host) else []
    return [f"[{host}]" if ":" in host else host, *others]


def _prepare(
    run_dir: RunDir, host: str, port: int, setting: str
) -> tuple[uvicorn.Server, socket.socket, str, threading.Thread]:
    """A server, where it listens, its address for a browser, with the token, and the thread that
    reads the run."""
    listener, url = listen_for(setting, host, port)
    token = secrets.token_urlsafe(24)
    run = WatchedRun(run_dir)
    app = make_app(run, token, ["*"] if host in EVERYWHERE else _allowed(host))
    begins = threading.Thread(target=run.begin, name="page-begins", daemon=True)
    begins.start()
    server = uvicorn.Server(ServerConfig(app, LIMITS, close_s=1))
    return server, listener, f"{url}/?token={token}", begins
