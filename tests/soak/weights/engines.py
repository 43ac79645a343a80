"""Engines that can be killed: real starts, commits and restarts around a stand-in server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from buffer.run_state import RunState
from configs.rollout_schema import EngineConfig
from processes.child import Child
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from tests.soak.weights import stand_in_server
from tests.soak.weights.model import Weights
from tests.soak.weights.scene import Scene
from tests.support.rollout import engine_spec


class _StandInServer:
    """A child process like the one that SGLangEngine starts."""

    def __init__(self, spec: EngineSpec, port: int, seen: Path, load_s: float) -> None:
        self.served_name = f"stand-in-{uuid.uuid4().hex[:8]}"
        fields = {
            "served_name": self.served_name,
            "host": spec.host,
            "port": port,
            "seen": str(seen),
            "load_s": load_s,
        }
        command = [sys.executable, stand_in_server.__file__, json.dumps(fields)]
        self.child = Child(command, spec.log_path, secret=spec.key)

    def note_family(self) -> None:
        """It has none."""

    def stop(self, timeout_s: float) -> None:
        self.child.stop(min(timeout_s, 1.0))  # a stopped one does not see its input end


class StandInEngine(SGLangEngine):
    """Everything but the server itself is the real one."""

    def __init__(self, spec: EngineSpec, seen: Path, load_s: float) -> None:
        super().__init__(spec)
        self._seen = seen
        self._load_s = load_s

    def _launch(self, port: int) -> None:
        server: Any = _StandInServer(self.spec, port, self._seen, self._load_s)
        self._server = server
        self._client = SGLangClient(
            self.spec.name,
            f"http://{self.spec.host}:{port}",
            key=self.spec.key,
            request_timeout_s=self.spec.config.request_timeout_s,
        )


class MortalEngine:
    """One engine beside one receiver, and what it has read."""

    def __init__(self, scene: Scene, name: str, host: str, state: RunState) -> None:
        self.name = name
        self._seen = scene.folder / f"{name}.seen"
        spec = engine_spec(
            name=name,
            config=EngineConfig(start_timeout_s=60, request_timeout_s=60, max_restarts=10_000),
            host=host,
            log_path=scene.folder / f"{name}.log",
            leftovers_path=scene.folder / f"{name}.leftovers",
            key=scene.key,
        )
        self._engine = StandInEngine(spec, self._seen, load_s=0.2)
        self._life = EngineLife(self._engine, config=scene.config, key=scene.key, state=state)

    async def start(self) -> None:
        await self._life.start()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is being started again at this moment
            os.kill(self._engine.info.pid, number)

    async def stop(self) -> None:
        await self._life.stop()

    def torn(self, weights: Weights) -> list[str]:
        """Versions of which it has read other weights than the trainer's."""
        found = []
        for line in self._seen.read_text().splitlines():
            version, digest = json.loads(line)
            data = weights.file_data(version).numpy().tobytes()
            if digest != hashlib.sha256(weights.layout.file_header + data).hexdigest():
                found.append(f"{self.name}: version {version}")
        return found
