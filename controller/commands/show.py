"""`make show GROUP=...`: what a group says, token by token.

In a terminal the colour of a token is the policy version that wrote it, a dim one is not trained,
an underlined one was unlikely, a reversed one very unlikely. Elsewhere marks say the same:

    3 + 4 =⟦v7⟧ 7⟦v8⟧ and not⟦-4.9⟧ 8⟦-⟧ tool output⟦v8⟧ so 7.

⟦v7⟧ from here on version 7 wrote what is trained, ⟦-⟧ from here on nothing is trained, ⟦-4.9⟧ the
token before was unlikely and had this log-probability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from buffer.export import read_payload
from buffer.redis.keys import check_group_id
from buffer.types import Trajectory, TrajectoryGroup
from configs.load import read_config
from configs.printable import printable
from controller.buffer_access import BufferAddress, answer, buffer_address, raw_client
from controller.run_dir import RunDir, RunDirError
from rollout_pool.episodes.tokenizer import Tokenizer, load_tokenizer
from rollout_pool.worker.record import read_recorded

UNLIKELY, VERY_UNLIKELY = log(0.1), log(0.01)
COLOURS = ("bright_blue", "bright_green", "yellow", "magenta", "cyan", "red")
"""Of versions, the oldest first; then again from the first."""
MARKS = (
    "⟦v7⟧ written by version 7 and trained   ⟦-⟧ not trained   "
    f"⟦-4.9⟧ log-probability of an unlikely token (below {UNLIKELY:.1f})"
)
LONGEST_CHARACTER = 8
"""Tokens that may write one character together; more are broken bytes, and shown as such."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """Neighbouring tokens that look the same."""

    text: str
    version: int
    """-1 where no policy wrote it."""
    is_trained: bool
    logprob: float | None = None
    """Of an unlikely token."""


def print_group(
    run_dir: RunDir, group_id: str | None, url: str | None = None, console: Console | None = None
) -> None:
    """The group of this id, else the one that was recorded last. Raises RunDirError if nothing is
    kept of it."""
    console = console or Console(highlight=False)
    group, where = _find(run_dir, group_id, url)
    tokenizer = _tokenizer(run_dir)
    has_colours = console.is_terminal and not console.no_color
    for line in tell_group(group, where, tokenizer, has_colours=has_colours):
        line.plain = printable(line.plain)
        console.print(line, soft_wrap=True, highlight=False)


def tell_group(
    group: TrajectoryGroup, where: str, tokenizer: Tokenizer, *, has_colours: bool
) -> Iterator[Text]:
    """The lines of the output (pure)."""
    versions = list(group.tokens_by_version)
    sampling = f"temperature {group.sampling.temperature:g}"
    yield Text(f"{group.group_id}: prompt {group.prompt.index} of {group.prompt.task}, {sampling}")
    yield Text(where)
    yield _legend(versions) if has_colours else Text(MARKS)
    for place, trajectory in enumerate(group.trajectories):
        yield Text("")
        yield Text(headline(place, trajectory), style="bold")
        for name in trajectory.columns:
            yield Text(column_line(name, trajectory))
        pieces = cut(trajectory, token_texts(tokenizer, trajectory.tokens.tolist()))
        yield coloured(pieces, versions) if has_colours else Text(marked(pieces))


def headline(place: int, trajectory: Trajectory) -> str:
    """What is to be said of a trajectory as a whole (pure)."""
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward_parts.items())
    trained = trajectory.loss_mask.astype(bool)
    num_trained = int(trained.sum())
    mean = trajectory.rollout_logprobs[trained].mean() if num_trained else 0.0
    by_version = ", ".join(f"v{v}: {n}" for v, n in trajectory.tokens_by_version.items())
    return (
        f"trajectory {place}, episode {trajectory.episode}: reward {trajectory.reward:g}"
        + (f" ({parts})" if parts else "")
        + f", {trajectory.finish_reason}, {trajectory.num_tokens} tokens of which {num_trained} "
        f"are trained ({by_version or 'none'}), mean log-probability {mean:.2f}"
    )


def column_line(name: str, trajectory: Trajectory) -> str:
    """A further column of numbers in short: what it holds at the trained tokens (pure)."""
    mask = trajectory.loss_mask.astype(bool)
    trained = trajectory.columns[name][mask].astype(np.float64)
    if not trained.size:
        return f"  {name}: no token is trained"
    return (
        f"  {name}: mean {trained.mean():.2f} over the trained tokens, from {trained.min():.2f} "
        f"to {trained.max():.2f}"
    )


def cut(trajectory: Trajectory, texts: Sequence[str]) -> list[Piece]:
    """The trajectory in pieces; an unlikely token is one by itself (pure)."""
    versions = trajectory.token_versions().tolist()
    mask, logprobs = trajectory.loss_mask.tolist(), trajectory.rollout_logprobs.tolist()
    pieces: list[Piece] = []
    for text, version, is_trained, logprob in zip(texts, versions, mask, logprobs, strict=True):
        is_unlikely = is_trained and logprob < UNLIKELY
        shown = printable(text)
        new = Piece(
            text=shown,
            version=version,
            is_trained=bool(is_trained),
            logprob=logprob if is_unlikely else None,
        )
        last = pieces[-1] if pieces else None
        if last and not is_unlikely and last.logprob is None and _look_same(last, new):
            text = pieces.pop().text + shown
            new = Piece(text=text, version=version, is_trained=bool(is_trained))
        pieces.append(new)
    return pieces


def _look_same(one: Piece, other: Piece) -> bool:
    return (one.version, one.is_trained) == (other.version, other.is_trained)


def coloured(pieces: Sequence[Piece], versions: Sequence[int]) -> Text:
    """In colours, for a terminal (pure)."""
    line = Text()
    for piece in pieces:
        line.append(piece.text, _style(piece, versions))
    return line


def _style(piece: Piece, versions: Sequence[int]) -> Style:
    if not piece.is_trained:
        return Style(dim=True)
    is_unlikely = piece.logprob is not None
    return Style(
        color=COLOURS[versions.index(piece.version) % len(COLOURS)],
        underline=is_unlikely,
        reverse=piece.logprob is not None and piece.logprob < VERY_UNLIKELY,
    )


def _legend(versions: Sequence[int]) -> Text:
    line = Text()
    for place, version in enumerate(versions):
        line.append(f"version {version}", Style(color=COLOURS[place % len(COLOURS)])).append("  ")
    line.append("not trained", Style(dim=True)).append("  ")
    line.append("p < 10%", Style(underline=True)).append("  ")
    return line.append("p < 1%", Style(underline=True, reverse=True))


def marked(pieces: Sequence[Piece]) -> str:
    """With marks, where there are no colours (pure)."""
    parts, before = [], "-"
    for piece in pieces:
        writer = f"v{piece.version}" if piece.is_trained else "-"
        if writer != before:
            parts.append(f"⟦{writer}⟧")
            before = writer
        parts.append(piece.text)
        if piece.logprob is not None:
            parts.append(f"⟦{piece.logprob:.1f}⟧")
    return "".join(parts)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; "" for one that only begins a character.

    A token's text can depend on the one before (some tokenizers drop a leading space), so each is
    decoded together with it.
    """
    texts: list[str] = []
    before = done = 0
    for end in range(1, len(tokens) + 1):
        known = tokenizer.decode(tokens[before:done])
        text = tokenizer.decode(tokens[before:end])
        is_begun = text.endswith("\ufffd") and end < len(tokens)
        if is_begun and end - done < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before, done = done, end
    return texts


# Where it is kept ----------------------------------------------------------------------------


def _find(run_dir: RunDir, group_id: str | None, url: str | None) -> tuple[TrajectoryGroup, str]:
    """The group, and in words where it was found."""
    if group_id is not None:
        check_group_id(group_id)
    recorded = read_recorded(run_dir.path, group_id)
    if recorded is not None:
        return recorded.group, f"recorded by {recorded.worker}"
    rate = read_config(run_dir.path / "config.yaml").rollout.log_rate
    if group_id is None:
        raise RunDirError(
            f"{run_dir.name} has recorded no group yet (rollout.log_rate={rate:g}); name one that "
            "is in the buffer with GROUP=id"
        )
    held = _held(run_dir, group_id, url)
    if held is None:
        raise RunDirError(
            f"{group_id}: {run_dir.name} did not record it (rollout.log_rate={rate:g}), and its "
            "buffer does not hold it: trained groups are kept until a checkpoint contains them"
        )
    return held, "in the buffer"


def _held(run_dir: RunDir, group_id: str, url: str | None) -> TrajectoryGroup | None:
    async def read(address: BufferAddress) -> TrajectoryGroup | None:
        async with raw_client(address) as redis:
            shards = address.settings.shards
            return await answer(address, read_payload(redis, address.run, group_id, shards))

    with buffer_address(run_dir, url) as address:
        return asyncio.run(read(address))


def _tokenizer(run_dir: RunDir) -> Tokenizer:
    model = read_config(run_dir.path / "config.yaml").model
    return load_tokenizer(
        model.path or str(run_dir.model), trust_remote_code=model.trust_remote_code
    )
