"""Problems in small repositories, which the model solves in a container with tools.

One row; its reward is 1 if the command succeeds at the end, or the fraction of several commands:

    {"problem": "add(2, 3) gives -1", "files": {"sums.py": "def add(a, b): return a - b"},
     "test_command": ["python3", "-m", "unittest", "-q"], "test_files": {"test_sums.py": "..."},
     "solution": [{"path": "sums.py", "old": "a - b", "new": "a + b"}]}
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from configs.container_schema import WITH_IMAGE
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion, Message, ToolCall, ToolError
from rollout_pool.episodes.environment import Observation, SingleTurn, Step
from rollout_pool.episodes.tools import ToolEnv, function_tool
from rollout_pool.sandbox.containers import MAX_OUTPUT_BYTES, Container, ContainerError, Ran
from rollout_pool.sandbox.remote_container import make_container
from rollout_pool.tasks.data.files import text_of
from rollout_pool.tasks.datasets import ORDER, Problem, ProblemTask, load_problems
from rollout_pool.tasks.task import Prompt, check_params

LINE_FORM = (
    'each line must be {"problem": "...", "files": {"name": "text"}, "test_command": ["word"]}'
)
EDITED = "edited"
IMAGE = re.compile(r"\w[\w.:/@+-]*")


@dataclass(kw_only=True, slots=True, frozen=True)
class Repository(Problem):
    files: Mapping[str, str]
    """Added to those that the image has."""
    image: str
    commands: tuple[tuple[str, ...], ...]
    tests: Mapping[str, str]
    """Put over the others before the commands run: the model does not see them before."""
    edits: tuple[Mapping[str, str], ...]
    """A solution: arguments of `edit_file`."""

    @property
    def right(self) -> str:
        return repr((self.files, self.image, self.commands, self.tests))

    @property
    def solution(self) -> str | None:
        return "done" if self.edits else None


class RepositoryTask(ProblemTask[Repository]):
    name = "repository"

    def __init__(self, config: TaskConfig) -> None:
        container_s, turn_s = config.container.timeout_s, config.turn_timeout_s
        for holds, setting, why, fix in (
            (config.path is not None, f"path={config.path}", "needs a file of rows", "name it"),
            (config.chat_template, "chat_template=false", "calls tools", "set true"),
            (config.max_turns > 1, f"max_turns={config.max_turns}", "has several", "set more"),
            (not config.tools, f"tools={config.tools}", "has its own", "leave them out"),
        ):
            if not holds:
                raise ValueError(f"task.{setting}: task.kind=repository {why}; {fix}")
        check_params(config, self.name, ORDER)
        self._config = config
        read = partial(read_repository, config=config)
        problems, held_out = load_problems(config, read, LINE_FORM)
        # The last turn has a call of the model, the test files, and the tests.
        most = 2 + max(1, *(len(one.commands) for one in (*problems, *held_out)))
        if most * container_s > turn_s:
            raise ValueError(
                f"task.turn_timeout_s={turn_s:g}: a turn may run {most} commands, each for "
                f"task.container.timeout_s={container_s:g}; set at least {most * container_s:g}"
            )
        super().__init__(config, problems, held_out)
        self.tool_specs = tuple(tool.spec for tool in RepositoryTools(None).every)
        """Brought by its environments."""

    def environment(self, prompt: Prompt) -> RepositoryEnv:
        repository = self.problem(prompt)
        container = make_container(self._config.container, repository.image)
        return RepositoryEnv(prompt, repository, container, self._config)

    async def probe(self) -> None:
        """Raises ContainerError if the container of the first problem does not start."""
        env = self.environment(self.example(0))
        try:
            await env.reset()
        finally:
            await env.close()

    def score(self, prompt: Prompt, completion: str) -> float:
        return 0.0  # its episode was cut off before the tests

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        *shown, last = super().demonstration(prompt)
        for number, edit in enumerate(self.problem(prompt).edits):
            call = ToolCall(call_id=f"c{number:08}", name="edit_file", arguments=edit)
            shown.append(Message(role="assistant", content="", tool_calls=(call,)))
            shown.append(
                Message(role="tool", content=EDITED, tool_call_id=call.call_id, name=call.name)
            )
        return (*shown, last)


class RepositoryEnv(ToolEnv):
    """The tests run at the first answer without a call, or else after the last answer."""

    def __init__(
        self, prompt: Prompt, repository: Repository, container: Container, config: TaskConfig
    ) -> None:
        inner = SingleTurn("", messages=prompt.opening(config.system_prompt))
        super().__init__(
            inner, RepositoryTools(container).every, call_timeout_s=config.turn_timeout_s
        )
        self._repository, self._container = repository, container
        self._num_left = config.max_turns

    async def reset(self) -> Observation:
        await self._container.start()
        await self._put(self._repository.files)
        return await super().reset()

    async def step(self, completion: Completion) -> Step:
        step, self._num_left = await super().step(completion), self._num_left - 1
        if step.observation is not None and self._num_left:
            return step
        await self._put(self._repository.tests)
        commands = map(shlex.join, self._repository.commands)
        passed = [not (await self._container.run(one)).exit_code for one in commands]
        return dataclasses.replace(step, reward=sum(passed) / len(passed))

    async def close(self) -> None:
        await self._container.close()

    async def _put(self, files: Mapping[str, str]) -> None:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text.encode())
                tar.addfile(entry, io.BytesIO(text.encode()))
        ran = await self._container.run("tar -xof -", made.getvalue())
        if ran.exit_code:
            raise ContainerError(
                f"the files could not be put into the container: {ran.text.strip()[-500:]}; the "
                "image (task.container.image, or the row's) needs tar, and room for them"
            )


class RepositoryTools:
    """The model's tools; their docstrings are what it reads of them."""

    def __init__(self, container: Container | None) -> None:
        functions = (self.shell, self.read_file, self.edit_file)
        self.every = [function_tool(one, "task.kind=repository") for one in functions]
        self._container = container
        self._in_turn = asyncio.Lock()
        """The calls of an answer are begun in their order, and each works on what those before it
        have left."""

    async def shell(self, command: str) -> str:
        """Runs a shell command in the repository."""
        async with self._in_turn:
            ran = await self._run(_text(command, "command"))
        return ran.text + (f"\n(exit code {ran.exit_code})" if ran.exit_code else "")

    async def read_file(self, path: str) -> str:
        """Shows a file."""
        async with self._in_turn:
            return (await self._run_well(f"cat {_place(path)}")).text

    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces a text that occurs once in a file."""
        place, old, new = _place(path), _text(old, "old"), _text(new, "new")
        async with self._in_turn:
            ran = await self._run_well(f"cat {place}")
            if not ran.is_whole:
                raise ToolError(
                    f"{path}: has more than {MAX_OUTPUT_BYTES} bytes; change it by a command"
                )
            try:
                text = _replaced(ran.output.decode(), old, new)
            except ValueError as error:
                raise ToolError(f"{path}: {error}") from error
            await self._run_well(f"cat >{place}", text.encode())
        return EDITED

    async def _run_well(self, command: str, stdin: bytes = b"") -> Ran:
        ran = await self._run(command, stdin)
        if ran.exit_code:
            raise ToolError(ran.text)
        return ran

    async def _run(self, command: str, stdin: bytes = b"") -> Ran:
        assert self._container is not None, "these are only described"
        return await self._container.run(command, stdin)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ToolError(f"{name} must be a text, not {value!r:.100}")
    return value


def _place(path: object) -> str:
    """As a word of sh."""
    try:
        return shlex.quote(f"./{_inside(path, 'path')}")
    except ValueError as error:
        raise ToolError(str(error)) from error


def _inside(path: object, what: str) -> str:
    """Raises ValueError for what is no path in the repository."""
    if not isinstance(path, str) or not path.strip("./") or "\0" in path:
        raise ValueError(f"{what}={path!r:.100}: must be the path of a file, as src/main.py")
    if path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{what}={path!r:.100}: is outside of the repository; use a path in it")
    return path


def _replaced(text: str, old: str, new: str) -> str:
    if not old or (number := text.count(old)) != 1:
        raise ValueError(
            f"has {number if old else 0} times the text {old!r:.100}, and must have one"
        )
    return text.replace(old, new)


# A row --------------------------------------------------------------------------------------------


def read_repository(record: dict[str, Any], place: str, *, config: TaskConfig) -> Repository:
    """Raises ValueError naming the row and its field."""
    image = text_of(record, "image", place) if record.get("image") else config.container.image
    if not image and config.container.kind in WITH_IMAGE:
        raise ValueError(
            f'{place}: "image" is missing, and task.container.kind={config.container.kind.name} '
            "needs one; give the row one, or all rows by task.container.image"
        )
    if image and not IMAGE.fullmatch(image):
        raise ValueError(
            f"{place}: image={image!r:.200}: must be the name of an image, as python:3.12-slim"
        )
    files, of_tests = (_files(record.get(k), f'{place}: "{k}"') for k in ("files", "test_files"))
    if not files and not image:
        raise ValueError(f'{place}: "files" is missing; {LINE_FORM}')
    return Repository(
        question=text_of(record, "problem", place),
        files=files,
        image=image or "",
        commands=_commands(record.get("test_command"), f'{place}: "test_command"'),
        tests=of_tests,
        edits=_edits(record.get("solution") or [], files, f'{place}: "solution"'),
    )


def _files(given: object, what: str) -> dict[str, str]:
    if not isinstance(given, dict | None):
        raise ValueError(f"{what} must be an object of texts by path, not {given!r:.100}")
    # A Parquet file has the paths of all rows in each.
    found = {_inside(name, what): text for name, text in (given or {}).items() if text is not None}
    return {name: text_of(found, name, what, may_be_empty=True) for name in found}


def _commands(given: object, what: str) -> tuple[tuple[str, ...], ...]:
    listed: list[Any] = [given]
    if isinstance(given, list) and given and isinstance(given[0], list):
        listed = given
    for words in listed:
        if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
            raise ValueError(
                f"{what}={given!r:.100}: must be a list of words, or of such commands, as "
                '["python3", "-m", "unittest"]'
            )
    return tuple(map(tuple, listed))


def _edits(given: object, files: Mapping[str, str], what: str) -> tuple[Mapping[str, str], ...]:
    names, now, edits = ("path", "old", "new"), dict(files), list[dict[str, str]]()
    for number, edit in enumerate(given if isinstance(given, list) else [given]):
        place = f"{what}[{number}]"
        if not isinstance(edit, dict):
            raise ValueError(
                f"{place} must be an object with {', '.join(names)}, not {edit!r:.100}"
            )
        path, old, new = (text_of(edit, name, place, may_be_empty=True) for name in names)
        if _inside(path, place) in files:  # others are the image's
            try:
                now[path] = _replaced(now[path], old, new)
            except ValueError as error:
                raise ValueError(f"{place}: {path} {error}") from error
        edits.append({"path": path, "old": old, "new": new})
    return tuple(edits)
