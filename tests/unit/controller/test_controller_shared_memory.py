"""Room for what a run keeps in shared memory, looked for before anything is started."""

from __future__ import annotations

import pytest

from configs.load import load_config
from controller.start.plan import make_plan
from controller.start.preflight import check_inputs, check_shared_memory

HUGE = (
    "model.scratch.hidden_size=65536",
    "model.scratch.intermediate_size=262144",
    "model.scratch.num_layers=2000",
    "cluster.gpus_per_rank=0",
)


def test_shared_memory_without_room_for_the_staged_weights_is_refused_before_the_start():
    config = load_config([*HUGE])
    with pytest.raises(ValueError, match=r"weight_sync.stage_dir: no room in /dev/shm for 2 slots"):
        check_inputs(config)


def test_a_stage_folder_of_its_own_counts_the_staged_weights_alone(tmp_path):
    config = load_config([*HUGE, f"weight_sync.stage_dir={tmp_path}/not/there/yet"])
    with pytest.raises(
        ValueError, match=f"no room in {tmp_path} for 2 slots of about [0-9]+ bytes \\("
    ):
        check_shared_memory(config, make_plan(config, 0, 2))


def test_shared_memory_has_room_for_the_quickstart():
    config = load_config([])
    check_shared_memory(config, make_plan(config, 0, 2))
