"""A headless Chromium that is driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--no-first-run", "about:blank"),
)
PATIENCE_S = 240.0


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def ask(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self._socket.receive_json()
                if found.get("id") == number:
                    assert "error" not in found, found
                    return found["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        found = await self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.run(f"Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def show(self, *, width: int, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)

    async def hindrances(self) -> list[str]:
        """Serious and critical findings of axe-core in the page as it is."""
        if not await self.run("'axe' in window"):
            script = files("axe_playwright_python").joinpath("axe.min.js")
            await self.run(script.read_text("utf-8") + ";0")
        found = json.loads(await self.run("axe.run().then(JSON.stringify)"))
        assert len(found["passes"]) > 20, "it has seen the page"
        return [
            f"{one['impact']} {one['id']}: {node['html'][:200]} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
            if one["impact"] in ("serious", "critical")
        ]


@asynccontextmanager
async def opened_tab(folder: Path) -> AsyncIterator[Tab]:
    """`folder`: for its profile."""
    assert CHROMIUM is not None
    with (folder / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(
            [CHROMIUM, f"--user-data-dir={folder / 'profile'}", *FLAGS],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        port = folder / "profile" / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not port.exists() or "\n" not in port.read_text():
                await asyncio.sleep(0.1)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{address}/json") as reply:
                tabs = [one for one in await reply.json() if one["type"] == "page"]
            url = tabs[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                yield tab
                await tab.ask("Browser.close")
                # Its helpers write to the profile until the last one has ended.
                browser.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait(60)
