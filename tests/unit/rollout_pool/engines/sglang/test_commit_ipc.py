"""The sender's side of checkpoint-engine's protocol, with a peer that follows its worker.

The buffer is in this process's memory here, and in a GPU's in a run.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import save_file

from configs.schema import WeightSyncConfig
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.strategies import Ipc, StagedFile, send_weights
from rollout_pool.sampling.engine_client import EngineError
from tests.support.weights.pinning import CudaStandIn

ADDRESS = "inproc://leash-test"


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {f"w{i}": torch.randn(16 * i + 1) for i in range(7)} | {"h": torch.randn(5).bfloat16()}


@pytest.fixture
def staged(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return StagedFile.open(tmp_path)


class Engine:
    """Plays SGLang's worker at one socket, message by message."""

    def __init__(self, context, buffer, fails_at=None):
        self.buffer = buffer  # where a GPU's handle would lead
        self.socket = context.socket(zmq.REP)
        self.socket.rcvtimeo = self.socket.sndtimeo = 10_000
        self.socket.connect(ADDRESS)
        self.fails_at = fails_at
        self.loaded = {}
        self.ending = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        with self.socket as socket:
            assert socket.recv_pyobj() == "a handle"
            socket.send(b"")
            for number in range(100):
                payload = socket.recv_pyobj()
                if isinstance(payload, list):
                    if number == self.fails_at:
                        socket.send_string("no such parameter")
                        continue
                    for item in payload:
                        size = item["dtype"].itemsize * item["shape"].numel()
                        data = self.buffer[item["offset"] : item["offset"] + size]
                        tensor = data.view(item["dtype"]).view(item["shape"]).clone()
                        self.loaded[item["name"]] = tensor
                    socket.send(b"")
                    continue
                self.ending.append(payload)
                if isinstance(payload, Exception):
                    return
                socket.send(b"")
                if len(self.ending) == 2:
                    return


@pytest.fixture
def meet():
    """A leading socket and an engine that follows it."""
    with zmq.Context() as context:
        leading = context.socket(zmq.REQ)
        leading.linger = 0
        leading.rcvtimeo = leading.sndtimeo = 10_000
        leading.bind(ADDRESS)
        engines = []

        def make(**settings):
            buffer = torch.zeros(2 * 4096, dtype=torch.uint8)
            engines.append(Engine(context, buffer, **settings))
            return leading, buffer, engines[-1]

        yield make
        leading.close()
        for engine in engines:
            engine.thread.join(60)


def test_every_tensor_arrives_through_two_halves_of_one_buffer(meet, staged, tensors):
    leading, buffer, engine = meet()
    synced = []
    send_weights(leading, "a handle", buffer, staged.batches(600), lambda: synced.append(1))
    engine.thread.join(60)
    assert len(synced) > 2
    assert engine.ending == [None, None]
    assert engine.loaded.keys() == tensors.keys()
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in tensors.items())


def test_failed_load_raises_the_engines_own_words_and_frees_it(meet, staged):
    leading, buffer, engine = meet(fails_at=1)
    with pytest.raises(EngineError, match="could not load a batch: no such parameter"):
        send_weights(leading, "a handle", buffer, staged.batches(600), lambda: None)
    engine.thread.join(60)
    assert [type(last) for last in engine.ending] == [RuntimeError]


async def test_file_of_a_slot_is_pinned_before_the_pause_and_once(tmp_path, tensors, monkeypatch):
    cuda, file = CudaStandIn().install(monkeypatch), tmp_path / "model.safetensors"
    client = SGLangClient("engine-0", "http://127.0.0.1:1", key="a-key", request_timeout_s=1.0)
    ipc = Ipc(client, WeightSyncConfig(), tp_size=1)
    save_file(tensors, file)
    await ipc.prepare(tmp_path)
    (address,) = pinned = dict(cuda.pinned)
    await ipc.prepare(tmp_path)  # the next version, in the same file
    assert cuda.pinned == pinned == {address: file.stat().st_size}
    file.unlink()
    with pytest.raises(EngineError, match="engine-0 has lost its staged version"):
        await ipc.prepare(tmp_path)
    save_file(tensors, file)  # a slot that was made anew
    await ipc.prepare(tmp_path)
    assert len(cuda.pinned) == 1
    await ipc.close()
    assert not cuda.pinned
    await client.close()


def test_mapped_file_is_read_as_it_is_and_not_mapped_again(tmp_path, staged):
    mapped = np.fromfile(tmp_path / "model.safetensors", np.uint8)
    again = StagedFile.open(tmp_path, mapped)
    assert again.tensors == staged.tensors and np.array_equal(again.data, staged.data)
    assert np.shares_memory(again.data, mapped)
