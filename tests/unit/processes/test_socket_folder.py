from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from controller.start.fork_servers import KINDS
from processes.socket_folder import make_socket_folder

LONGEST_NAME = max(len(program) for kind in KINDS for program in kind.programs)


@pytest.mark.parametrize("length", [47, 48, 49, 300])
def test_sockets_have_room_whatever_the_length_of_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as short:
        deep = Path(short).joinpath(*["d" * 20] * 12)
        deep.mkdir(parents=True)
        chosen = Path(str(deep)[:length].rstrip("/"))
        chosen.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(chosen))
        folder = make_socket_folder("leash-sglang-")
        assert (folder.parent == chosen) == (len(str(chosen)) <= 48)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{'n' * LONGEST_NAME}")
        (folder / ("n" * LONGEST_NAME)).unlink()
        folder.rmdir()
