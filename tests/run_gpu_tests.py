"""Run every test that needs a GPU, and no other: `make test-gpu`.

    gpu tests: 212 passed, 0 failed, 31 skipped on NVIDIA H200 in 280 s

That is the last line. It is a failure if there is no GPU, or if no test ran.

Most of the time goes into compiling kernels, which a processor does. Where pytest-xdist is installed, several processes
share the GPU for it; `-n0` runs all in one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MOST_PROCESSES = 14


class Outcomes:
    """A plugin that counts what became of each test, and shows a failure when it happens: a run may be cut short."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # a fixture may fail or skip, too
            self.counts[report.outcome] += 1
        if report.failed:
            sys.stdout.write(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n")
            sys.stdout.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self.counts["failed"] += 1


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("gpu tests: none ran, for torch sees no CUDA device\n")
        return 1
    begin, outcomes = time.monotonic(), Outcomes()
    # pytest-benchmark, where it is installed, warns that it measures nothing beside xdist.
    options = ["--rootdir", str(ROOT), "-m", "gpu", "--durations=20", "-p", "no:benchmark"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each of them
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # expected values are computed on the CPU, by all at once
    options += arguments
    code = pytest.main([*options, str(ROOT / "tests")], plugins=[outcomes])
    counts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.counts.items())
    where, seconds = torch.cuda.get_device_name(), time.monotonic() - begin
    sys.stdout.write(f"gpu tests: {counts} on {where} in {seconds:.0f} s\n")
    return int(code) or int(outcomes.counts["failed"] > 0 or outcomes.counts["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
