"""A launch of a model that takes pictures, on questions with and without."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from controller.metrics.history import read_metrics
from rollout_pool.worker.record import read_recorded
from tensors.pictures import PictureProcessor
from tests.support.launches import RUN, finish, start
from tests.support.pictures import build_seeing_model, picture

pytestmark = [pytest.mark.slow, pytest.mark.long]
REWARD = """\
def score(prompt, episode):
    return len(prompt.pictures) + min(len(set(episode.answer)), 50) / 100
"""


def test_seeing_model_trains_on_what_its_engine_saw(tmp_path: Path) -> None:
    """Engine and trainer give the same log-probabilities, also after versions that have moved them;
    no mark of a picture is sampled; the tower stays as it was."""
    base = tmp_path / "model"
    build_seeing_model(base)
    (tmp_path / "reward.py").write_text(REWARD)
    write_questions(tmp_path)
    settings = ["model=pretrained", f"model.path={base}", "task=capitals", "buffer=synchronous"]
    settings += ["task.chat_template=true", f"task.path={tmp_path}/questions.jsonl"]
    settings += [f"task.rewards={{r: {{kind: function, function: '{tmp_path}/reward.py:score'}}}}"]
    settings += ["trainer.num_steps=3", "trainer.checkpoint_every=3", "trainer.num_ranks=2"]
    settings += ["trainer.learning_rate=3e-3", "trainer.lr_warmup_steps=0", "task.eval_size=2"]
    settings += ["trainer.warm_start.num_steps=0", "rollout.eval_every=0", "rollout.log_rate=1"]
    settings += ["rollout.max_prompt_tokens=400", "rollout.max_response_tokens=32"]
    settings += ["algorithm.kl.weight=0.1"]
    output = finish(process := start(tmp_path, RUN, *settings))
    assert process.returncode == 0, output[-6000:]
    run = tmp_path / RUN
    steps = read_metrics(run / "metrics.jsonl", "step")
    apart = max(step.number("logprob_diff_max") for step in steps)
    num_tokens = sum(step.count("logprob_diff_tokens") for step in steps)
    print(f"engine and trainer: {apart:.1e} over {num_tokens} tokens")
    assert len(steps) == 3 and num_tokens > 300 and apart < 1e-4
    assert_marks_are_only_shown(run, base)
    assert_tower_is_frozen(base, run / "final_model")


def write_questions(folder: Path) -> None:
    """Without a picture, with one in a file, with another in the line itself."""
    lines = []
    for n in range(12):
        (folder / f"{n}.png").write_bytes(picture(n, 24 + 4 * (n % 3)))
        url = "data:image/jpeg;base64," + base64.b64encode(picture(n, 32, 32, "JPEG")).decode()
        parts = [
            {"type": "image", "image": f"{n}.png"},
            {"type": "text", "text": f" {n}: what?"},
            {"type": "image_url", "image_url": {"url": url}},
        ][: 2 + n % 2]
        question = [{"role": "user", "content": parts}] if n % 4 else f"{n}: the quick brown"
        lines.append(json.dumps({"question": question, "answer": str(n)}))
    (folder / "questions.jsonl").write_text("\n".join(lines))


def assert_marks_are_only_shown(run: Path, base: Path) -> None:
    processor = PictureProcessor.of(str(base), trust_remote_code=False)
    assert processor is not None
    num_shown = 0
    for line in (run / "rollouts" / "worker-0.jsonl").read_text().splitlines():
        recorded = read_recorded(run, json.loads(line)["group_id"])
        assert recorded is not None
        for trajectory in recorded.group.trajectories:
            is_mark = np.isin(trajectory.tokens, processor.tokens.unsampled)
            assert not is_mark[trajectory.loss_mask != 0].any()
            assert (trajectory.reward >= 1) == is_mark.any()
            num_shown += bool(is_mark.any())
    assert num_shown > 10


def assert_tower_is_frozen(base: Path, final: Path) -> None:
    first, last = (AutoModelForImageTextToText.from_pretrained(path) for path in (base, final))
    for name, weight in last.named_parameters():
        is_same = torch.equal(weight, first.get_parameter(name))
        assert is_same is ("visual" in name), name
    assert (final / "preprocessor_config.json").is_file()
