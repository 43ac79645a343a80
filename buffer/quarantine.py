"""Prompts that are not run any more: they failed too often, or two workers died over them."""

from __future__ import annotations

from buffer.results import QuarantinedPrompt
from buffer.shard import Shard
from buffer.shards import ShardSet


class PromptQuarantine:
    """The poisonous prompts of a run, and how they leave."""

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards

    async def prompts(self) -> list[QuarantinedPrompt]:
        """All of them, the longest there first."""
        lists = await self._shards.each(Shard.quarantined_prompts)
        return sorted((prompt for prompts in lists for prompt in prompts), key=lambda p: p.at)

    async def release(self, task: str, index: int) -> bool:
        """Runs a prompt again, with a clean record; False if it was not there."""
        return await self._end(task, index, run_again=True)

    async def discard(self, task: str, index: int) -> bool:
        """Forgets a prompt; it is not run again. False if it was not there."""
        return await self._end(task, index, run_again=False)

    async def _end(self, task: str, index: int, *, run_again: bool) -> bool:
        # Which shard has it depends on the group that failed last.
        found = [await s.release_prompt(task, index, run_again=run_again) for s in self._shards]
        return any(found)
