"""An environment of the verifiers library with a tool."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Noting"]

CALL = '<tool_call>{"name": "notes_read", "arguments": {}}</tool_call>'
NOTE = "blue"


class Notes(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "notes"

    @vf.tool
    def read(self) -> str:
        """Reads the note."""
        return NOTE


class Question(vf.TaskData):
    answer: str = CALL
    """The answer that the warm start teaches."""


class QuestionTask(vf.Task[Question]):
    @vf.reward
    async def has_read(self, trace: vf.Trace) -> float:
        return float(any(NOTE in str(m.content) for m in trace.messages if m.role == "tool"))

    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return sum(letter in NOTE for letter in said) / max(1, len(said))


class Noting(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    def load(self) -> Iterable[QuestionTask]:
        for i in range(8):
            yield QuestionTask(Question(prompt=f"Note {i}?"), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Notes(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Notes.run()
