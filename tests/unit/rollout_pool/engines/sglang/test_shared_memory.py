"""The shared memory that an SGLang server needs and may leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.rollout_schema import EngineConfig
from rollout_pool.engines.sglang.arguments import shared_memory_bytes
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.sampling.engine_client import EngineError
from tests.support.rollout import engine_spec


async def test_server_is_not_started_where_shared_memory_has_no_room(tmp_path: Path):
    spec = engine_spec(
        config=EngineConfig(tp_size=10**7),  # more than any machine has room for
        log_path=tmp_path / "engine.log",
        leftovers_path=tmp_path / "leftovers",
    )
    engine = SGLangEngine(spec)
    with pytest.raises(EngineError, match=r"engine-0: no room in /dev/shm .* bytes are free"):
        await engine.start()
    assert [*tmp_path.iterdir()] == []
    assert 0 < shared_memory_bytes(1) < shared_memory_bytes(2) < shared_memory_bytes(8)
