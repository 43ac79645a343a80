"""Version after version, in full and as deltas: what a receiver shows is what the trainer holds.

CI publishes 10 versions of each model; LEASH_SOAK_WEIGHT_VERSIONS=50 is the long form.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from buffer.run_state import STREAM_START
from tensors.layout import TensorSpec
from tests.soak.crash.size import size
from tests.soak.weights.model import ODD, Weights, tied_config, tied_tensors
from tests.soak.weights.play import HANG_S, Play, play
from tests.soak.weights.scene import Scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # every wait of a play has a bound

NUM_VERSIONS = size("WEIGHT_VERSIONS", 10)
SEED = size("SEED", random.randrange(1 << 30))
MODELS = {
    "mixed": ODD,
    "tied bfloat16": tied_tensors("bfloat16"),
}


@pytest.mark.parametrize("model", MODELS)
async def test_versions_arrive_bit_for_bit(
    redis_url: str, tmp_path: Path, tmpfs_path: Path, model: str
) -> None:
    tensors = MODELS[model]
    scene = Scene(url=redis_url, folder=tmp_path, tensors=tensors)
    assert max(tensor.num_bytes for tensor in tensors) > scene.bucket_bytes
    async with play(scene, tmpfs_path / scene.run, SEED) as the_play:
        for _ in range(NUM_VERSIONS - 1):
            await the_play.publish(is_full=the_play.dice.random() < 0.3)
            await the_play.converge()  # the readers compare every byte
        assert the_play.fleet.sightings.num_compared == 2 * NUM_VERSIONS
        assert set(await _modes(the_play)) == {"full", "delta"}
        if tensors is not ODD:
            for receiver in the_play.fleet.receivers.values():
                staged = await receiver.client.newest(-1, timeout_s=HANG_S)
                assert staged is not None and staged.version == the_play.version
                _same_logits(Path(staged.path), tensors, staged.version)


async def _modes(the_play: Play) -> Counter[object]:
    """How many versions went which way."""
    entries = await the_play.state.read_metrics(STREAM_START, 0)
    return Counter(entry.record["mode"] for entry in entries if entry.kind == "publish")


def _same_logits(staged: Path, tensors: tuple[TensorSpec, ...], version: int) -> None:
    """A model that loads the staged file is the trainer's, its output layer included."""
    dtype = getattr(torch, tensors[0].dtype)
    weights = Weights(tensors).at(version)
    expected = {spec.name: weights[spec.name].to(dtype).view(spec.shape) for spec in tensors}
    found = load_file(staged / "model.safetensors")
    assert found.keys() == expected.keys() and "lm_head.weight" not in found
    prompt = torch.arange(1, 40)[None]
    logits = []
    for state in (expected, found):
        model = Qwen3ForCausalLM(tied_config()).to(dtype).eval()
        missing = model.load_state_dict(state, strict=False)
        assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        with torch.no_grad():
            logits.append(model(prompt).logits)
    assert torch.equal(*logits)
