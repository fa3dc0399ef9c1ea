"""`padfree env`: versions, devices and optional packages, for a bug report.

Examples:

    padfree env
    padfree env --json > environment.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import padfree

PURPOSES = {
    "fa4": "fast attention and matmuls on Hopper and newer GPUs",
    "fla": "kernels of linear-attention layers",
    "lora": "adapters",
    "track": "experiment trackers",
}
"""The purpose of each optional dependency group. Groups for developers are left out."""

REQUIREMENT = re.compile(r"([\w.-]+).*?extra == [\"'](\w+)[\"']")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "env",
        help="print versions, devices and kernels, for a bug report",
        description="Print versions, devices, and the optional packages that are installed or missing.",
        epilog="example: padfree env",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> int:
    found = environment()
    if settings.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for number, line in enumerate(lines):
            print(f"{name if number == 0 else '':{width}}  {line}")
    return 0


def environment() -> dict[str, Any]:
    """Return the versions, devices and packages of this machine, by name. A value is a string or a list of strings."""
    import torch

    found: dict[str, Any] = {
        "padfree": padfree.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "host": f"{os.cpu_count()} CPU cores, {_host_memory()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
    }
    for package in ("triton", "transformers", "tokenizers", "safetensors", "numpy"):
        found[package] = installed(package) or "missing"
    found["devices"] = list(_devices()) or ["no GPU: runs use the CPU"]
    found["attention"] = list(_attention())
    found["optional"] = list(optional_packages())
    return found


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def optional_packages() -> Iterator[str]:
    """Yield one line for each optional package: its purpose, and its version or how to install it."""
    for requirement in requires("padfree") or ():
        match = REQUIREMENT.match(requirement)
        if match is None or match[2] not in PURPOSES:
            continue
        package, part = match[1], match[2]
        there = installed(package)
        state = there or f"missing; pip install 'padfree[{part}]'"
        yield f"{package} ({PURPOSES[part]}): {state}"


def _host_memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # not POSIX
        return "memory unknown"
    return f"{size / 2**30:.1f} GiB"


def _devices() -> Iterator[str]:
    import torch

    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index} {found.name}, {found.total_memory / 2**30:.1f} GiB, capability {found.major}.{found.minor}"


def _attention() -> Iterator[str]:
    """Yield one line for each device type and dtype, with the attention backend that `auto` chooses."""
    import torch

    from padfree.attention import choose_backend

    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        if device == "cpu" or torch.cuda.is_available():
            chosen = choose_backend(device, dtype, 128)
            yield f"{device}, {str(dtype).removeprefix('torch.')}, heads of 128: {chosen}"
