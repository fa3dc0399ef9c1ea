"""The free memory of this host, within the limits of the container or job that this process belongs to.

Linux limits the memory of a job by control groups (cgroups), which can be nested. For example, a group with a limit of
64 GiB uses 40 GiB, of which 6 GiB are an inactive cache of files. The kernel drops this cache before it refuses memory,
so 64 - 40 + 6 = 30 GiB are free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""The files that hold the memory limit and the memory use of a control group, for cgroup version 2 and version 1."""


def free_host_memory(root: Path = Path("/")) -> float:
    """Return the number of bytes that this process can still allocate in host memory.

    `root`: the folder that contains `proc` and `sys`. On a system without `/proc/meminfo`, the result is the memory of
    the whole machine.
    """
    found = [_available(root / "proc/meminfo")]
    for version, folder in _control_groups(root):
        free = _free_in_group(folder, version)
        if free is not None:
            found.append(free)
    return max(0.0, min(found))


def _available(meminfo: Path) -> float:
    try:
        lines = meminfo.read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _control_groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (cgroup version, folder) for the Linux cgroup of this process and for each of its parent cgroups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # such as "0::/job/step" (version 2) or "4:memory:/job/step" (version 1)
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")  # inside a container, this folder may be missing: its own group is then at the top
        for folder in (own, *own.parents):
            yield version, folder
            if folder == top:
                break


def _free_in_group(folder: Path, version: int) -> float | None:
    """Return how many more bytes the processes of a control group may use, or None if the group has no memory limit."""
    limit, use = _FILES[version]
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        free = float(int(most) - int((folder / use).read_text()))
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == ("inactive_file" if version == 2 else "total_inactive_file"):
                free += int(value)
        return free
    except (OSError, ValueError):
        return None
