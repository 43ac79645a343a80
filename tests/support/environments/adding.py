"""A single-turn environment of the verifiers library."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Adding"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        """Share of digits, so that the answers of a model that has learnt nothing differ."""
        said = trace.last_reply
        return sum(letter.isdigit() for letter in said) / max(1, len(said))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class AddingConfig(vf.TasksetConfig):
    count: int = 12
    endless: bool = False


class Adding(vf.Taskset[SumTask, AddingConfig]):
    @property
    def INFINITE(self) -> bool:
        return self.config.endless

    def load(self) -> Iterable[SumTask]:
        for i in range(self.config.count):
            data = Sum(prompt=f"{i}+1=", system_prompt="Add.", answer=str(i + 1))
            yield SumTask(data, self.config.task)
