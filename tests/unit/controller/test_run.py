"""The controller looks after Redis and its page while the parts of its run start."""

from __future__ import annotations

import contextlib
import io
import socket
from pathlib import Path
from typing import Any

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


def test_page_whose_port_is_taken_ends_no_run_that_goes_on(tmp_path: Path) -> None:
    run_dir, said, going_on = (
        RunDir.create(str(tmp_path), "a", "quickstart"),
        io.StringIO(),
        object(),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as cleanup:
        port = taken.getsockname()[1]
        config = load_config([f"run.dir={tmp_path}", f"run.page_port={port}"])
        panel = Panel(console=Console(file=said, width=200))

        def run(**state: Any) -> Run:
            return Run(config, run_dir, panel, StopRequest(), **state)

        with panel:
            with pytest.raises(ValueError, match=rf"run\.page_port={port}: cannot listen"):
                run()._start_page(cleanup)
            run(resumption=going_on)._start_page(cleanup)
            run(attachment=going_on)._start_page(cleanup)
    assert said.getvalue().count(f"not served: run.page_port={port}: cannot listen") == 2
