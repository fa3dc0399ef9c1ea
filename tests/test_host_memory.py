"""The free memory of the host, with and without the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from padfree.host_memory import free_host_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: {128 << 20} kB\nMemAvailable: {90 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def second(folder: str, limit: str, use: int, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {inactive}\nactive_file 7\n"
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{use}\n", f"{folder}/memory.stat": stat}


def first(folder: str, limit: int, use: int, inactive: int = 0) -> dict[str, str]:
    stat = f"inactive_file 3\ntotal_inactive_file {inactive}\n"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{use}\n",
        f"{folder}/memory.stat": stat,
    }


TOP, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
JOB = {"proc/self/cgroup": "0::/job/step\n"}
OLD_JOB = {"proc/self/cgroup": "5:cpu:/\n4:cpuset,memory:/job/step\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 90),
        ({"proc/self/cgroup": "0::/\n"}, 90),
        (JOB | second(f"{TOP}/job/step", "max", 40 * GIB), 90),
        (JOB | second(f"{TOP}/job/step", str(64 * GIB), 40 * GIB, 6 * GIB), 30),
        (JOB | second(f"{TOP}/job", str(64 * GIB), 40 * GIB) | second(f"{TOP}/job/step", "max", 9 * GIB), 24),
        (JOB | second(TOP, str(8 * GIB), 5 * GIB), 3),  # in a container, whose own group is at the top
        (JOB | second(f"{TOP}/job", str(200 * GIB), 2 * GIB), 90),
        (JOB | second(f"{TOP}/job", str(4 * GIB), 5 * GIB), 0),
        (OLD_JOB | first(f"{OLD}/job/step", 64 * GIB, 40 * GIB, 6 * GIB), 30),
        (OLD_JOB | first(f"{OLD}/job", 32 * GIB, 30 * GIB) | first(f"{OLD}/job/step", 1 << 62, 9 * GIB), 2),
        (JOB | {f"{TOP}/job/memory.max": "?\n"}, 90),
    ],
)
def test_the_least_of_machine_and_limits(files: dict[str, str], free: float, tmp_path: Path) -> None:
    assert free_host_memory(write(tmp_path, files)) == free * GIB


def test_this_host_and_a_system_without_proc(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_memory() <= machine
    assert free_host_memory(tmp_path) == machine
