from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.start.placement import PlacementError, RayCluster, copy_files


def test_engine_that_no_machine_has_the_gpus_for_is_refused() -> None:
    cluster = RayCluster(host="127.0.0.1", num_cpus=64, num_gpus=16, most_gpus=8, private=None)
    cluster.check_engine(8)
    with pytest.raises(PlacementError, match=r"tp_size=16: .*on one machine.* more than 8; lower"):
        cluster.check_engine(16)


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
