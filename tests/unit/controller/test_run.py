"""The controller looks after Redis while the parts of its run start."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pytest
import redis
from rich.console import Console

from buffer.redis.server import EmbeddedServer
from configs.load import load_config
from controller.report.panel import Panel
from controller.run import Run
from controller.run_dir import RunDir
from controller.signals import Stopped, StopRequest


def test_redis_that_dies_while_pools_start_starts_again(tmp_path: Path) -> None:
    config = load_config([f"run.dir={tmp_path}"])
    run_dir, stop = RunDir.create(str(tmp_path), "a", "quickstart"), StopRequest()
    said = io.StringIO()
    run = Run(config, run_dir, Panel(console=Console(file=said)), stop)
    run._look()  # before there is one
    log = run_dir.log_of("redis")
    server = EmbeddedServer.start(run_dir.path / "redis", config.buffer, "127.0.0.1", log)
    run._server = server
    with redis.Redis.from_url(server.url) as client:
        client.set("a", 1)
        psutil.Process(server.pid).kill()
        server.wait()
        run._look()
        assert client.get("a") == b"1"
    assert said.getvalue() == "redis died: it starts again with its data\n"
    stop.set()
    with pytest.raises(Stopped):
        run._look()
    server.stop(10)
