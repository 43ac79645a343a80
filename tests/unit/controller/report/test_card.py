"""The model's card: what it says, and what it must not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from configs.load import load_config
from controller.metrics.history import EVAL_FAILED, Record, read_metrics
from controller.report.card import CARD, model_card, result_at, write_card
from controller.report.summary import write_summary
from controller.run_dir import RunDir
from tests.support.controller.records import eval_record, record_all, step_record
from trainer_pool.state.checkpoint import TrainState
from trainer_pool.types import FINAL_MODEL


def train(run_dir: RunDir, num_steps: int) -> None:
    """Every second version is evaluated: that of step 4 has the accuracy 0.4."""
    records = []
    for step in range(num_steps + 1):
        if step % 2 == 0:
            records.append(eval_record(step, 1000.0 + step, step / 10))
        if step < num_steps:
            records.append(step_record(step, 1000.0 + step, reward=step / 8))
    failed = Record(t=1020.0, kind=EVAL_FAILED, values={"version": num_steps + 1, "why": "it is"})
    record_all(run_dir, [*records, failed])


def test_card_says_where_the_model_is_from(run_dir: RunDir) -> None:
    train(run_dir, 8)
    config = load_config(["model=pretrained", "model.path=org/base-1B", "trainer.num_steps=8"])
    run_dir.write_config(config)
    run_dir.write_data(
        {"": "40 problems (sha256 00ff) to train on, 8 problems (sha256 11) held out"}
    )
    model = run_dir.path / FINAL_MODEL
    model.mkdir()
    run_dir.end("stopped")
    write_summary(run_dir, read_metrics(run_dir.metrics))
    text = (model / CARD).read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["base_model"] == "org/base-1B" and head["library_name"] == "transformers"
    assert "for 8 steps, from org/base-1B." in text
    figures = ("steps | 8", "eval_before | 0.0", "eval_after | 0.8", "eval_version | 8")
    assert [figure for figure in figures if f"| {figure} |" not in text] == []
    assert (
        "spell_backward | 40 problems (sha256 00ff) to train on, 8 problems (sha256 11) held"
        in text
    )
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["trainer"]["num_steps"] == 8 and settings["model"]["path"] == "org/base-1B"
    assert "groups_per_step" not in text, "it has its default"
    assert "torch 2" in text and "transformers " in text


def test_card_of_a_checkpoint_has_the_figures_up_to_it(run_dir: RunDir, tmp_path: Path) -> None:
    train(run_dir, 8)
    state = TrainState(
        step=5,
        version=5,
        num_updates=5,
        lineage="one",
        consumed_group_ids=(),
        task_positions={},
        untrained_prompts=(),
    )
    config = run_dir.read_config()
    result = result_at(run_dir, config, read_metrics(run_dir.metrics), state)
    assert (result.steps, result.eval_after, result.eval_version) == (5, 0.4, 4)
    assert (result.reward_last, result.evals_failed) == (0.5, 0)
    write_card(tmp_path, run_dir, config, result)
    text = (tmp_path / CARD).read_text()
    assert "| steps | 5 |" in text and "base_model" not in text
    assert "made by the task" in text and "a model built from scratch" in text


def test_card_of_an_earlier_end_stays_as_it_was(run_dir: RunDir) -> None:
    train(run_dir, 8)
    model = run_dir.path / FINAL_MODEL
    model.mkdir()
    write_summary(run_dir, read_metrics(run_dir.metrics))
    assert not (model / CARD).exists(), "the run goes on"
    (model / CARD).write_text("of step 4")
    before = run_dir.read_record().started - 1
    os.utime(model, (before, before))
    run_dir.end("failed", "no space left on device")
    write_summary(run_dir, read_metrics(run_dir.metrics))
    assert (model / CARD).read_text() == "of step 4"


@pytest.mark.parametrize(
    "setting",
    [
        "buffer.url=redis://me:SECRET@host:6379/0",
        "buffer.url=redis://host:6379/0?password=SECRET",
        "task.rewards={right: {kind: http, url: 'http://me:SECRET@host/score'}}",
        "task.tools=['mcp:https://host/mcp?token=SECRET']",
        "task.tools=['mcp:server --api-key=SECRET']",
        "task.params={api_key: SECRET}",
        "task.params={headers: {Authorization: 'Bearer SECRET'}}",
        "task.params={api_key: 'my SECRET, and more'}",
        "task.params={api_key: '77SECRET', note: 'a=b&c'}",
        "task.params={api_keys: [SECRET, 'other SECRET']}",
        "task.params={apiKeys: {judge: SECRET}}",
        "task.params={headers: {Authorization: 'Basic SECRET'}}",
        "task.params={header: 'Authorization: Basic SECRET'}",
        "task.params={api_keys: [SECRET], api_key_env: KEPT}",
        "task.params={password: 'a&SECRET,SECRET'}",
        'task.params={text: \'{"API_KEY": "my SECRET"}\'}',
        "task.params={text: 'password=a&SECRET,SECRET'}",
        "task.params={text: 'api_keys: [sk-1, SECRET]'}",
        "task.tools=['mcp:server --api-key SECRET']",
        "task.tools=['mcp:server --api-key \"my SECRET\"']",
    ],
)
def test_card_names_no_secret(run_dir: RunDir, setting: str) -> None:
    own = ["task.kind=custom", "task.factory=tasks:make", "task.chat_template=true"]
    config = load_config([*own, setting])
    text = model_card(config, write_summary(run_dir, []), {})
    assert "SECRET" not in text and "***" in text
    assert ("KEPT" in text) == ("KEPT" in setting)


def test_card_has_what_only_sounds_like_a_secret(run_dir: RunDir) -> None:
    config = load_config(
        [
            "rollout.max_prompt_tokens=77",
            "task.params={tokenizer: fast, num_tokens: 5, has_token: true, text: 'the key idea'}",
            "task.rewards={right: {kind: judge, model: m, url: 'http://h', api_key_env: ENV}}",
        ]
    )
    text = model_card(config, write_summary(run_dir, []), {})
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["rollout"]["max_prompt_tokens"] == 77
    assert settings["task"]["rewards"]["right"]["api_key_env"] == "ENV"
    names = {"tokenizer": "fast", "num_tokens": 5, "has_token": True, "text": "the key idea"}
    assert settings["task"]["params"].items() >= names.items()
