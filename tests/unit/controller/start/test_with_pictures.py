"""Settings that do not go together with a model or a task with pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.load import load_config
from controller.start.preflight import check_first_words, check_task
from controller.start.with_pictures import check_pictures, check_shown, shown_by
from tests.support.pictures import picture
from trainer_pool.model.scratch import byte_tokenizer

SEES, READS = SimpleNamespace(model_type="qwen3_vl"), SimpleNamespace(model_type="qwen3")
PLAIN = ["model=pretrained", "model.path=/a/model", "trainer.warm_start.num_steps=0"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.lora={rank: 8}"],
        ["trainer.sequence_parallel_size=2", "trainer.num_ranks=2"],
        ["rollout.engine.routing_replay=true"],
        ["trainer.warm_start.num_steps=5"],
        ["task.renderer=qwen3", "task.chat_template=true"],
        [
            "task.rewards.t={kind: teacher, url: 'http://h/v1', model: m}",
            "algorithm=distill",
        ],
    ],
)
def test_setting_that_was_not_made_for_pictures_is_refused_for_such_a_model_alone(overrides):
    config = load_config([*PLAIN, *overrides], "quickstart")
    check_pictures(config, READS)
    setting = overrides[0].partition("=")[0]
    with pytest.raises(ValueError, match=f"^{setting}: cannot be used with model.path='/a/model'"):
        check_pictures(config, SEES)


def test_plain_run_of_a_model_with_pictures_is_not_refused():
    check_pictures(load_config(PLAIN, "quickstart"), SEES)


def questions(tmp_path, *, shown):
    """Settings of a task of 101 questions, of which training question `shown` has a picture."""
    (tmp_path / "a.png").write_bytes(picture(1))
    image = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    asked = [image if place == shown else f"question {place}" for place in range(101)]
    lines = [json.dumps({"question": one, "answer": "a"}) for one in asked]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    settings = ["task.kind=questions", f"task.path={tmp_path}/data.jsonl", "task.eval_size=1"]
    return [*settings, "trainer.warm_start.num_steps=0", "task.instruction=''"]


@pytest.mark.parametrize("shown", range(0, 100, 33))
def test_every_question_is_looked_at_for_pictures_that_the_model_does_not_take(tmp_path, shown):
    config = load_config(questions(tmp_path, shown=shown), "quickstart")
    with pytest.raises(ValueError, match="a message has a picture, and the model takes none"):
        check_first_words(config, check_task(config.task), byte_tokenizer())


@pytest.mark.parametrize(
    ("settings", "has_agent", "message"),
    [
        (["rollout.openai.port=0"], False, "^rollout.openai.port=0: the task shows .* to null, or"),
        (
            ["task.agent='a.py:b'"],
            True,
            "^task.agent=.*a.py:b.: the task shows .* without an agent",
        ),
    ],
)
def test_task_with_pictures_is_refused_for_programs(tmp_path, settings, has_agent, message):
    config = load_config([*questions(tmp_path, shown=70), *settings], "quickstart")
    shown = shown_by(check_task(replace(config.task, agent=None)), ())
    assert shown is not None
    check_shown(load_config(questions(tmp_path, shown=70), "quickstart"), shown, has_agent=False)
    with pytest.raises(ValueError, match=message):
        check_shown(config, shown, has_agent=has_agent)
