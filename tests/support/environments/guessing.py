"""A multi-turn environment of the verifiers library: it answers what the model says, twice."""

import os
import time
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]

TURNS = 3


class Word(vf.TaskData):
    answer: str


class WordTask(vf.Task[Word]):
    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        """Share of the letters of the last answer that are letters of the word."""
        said = trace.last_reply
        return sum(letter in self.data.answer for letter in said) / max(1, len(said))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessingConfig(vf.TasksetConfig):
    crash: str = ""
    """Its process exits, or hangs, when a model says this."""
    hang: str = ""


class Guessing(vf.Taskset[WordTask, GuessingConfig]):
    def load(self) -> Iterable[WordTask]:
        for word in ("oak", "elm", "ash", "fir", "bay", "yew", "box", "fig"):
            yield WordTask(Word(prompt=f"A tree with {word[0]}?", answer=word), self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        config = self.config.taskset
        async with agents.agent.interaction(task) as play:
            said = await play.turn()
            for _ in range(TURNS - 1):
                if said.last_reply == config.crash != "":
                    print("the crash that was asked for", flush=True)
                    os._exit(7)
                if said.last_reply == config.hang != "":
                    time.sleep(600)
                said = await play.turn("Another one?")
