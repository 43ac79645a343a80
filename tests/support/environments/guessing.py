"""A multi-turn environment of the verifiers library: it answers what the model says, twice."""

import os
import time
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]

TURNS = 3
CRASH, HANG = "please crash", "please hang"
"""Its process does when the model says this."""


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


class Guessing(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Iterable[WordTask]:
        for word in ("oak", "elm", "ash", "fir", "bay", "yew", "box", "fig"):
            yield WordTask(Word(prompt=f"A tree with {word[0]}?", answer=word), self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as play:
            said = await play.turn()
            for _ in range(TURNS - 1):
                if said.last_reply == CRASH:
                    print("the crash that was asked for", flush=True)
                    os._exit(7)
                if said.last_reply == HANG:
                    print("the hang that was asked for", flush=True)
                    time.sleep(600)
                said = await play.turn("Another one?")
