"""The page in a real browser: what it draws, and that text of a model does not run in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from controller.page.app import PageServer
from controller.run_dir import RunDir
from tests.support.controller.records import (
    record_all,
    record_groups,
    recorded_group,
    run_records,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (apt install chromium)")
def test_browser_draws_the_page_and_runs_nothing_of_the_records(
    run_dir: RunDir, tmp_path: Path
) -> None:
    planted = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    record_all(run_dir, run_records(60))
    record_groups(run_dir, [recorded_group(f"g{n}", task=planted) for n in range(3)], said=planted)
    run_dir.end("failed", planted)
    server = PageServer(run_dir, "127.0.0.1", 0)
    try:
        assert CHROMIUM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        wait = "--virtual-time-budget=10000"  # timers pass at once, while no request is open
        done = subprocess.run(
            [CHROMIUM, *flags, profile, wait, "--dump-dom", server.url],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    finally:
        server.close()
    drawn = done.stdout
    assert f"<title>{run_dir.name}: failed</title>" in drawn
    assert "The trainer" in drawn or "balanced" in drawn
    assert drawn.count("main-svg") >= 10, "the charts are there"
    assert "1 to 3 of 3 groups" in drawn
    assert "<td>&lt;img src=x onerror=" in drawn and "<img src=x" not in drawn
