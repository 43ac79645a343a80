"""The shared memory that a process holds."""

from __future__ import annotations

import multiprocessing

import psutil

from processes.tree import is_semaphore, shared_memory_files


def test_shared_memory_files_are_found_by_what_is_mapped_whatever_its_name():
    before = shared_memory_files([psutil.Process()])
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    (found,) = shared_memory_files([psutil.Process()]) - before
    assert found.name.startswith("sem.mp-") and is_semaphore(found)
    del semaphore
