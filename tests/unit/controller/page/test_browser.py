"""The page in a real browser: what it draws, that no text of a model runs, whom it keeps out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controller.page.app import PageServer
from controller.run_dir import RunDir
from tests.support.browser import CHROMIUM, Tab, opened_tab
from tests.support.controller.long_run import DRAWN, write_long_run
from tests.support.controller.records import (
    record_all,
    record_groups,
    recorded_group,
    run_records,
)

NUM_GROUPS = 20_000
pytestmark = [
    *(pytest.mark.long, pytest.mark.slow),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (apt install chromium)"),
]


def test_browser_draws_the_page_and_runs_nothing_of_the_records(
    run_dir: RunDir, runs: Path, tmp_path: Path
) -> None:
    planted = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    record_all(run_dir, run_records(60))
    record_groups(run_dir, [recorded_group(f"g{n}", task=planted) for n in range(3)], said=planted)
    run_dir.end("failed", planted)
    long = RunDir.create(str(runs), "long", "quickstart")
    long.write_config(run_dir.read_config())
    write_long_run(long, 2000, NUM_GROUPS)

    async def look() -> None:
        async with opened_tab(tmp_path) as tab:
            async with _opened(tab, run_dir):
                drawn = await tab.run("document.documentElement.outerHTML")
                assert f"<title>{run_dir.name}: failed</title>" in drawn
                assert "The trainer" in drawn or "balanced" in drawn
                assert drawn.count("main-svg") >= 10, "the charts are there"
                assert "1 to 3 of 3 groups" in drawn
                assert "<td>&lt;img src=x onerror=" in drawn and "<img src=x" not in drawn
            async with _opened(tab, long):
                await tab.until(f"$('count').textContent === '1 to 50 of {NUM_GROUPS} groups'")
                first = await tab.run("$('groups').querySelector('button').textContent")
                assert first == f"group-{NUM_GROUPS - 1}"

    asyncio.run(look())


def test_page_hinders_nobody(run_dir: RunDir, runs: Path, tmp_path: Path) -> None:
    record_all(run_dir, run_records(60))
    record_groups(run_dir, [recorded_group("g", length=300)], said="a line\n" * 100)
    run_dir.end("failed", "a reason")
    record_all(RunDir.create(str(runs), "other", "quickstart"), run_records(60))

    async def look() -> None:
        async with opened_tab(tmp_path) as tab, _opened(tab, run_dir):
            await tab.run("$('groups').querySelector('button').click()")
            await tab.until("$('tokens').children.length && !$('compare').hidden")
            await tab.run("document.querySelectorAll('details').forEach((d) => d.open = true)")
            # The form of a run that goes on, which the next look at this one would hide.
            await tab.run("showState = () => {}; $('tune').hidden = false; pointAt(3)")
            for width, dark in itertools.product((1280, 390), (False, True)):
                await tab.show(width=width, dark=dark)
                await tab.run("drawAll()")
                assert await tab.hindrances() == []
                await tab.run("$('tune').requestSubmit()")
                assert await tab.hindrances() == []
                await tab.run("$('sure').close()")
            await tab.run("$('wanted').labels[0].replaceWith($('wanted'))")
            assert [one[:14] for one in await tab.hindrances()] == ["critical label"]

    asyncio.run(look())


@asynccontextmanager
async def _opened(tab: Tab, run_dir: RunDir) -> AsyncIterator[None]:
    server = PageServer(run_dir, "127.0.0.1", 0)
    try:
        await tab.ask("Page.navigate", url=server.url)
        await tab.until(f"document.title !== 'Leash' && {DRAWN}")
        # What is asked for together arrives in any order.
        await tab.until("document.querySelectorAll('.main-svg').length >= 10")
        await tab.until("!$('count').textContent.includes('still')")
        yield
    finally:
        server.close()
