"""The result of a demo, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padfree.cli.demo.folder import Demo


def show_result(demo: Demo, seconds: float) -> None:
    found = demo.found
    rows = (
        (
            f"packed against padded{', on the CPU' if found['gpu'] else ''}",
            f"{found['packed']['faster']:.1f} times as fast",
        ),
        ("their losses", f"the same to {found['packed']['difference']:.0e}"),
        *_gpu_rows(found["gpu"]),
        ("gradients, packed against one at a time", f"the same to {found['check']['gradients']:.0e}"),
        ("reward before and after", f"{found['reward']['before']:.2f} -> {found['reward']['after']:.2f}"),
        ("this took", f"{seconds:.0f} s"),
        ("report", found["report"]["path"]),
    )
    demo.console.print()
    for name, value in rows:
        demo.console.print(f"{name:42}{value}", highlight=False, markup=False, soft_wrap=True)


def _gpu_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not found:
        return []
    size = f"{found['parameters'] / 1e6:.0f}M parameters"
    return [(f"the same on {found['device']}", f"{found['faster']:.1f} times as fast, {size}")]
