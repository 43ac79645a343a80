"""`make groups`: the recorded groups as a Parquet or JSONL file for other programs, or of the best
episodes the conversations alone, to learn from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from buffer.types import Trajectory
from controller.commands.show import tokenizer_of
from controller.run_dir import RunDir, RunDirError
from controller.units import format_number_of
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.worker.record import Recorded, all_recorded

SUFFIXES = (".parquet", ".jsonl")
WHOLE = ("stop", "max_turns")
"""How an episode ends that was not cut short; another is no model to learn from."""

SAID = ("messages", "prompt", "completion")
Row = dict[str, Any]


def write_groups(run_dir: RunDir, to: Path, best: int | None, min_reward: float | None) -> None:
    """With `best` or `min_reward` only conversations: of each group its `best` episodes of the
    highest reward, and of those the ones that have at least `min_reward`.

    Raises ValueError if the file exists or is of another kind, and RunDirError without any group.
    """
    if to.suffix not in SUFFIXES:
        raise ValueError(f"TO={to}: end its name in {' or '.join(SUFFIXES)}")
    if to.exists():
        raise ValueError(f"TO={to}: exists already; choose another name, or remove it")
    if best is not None and best < 1:
        raise ValueError(f"BEST={best}: must be at least 1")
    tokenizer = cache(partial(tokenizer_of, run_dir))
    groups = [[*_rows(one, tokenizer)] for one in all_recorded(run_dir.path)]
    if not groups:
        rate = run_dir.read_config().rollout.log_rate
        raise RunDirError(
            f"{run_dir.name} has recorded no group yet (rollout.log_rate={rate:g}); set 1 at a "
            "launch to record all"
        )
    rows = [row for group in groups for row in group]
    what = f"{format_number_of(len(rows), 'row')} of {format_number_of(len(groups), 'group')}"
    if best is not None or min_reward is not None:
        rows = [*_conversations(groups, best, min_reward)]
        what = f"{format_number_of(len(rows), 'conversation')} of {what}"
        if not rows:
            raise RunDirError(
                f"{run_dir.name}: no episode that ended by itself is that good; lower MIN_REWARD"
            )
    _write(rows, to)
    print(f"{run_dir.name}: {what} in {to}")


def _rows(recorded: Recorded, tokenizer: Callable[[], Tokenizer]) -> Iterator[Row]:
    """A row for each episode; for each of its trajectories where its conversation is unknown."""
    group = recorded.group
    for episode, parts in groupby(group.trajectories, lambda one: one.episode):
        trajectories = [*parts]
        if (messages := recorded.messages.get(episode)) is not None:
            yield _row(recorded, trajectories, {"messages": messages})
            continue
        for one in trajectories:
            text = _texts(one.tokens.tolist(), one.prompt_length, tokenizer())
            yield _row(recorded, [one], text)


def _row(recorded: Recorded, trajectories: Sequence[Trajectory], said: Row) -> Row:
    group, last = recorded.group, trajectories[-1]
    versions = [version for one in trajectories for version in one.tokens_by_version]
    return {
        "group": group.group_id,
        "episode": last.episode,
        "role": last.role,
        "task": group.prompt.task,
        "prompt_index": group.prompt.index,
        **said,
        "reward": last.reward,
        "reward_parts": dict(last.reward_parts) or None,
        "finish_reason": last.finish_reason,
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "num_tokens": sum(one.num_trainable_tokens for one in trajectories),
        "at": recorded.at,
    }


def _texts(tokens: list[int], prompt_length: int, tokenizer: Tokenizer) -> Row:
    # The end of the answer is a token, not a part of its text.
    end = len(tokens) - (tokens[-1] == tokenizer.eos_token_id)
    return {
        "prompt": tokenizer.decode(tokens[:prompt_length]),
        "completion": tokenizer.decode(tokens[prompt_length:end]),
    }


def _conversations(
    groups: Iterable[list[Row]], best: int | None, min_reward: float | None
) -> Iterator[Row]:
    """Each different one once: a prompt may have come several times."""
    seen = set()
    for rows in groups:
        whole = [row for row in rows if row["finish_reason"] in WHOLE and _is_answered(row)]
        for row in sorted(whole, key=lambda one: -one["reward"])[:best]:
            if min_reward is not None and row["reward"] < min_reward:
                continue
            said: Row = {name: row[name] for name in SAID if name in row}
            if (text := json.dumps(said)) not in seen:
                seen.add(text)
                yield said


def _is_answered(row: Row) -> bool:
    """The conversation ends with a text of the model, and not with a call of a tool."""
    *_, last = row.get("messages", [{"role": "assistant", "content": row.get("completion")}])
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _write(rows: list[Row], to: Path) -> None:
    """The file is there once all of it is written."""
    part = to.with_name(f".{to.name}.part")
    try:
        if to.suffix == ".parquet":
            _write_parquet(rows, part)
        else:
            with part.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        part.rename(to)
    finally:
        part.unlink(missing_ok=True)


def _write_parquet(rows: list[Row], path: Path) -> None:
    # Only those who want Parquet should wait for it.
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    said = [message for row in rows for message in row.get("messages", ())]
    if any(isinstance(message["content"], list) for message in said):  # a column has one type
        for message in said:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    names = {name: None for row in rows for name in row}
    Dataset.from_dict({name: [row.get(name) for row in rows] for name in names}).to_parquet(path)
