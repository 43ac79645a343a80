"""Environments of the verifiers library as tasks.

    row of its data set ──► its own rollout ──► our endpoint ──► engines
                                 └──► its rubric ──► reward, metrics

Such an environment calls an OpenAI-compatible server by itself, so it runs as an agent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, default_int_handler
from typing import TYPE_CHECKING, Any, Protocol, cast

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.env import Env, Message
from rollout_pool.tasks.datasets import ProblemTask
from rollout_pool.tasks.task import Prompt

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Session(Protocol):
    """The part of a session used here."""

    @property
    def model(self) -> str: ...
    def client(self) -> AsyncOpenAI: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    question: str
    """The initial conversation, as text."""
    content: Mapping[str, Any]


class VerifiersTask(ProblemTask[Row]):
    """The environment `task.name`, loaded with `task.params`."""

    def __init__(self, config: TaskConfig, library: Library | None = None) -> None:
        """`library`: by default the installed one."""
        setting = f"task.name={config.name!r}"
        _refuse_what_is_ignored(config)
        self.name = config.name
        library = library or InstalledLibrary(setting)
        try:
            self._environment = library.load_environment(config.name, **config.params)
        except Exception as error:  # environments are third-party packages
            raise ValueError(
                f"{setting}: the verifiers library loaded no such environment with "
                f"task.params={config.params}: {error}"
            ) from error
        super().__init__(config, *_split(self._environment, config))

    def solution(self, prompt: Prompt) -> str:
        return str(self.problem(prompt).content.get("answer", ""))

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        answer = self.solution(prompt)
        if not answer:
            raise ValueError(
                f"task.name={self.name!r}: its rows have no answer to learn from; set "
                "trainer.warm_start.num_steps=0"
            )
        opening = _messages(self.problem(prompt).content["prompt"])
        return (*opening, Message(role="assistant", content=answer))

    def score(self, prompt: Prompt, completion: str) -> float:
        raise ValueError(
            "task.rewards: the rubric of a verifiers environment scores whole episodes; leave "
            "task.rewards out, or use kind: env"
        )

    def environment(self, prompt: Prompt) -> Env:
        raise ValueError(
            f"task.name={self.name!r}: a verifiers environment runs through the endpoint; "
            "leave task.env and task.tools out"
        )

    async def run_agent(self, session: Session, prompt: Prompt) -> tuple[float, dict[str, float]]:
        """Runs one episode. Returns its reward and metrics.

        Raises RuntimeError if the environment could not finish it.
        """
        row = dict(self.problem(prompt).content)
        async with session.client() as client:
            output = await self._environment.run_rollout(row, client, session.model, {})
        if output.get("error") is not None:
            raise RuntimeError(f"the environment {self.name} failed: {output['error']}")
        metrics = output.get("metrics") or {}
        return float(output["reward"]), {name: float(value) for name, value in metrics.items()}


def _refuse_what_is_ignored(config: TaskConfig) -> None:
    for name, value in (
        ("prompt_pattern", config.prompt_pattern),
        ("instruction", config.instruction),
        ("system_prompt", config.system_prompt),
        ("path", config.path),
        ("tools", config.tools),
        ("env", config.env),
        ("agent", config.agent),
    ):
        if value:
            raise ValueError(
                f"task.{name}={value!r}: an environment of the verifiers library brings its own; "
                "leave it out, and see which arguments it takes (task.params)"
            )


def _split(environment: Environment, config: TaskConfig) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; without evaluation rows the last training rows are held out."""
    training = [_row(row) for row in environment.get_dataset()]
    held_out = [_row(row) for row in environment.get_eval_dataset()]
    if [row.question for row in held_out] != [row.question for row in training]:
        return training, held_out[: config.eval_size]
    if config.eval_size >= len(training):
        raise ValueError(
            f"task.eval_size={config.eval_size}: {config.name} has only {len(training)} rows, and "
            "none of its own for evaluation; hold fewer back"
        )
    return training[: -config.eval_size], training[-config.eval_size :]


def _row(row: Mapping[str, Any]) -> Row:
    opening = _messages(row["prompt"])
    return Row(question="\n".join(message.content for message in opening), content=row)


def _messages(prompt: object) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    assert isinstance(prompt, list)  # OpenAI's messages
    return tuple(
        Message(role=message["role"], content=_text(message.get("content"))) for message in prompt
    )


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)


INSTALL = "pip install 'leash-rl[verifiers]'"


class Environment(Protocol):
    def get_dataset(self) -> Iterable[Mapping[str, Any]]:
        """Rows with `prompt` and whatever else run_rollout needs."""
        ...

    def get_eval_dataset(self) -> Iterable[Mapping[str, Any]]:
        """Rows for evaluation; the training rows if there are no others."""
        ...

    async def run_rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> Mapping[str, Any]:
        """Runs and scores one row with `client`, an AsyncOpenAI: reward, metrics, error."""
        ...


class Library(Protocol):
    def load_environment(self, env_id: str, **arguments: Any) -> Environment: ...


class InstalledLibrary:
    """The library itself. Raises ValueError if it is not installed."""

    def __init__(self, setting: str) -> None:
        try:
            self._library = importlib.import_module("verifiers")
            self._base = importlib.import_module("verifiers.envs.environment")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{setting}: needs the verifiers library, version 0.1.10 ({error}); {INSTALL}"
            ) from error

    def load_environment(self, env_id: str, **arguments: Any) -> Environment:
        with _no_signal_handlers(self._base):
            return cast(Environment, self._library.load_environment(env_id, **arguments))


class _Signals:
    """Replaces the module `signal` and ignores handlers."""

    SIGINT, SIGTERM = SIGINT, SIGTERM
    default_int_handler = staticmethod(default_int_handler)

    @staticmethod
    def signal(number: int, handler: object) -> None:
        return


_loading = threading.Lock()


@contextlib.contextmanager
def _no_signal_handlers(module: Any) -> Iterator[None]:
    """Keeps an environment from replacing our handlers of SIGINT and SIGTERM when it is created,
    which would also fail outside the main thread, where tasks are built."""
    with _loading:
        signals, module.signal = module.signal, _Signals
        try:
            yield
        finally:
            module.signal = signals
