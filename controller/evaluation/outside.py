"""Evaluations of checkpoints by a program of the user's, `rollout.eval.command`, beside training.

a due checkpoint ── export its model ── run the program ── read its numbers ── one record
  └─ while another one is evaluated: skipped, and counted
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.rollout_schema import EvalConfig
from configs.run_files import Scalar, read_text
from controller.metrics.history import EVAL_COMMAND
from controller.run_dir import EVALUATED, RunDir
from processes.child import Child
from processes.logs import last_lines

END_S = 3.0  # which a program has to end when it is asked to, before its group is killed
# Here it would hold up other threads while it writes, and trainer ranks would seem not to answer.
EXPORT = (sys.executable, "-m", "controller.main", "export")


@dataclass(eq=False)
class CommandEvaluations:
    """One evaluation at a time. The user hears of one that fails, and the run goes on."""

    settings: EvalConfig
    run_dir: RunDir
    append: Callable[[Mapping[str, Scalar], str], Awaitable[None]]
    say: Callable[[str], None]
    export: Sequence[str] = EXPORT
    _task: asyncio.Task[None] | None = None
    _num_skipped: int = 0
    _is_ending: bool = False

    def note_checkpoint(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate the checkpoint of `step`, if it is due and no other one is being evaluated."""
        if not (every := self.settings.command_every) or step % every or step == 0:
            return
        if not self._is_ending and (self._task is None or self._task.done()):
            self._task = tasks.create_task(self._evaluate(step))
        else:
            self._num_skipped += 1

    async def end(self, step: int) -> None:
        """Wait for the evaluation at work, and evaluate the checkpoint of the last step."""
        self._is_ending = True  # the record of a checkpoint may be read late
        if self._task is not None:
            await self._task
        if self.settings.command_every is not None:
            await self._evaluate(step)

    async def _evaluate(self, step: int) -> None:
        began, log = time.monotonic(), self.run_dir.log_of("eval-command")
        values: dict[str, Scalar] = {"step": step, "result": "failed"}
        folder = self.run_dir.path / EVALUATED
        try:
            async with asyncio.timeout(limit_s := self.settings.command_timeout_s):
                values |= {**await self._measure(step, folder, log), "result": "ok"}
        except TimeoutError:
            values["why"] = f"rollout.eval.command_timeout_s={limit_s:g} is over; raise it"
        except Exception as error:  # whatever it is, the run goes on
            values["why"] = str(error)
        finally:
            await _remove(folder)
        if why := values.get("why"):
            what = f"rollout.eval.command has not evaluated step {step}: {why}"
            self.say(f"{what}; the last lines of {log}:\n{last_lines(log)}")
        values |= {"seconds": time.monotonic() - began, "skipped": self._num_skipped}
        self._num_skipped = 0
        await self.append(values, EVAL_COMMAND)

    async def _measure(self, step: int, folder: Path, log: Path) -> dict[str, float]:
        await _remove(folder)  # that of a controller that was killed
        folder.mkdir()
        model, out = str(folder / "model"), str(folder / "numbers.json")
        run = (f"--dir={self.run_dir.path.parent}", f"--run={self.run_dir.name}")
        program = [w.replace("{model}", model).replace("{out}", out) for w in self.settings.command]
        for words in ([*self.export, *run, f"--step={step}", f"--to={model}"], program):
            child = Child([shutil.which(words[0]) or words[0], *words[1:]], log)
            try:
                if exit_code := await child.exit():
                    raise ValueError(f"exit code {exit_code} of {words[0]}; its output may say why")
            finally:  # also when the time is over, or the run
                await asyncio.to_thread(child.stop, END_S)
        return {f"metric/{name}": number for name, number in read_numbers(Path(out)).items()}


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # a model is large


def read_numbers(path: Path) -> dict[str, float]:
    """Raises ValueError that says what the program must write, and what is wrong."""
    form = 'a JSON object of finite numbers, by printable names, as {"gsm8k": 0.61}'
    try:
        found = json.loads(read_text(path))
        pairs = list(found.items()) if isinstance(found, dict) else []
        numbers = {n: float(x) for n, x in pairs if type(x) in (int, float) and n.isprintable()}
        bad = [pair for pair in pairs if not math.isfinite(numbers.get(pair[0], math.nan))]
        if bad or not pairs:
            raise ValueError(f"it must not be {(bad or [found])[0]!a:.200}")
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"rollout.eval.command must write {form} to {{out}}: {error}") from error
    return numbers
