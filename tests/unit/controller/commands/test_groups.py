"""`make groups`: the forms of its files, and the way of the best episodes back into a task."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from controller.main import EXIT_BAD_INPUT
from controller.run_dir import RunDir
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.tasks.data.files import records_of
from rollout_pool.tasks.datasets import QuestionsTask
from rollout_pool.worker.record import RolloutLog
from tests.support.buffer.groups import make_group
from tests.support.controller.buffers import Command
from trainer_pool.model.scratch import byte_tokenizer

CALL = ToolCall(call_id="c00000001", name="add", arguments={"a": [3, 4], "b": {}})
SUM = (
    Message(role="system", content="Be short."),
    Message(role="user", content="3 + 4?"),
    Message(role="assistant", content="Let me see. ", tool_calls=(CALL,)),
    Message(role="tool", content="7", tool_call_id="c00000001", name="add"),
    Message(role="assistant", content=" It is 7.\n"),
)
ASKED_AGAIN = (*SUM[:2], Message(role="assistant", content="<think>7!</think>7"))


def record(run_dir: RunDir, group_id: str, *episodes: tuple[object, float, str]) -> None:
    """A group of episodes, each with its conversation, its reward and how it ended."""
    group = make_group(group_id, 3, newest=5)
    [first, *_] = group.trajectories
    trajectories = [
        replace(
            first, episode=i, reward=reward, reward_parts={"right": 2 * reward}, finish_reason=e
        )
        for i, (_, reward, e) in enumerate(episodes)
    ]
    # An episode of two branches.
    trajectories.insert(1, replace(trajectories[0], loss_mask=0 * first.loss_mask))
    log = RolloutLog(run_dir.path, "worker-0", 1.0, 0)
    messages = {i: said for i, (said, _, _) in enumerate(episodes) if said}
    group = replace(group, trajectories=tuple(trajectories))
    asyncio.run(log.write(group, "3 + 4?", messages))  # type: ignore[arg-type]


@pytest.fixture
def recorded(run_dir: RunDir) -> RunDir:
    cut = (*SUM[:2], Message(role="assistant", content="It is, if one thinks"))
    record(run_dir, "a", (ASKED_AGAIN, 0.5, "stop"), (SUM, 1.0, "stop"), (cut, 2.0, "length"))
    record(run_dir, "b", (SUM, 0.25, "max_turns"), (SUM[:3], 3.0, "max_turns"))
    return run_dir


def test_both_forms_have_a_row_for_each_episode(
    recorded: RunDir, leash: Command, tmp_path: Path
) -> None:
    lines, table = tmp_path / "groups.jsonl", tmp_path / "groups.parquet"
    assert leash("groups", str(lines)) == f"{recorded.name}: 5 rows of 2 groups in {lines}\n"
    leash("groups", str(table))
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["group"], row["episode"]) for row in rows] == [
        *(("a", 0), ("a", 1), ("a", 2)),
        *(("b", 0), ("b", 1)),
    ]
    at = rows[1].pop("at")
    assert at > 1e9 and rows[1] == {
        "group": "a",
        "episode": 1,
        "role": "",
        "task": "sums",
        "prompt_index": 0,
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "3 + 4?"},
            {
                "role": "assistant",
                "content": "Let me see. ",
                "tool_calls": [
                    {
                        "id": "c00000001",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": [3, 4], "b": {}}'},
                    }
                ],
            },
            {"role": "tool", "content": "7", "tool_call_id": "c00000001", "name": "add"},
            {"role": "assistant", "content": " It is 7.\n"},
        ],
        "reward": 1.0,
        "reward_parts": {"right": 2.0},
        "finish_reason": "stop",
        "version_min": 3,
        "version_max": 5,
        "num_tokens": 5,
    }
    rows[1]["at"] = at
    read = load_dataset("parquet", data_files=str(table), split="train", streaming=True)
    assert [_without_nulls(row) for row in read] == rows


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_best_conversations_are_demonstrations_of_a_task(
    recorded: RunDir, leash: Command, tmp_path: Path, suffix: str
) -> None:
    """The best of "a" was cut off; that of "b" ends with a call, and its next is one of "a"."""
    file = tmp_path / f"best.{suffix}"
    printed = leash("groups", str(file), "--best", "2")
    assert "2 conversations of 5 rows of 2 groups" in printed
    columns = {"question": "messages", "answer": "messages"}
    config = TaskConfig(
        kind=TaskKind.questions,
        path=str(file),
        eval_path=str(file),
        params=columns,
        chat_template=True,
        system_prompt="Be short.",
    )
    task = QuestionsTask(config)
    held_out = task.eval_prompts()
    assert [task.demonstration(one) for one in held_out] == [SUM, ASKED_AGAIN]
    assert [one.text for one in held_out] == 2 * ["3 + 4?"]
    assert [task.score(one, "So: it is 7") for one in held_out] == [0, 0]
    assert task.score(held_out[0], " it is 7") == task.score(held_out[1], ASKED_AGAIN[-1].content)
    [*rows] = records_of(file, "task.path", "")
    assert [[*row] for row, _ in rows] == 2 * [["messages"]]


def test_least_reward_is_of_each_episode(recorded: RunDir, leash: Command, tmp_path: Path) -> None:
    for least, number in (("0.25", 2), ("0.5", 2), ("0.75", 1)):
        file = tmp_path / f"{least}.jsonl"
        leash("groups", str(file), "--min-reward", least)
        assert len(file.read_text().splitlines()) == number
    file = tmp_path / "none.jsonl"
    error = leash("groups", str(file), "--min-reward", "2.5", exit_code=EXIT_BAD_INPUT)
    assert "no episode" in error and not file.exists()


def test_pictures_come_back_from_both_forms(
    run_dir: RunDir, leash: Command, tmp_path: Path
) -> None:
    from PIL import Image

    picture = tmp_path / "plots" / "7.png"
    picture.parent.mkdir()
    Image.new("RGB", (8, 8)).save(picture)
    shown = Message(role="user", content="Which \ufffc?", pictures=(str(picture),))
    said = (shown, Message(role="assistant", content="red"))
    record(run_dir, "a", (said, 1.0, "stop"))
    for suffix in ("jsonl", "parquet"):
        file = tmp_path / f"best.{suffix}"
        leash("groups", str(file), "--best", "1")
        config = TaskConfig(
            kind=TaskKind.questions,
            path=str(file),
            eval_path=str(file),
            params={"question": "messages", "answer": "messages"},
            chat_template=True,
        )
        task = QuestionsTask(config)
        assert task.demonstration(task.eval_prompts()[0]) == said


def test_line_without_conversations_is_prompt_and_completion(
    run_dir: RunDir, leash: Command, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(run_dir.model)
    group = make_group("old", num_tokens=8)
    tokens = [*tokenizer.encode("3+4=7ab"), tokenizer.eos_token_id]
    trajectories = [
        replace(one, tokens=one.tokens * 0 + tokens, reward=float(place))
        for place, one in enumerate(group.trajectories)
    ]
    log = RolloutLog(run_dir.path, "worker-0", 1.0, 0)
    asyncio.run(log.write(replace(group, trajectories=tuple(trajectories)), "", {}))
    line = log.path.read_text()
    assert '"messages":{},' in line
    log.path.write_text(line.replace('"messages":{},', ""))  # as older versions wrote it
    leash("groups", str(tmp_path / "all.jsonl"))
    rows = [json.loads(one) for one in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in rows] == 2 * [("3+4", "=7ab")]
    file = tmp_path / "best.parquet"
    leash("groups", str(file), "--best", "1")
    config = TaskConfig(
        kind=TaskKind.questions,
        path=str(file),
        eval_path=str(file),
        params={"question": "prompt", "answer": "completion"},
    )
    task = QuestionsTask(config)
    [prompt] = task.eval_prompts()
    assert (prompt.text, task.solution(prompt)) == ("3+4", "=7ab")


def test_bad_names_and_runs_without_groups_are_refused(
    run_dir: RunDir, leash: Command, tmp_path: Path
) -> None:
    assert "rollout.log_rate=0.01" in leash("groups", f"{tmp_path}/a.jsonl", exit_code=2)
    assert "end its name" in leash("groups", f"{tmp_path}/a.csv", exit_code=2)
    assert "at least 1" in leash("groups", f"{tmp_path}/a.jsonl", "--best", "0", exit_code=2)
    (tmp_path / "a.jsonl").touch()
    assert "exists already" in leash("groups", f"{tmp_path}/a.jsonl", exit_code=2)
