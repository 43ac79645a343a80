"""Host memory is pinned for copies by a GPU as long as it is used. No test needs a GPU."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import pytest

from tensors.host_memory import HostMemory
from tests.support.weights.pinning import CudaStandIn


def test_pinned_memory_is_given_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaStandIn().install(monkeypatch)
    memory = HostMemory(3 * mmap.PAGESIZE)
    memory.pin()
    part = memory.tensor()[5:]
    assert cuda.pinned == {memory.tensor().data_ptr(): 3 * mmap.PAGESIZE}
    del memory
    assert cuda.pinned  # a reader still has it
    del part
    assert not cuda.pinned


def test_memory_of_a_file_is_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    with (tmp_path / "file").open("r+b") as file:
        tensor = HostMemory(4, file.fileno()).tensor()
    tensor[1] = ord("x")
    assert (tmp_path / "file").read_bytes() == b"axcd"


def test_memory_that_the_system_does_not_lock_is_used_unpinned_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = CudaStandIn(refusal="operation not permitted").install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for num_bytes in (100, 200):
            memory = HostMemory(num_bytes)
            memory.pin()
            memory.tensor()[7] = 42
            assert memory.tensor()[7] == 42 and cuda.last_error is None
    (said,) = caplog.messages
    assert "operation not permitted (1)" in said and "ulimit -l" in said
    del memory  # and nothing is given back that was never taken
