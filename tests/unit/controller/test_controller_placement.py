from __future__ import annotations

import os
from pathlib import Path

from controller.start.placement import copy_files


def test_copy_of_logs_takes_plain_files_only(tmp_path: Path) -> None:
    secret, logs, kept = tmp_path / "secret", tmp_path / "logs", tmp_path / "kept"
    secret.mkdir()
    (secret / "token").write_text("s")
    (logs / "old").mkdir(parents=True)
    (logs / "raylet.out").write_text("a")
    (logs / "old" / "raylet.out").write_text("b")
    (logs / "file").symlink_to(secret / "token")
    (logs / "folder").symlink_to(secret)
    (logs / "zero").symlink_to("/dev/zero")
    os.mkfifo(logs / "pipe")
    copy_files(logs, kept)
    copied = {str(path.relative_to(kept)) for path in kept.rglob("*")}
    assert copied == {"raylet.out", "old", "old/raylet.out"}
    assert (kept / "old" / "raylet.out").read_text() == "b"
