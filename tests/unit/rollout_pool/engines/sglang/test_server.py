"""The process of an SGLang server, without an engine: how its scheduler sleeps while it is idle or
paused, and how it notices a child's death."""

from __future__ import annotations

import ast
import multiprocessing
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rollout_pool.engines.sglang import cpu_stubs


class Scheduler:
    def __init__(self) -> None:
        self.flush_wrapper = SimpleNamespace(_pending=None)
        self.done = list[str]()

    def maybe_sleep_on_idle(self) -> None:
        self.done.append("slept")

    def _record_scheduler_state_for_paused_engine(self) -> None:
        self.done.append("recorded")


def test_paused_scheduler_records_its_state_and_sleeps_unless_it_is_asked_for_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_stubs, "install", lambda: None)  # it would change this process
    from rollout_pool.engines.sglang.server import _sleep_when_idle

    class Own(Scheduler):
        pass

    _sleep_when_idle(Own)
    scheduler = Own()
    scheduler._record_scheduler_state_for_paused_engine()
    scheduler.maybe_sleep_on_idle()
    assert scheduler.done == ["recorded", "slept", "slept"]
    scheduler.flush_wrapper._pending = object()
    scheduler._record_scheduler_state_for_paused_engine()
    scheduler.maybe_sleep_on_idle()
    assert scheduler.done[3:] == ["recorded"]


def test_loop_of_a_scheduler_computes_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_stubs, "install", lambda: None)
    from rollout_pool.engines.sglang.server import _compute_for_inference

    class Own:
        def event_loop_normal(self) -> bool:
            return torch.is_inference_mode_enabled()

    _compute_for_inference(Own)
    assert Own().event_loop_normal()


def test_child_that_died_before_any_look_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_stubs, "install", lambda: None)
    from rollout_pool.engines.sglang import server

    class Ended(Exception):
        pass

    def end(_folder: str, failure: str) -> None:
        raise Ended(failure)

    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    child.start()
    child.join(60)
    assert child not in multiprocessing.active_children()
    monkeypatch.setattr(server, "_end", end)
    server._ready.append((child, "detokenizer"))
    with pytest.raises(
        Ended, match=rf"sglang::detokenizer \(process {child.pid}\) died \(exit code 3\)"
    ):
        server._end_with_child("")


def test_sglang_calls_what_is_replaced_in_each_turn_of_a_paused_scheduler() -> None:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    # Its text: an import takes 15 s of CPU.
    source = (Path(spec.origin).parent / "srt/managers/scheduler.py").read_text()
    (found,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Scheduler"
    ]
    methods = {node.name: ast.unparse(node) for node in found.body if hasattr(node, "name")}
    record = "_record_scheduler_state_for_paused_engine"
    assert {record, "maybe_sleep_on_idle"} <= methods.keys()
    assert "scheduler.event_loop_normal()" in source
    for loop in ("event_loop_normal", "event_loop_overlap"):
        assert f"self.{record}()" in methods[loop] and "_engine_paused" in methods[loop]
