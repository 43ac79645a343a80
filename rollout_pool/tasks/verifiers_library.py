"""What is used of the verifiers library (an optional extra), version 0.1.10."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from signal import SIGINT, SIGTERM, default_int_handler
from typing import Any, Protocol, cast

INSTALL = "pip install 'leash-rl[verifiers]'"


class Environment(Protocol):
    def get_dataset(self) -> Iterable[Mapping[str, Any]]:
        """Rows with `prompt` and what else the environment wants back in run_rollout."""
        ...

    def get_eval_dataset(self) -> Iterable[Mapping[str, Any]]:
        """The same to evaluate on; the training rows if there are no others."""
        ...

    async def run_rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> Mapping[str, Any]:
        """Plays one row with `client`, an AsyncOpenAI, and scores it: reward, metrics, error."""
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
    """Stands for the module `signal`; takes no handler."""

    SIGINT, SIGTERM = SIGINT, SIGTERM
    default_int_handler = staticmethod(default_int_handler)

    @staticmethod
    def signal(number: int, handler: object) -> None:
        return


_loading = threading.Lock()


@contextlib.contextmanager
def _no_signal_handlers(module: Any) -> Iterator[None]:
    """An environment puts handlers of its own for SIGINT and SIGTERM in the place of the process's
    when it is made. Ours must stay; and outside the main thread, where tasks are built, Python
    refuses to set any, so no environment could be made there."""
    with _loading:
        signals, module.signal = module.signal, _Signals
        try:
            yield
        finally:
            module.signal = signals
