"""What every test shares: reproducible random numbers, who sees the GPU, and where the real data is.

A test marked `gpu` needs a CUDA device and is skipped where there is none. Every other test means the CPU: on a machine
with a GPU it does not see it, and neither do the processes that it starts.

torch is imported where tests are collected, not in a process that only hands them out: others would wait 5 s for it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Generator
from functools import cache
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")

GSM8K = Path(os.environ.get("PADFREE_GSM8K", Path(__file__).parents[2] / "shared" / "data" / "gsm8k"))


@cache
def has_gpu() -> bool:
    """Asked before it is hidden: CUDA looks at CUDA_VISIBLE_DEVICES only once."""
    import torch

    return torch.cuda.is_available()


def pytest_configure() -> None:
    """A shell ignores SIGINT in its background jobs, and what is ignored stays so in a run. Tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that processes which share the files end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    can_run = has_gpu()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if not can_run:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        # Which of torch's C++ warnings appear in the name of our code depends on the device and its driver.
        item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
        item.add_marker(pytest.mark.filterwarnings("error::padfree.warning.PadfreeWarning"))


def pytest_collection_finish() -> None:
    """Compilers are set up. What has been imported stays: the garbage collector need not look at it."""
    import tests.compiler_settings  # noqa: F401

    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or packages that count what they still hold at the end complain


def _no_gpu() -> bool:
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around the fixtures as well, those of a module among them."""
    import torch

    if item.get_closest_marker("gpu") is not None:
        return (yield)
    with mock.patch.object(torch.cuda, "is_available", _no_gpu), mock.patch.dict(os.environ):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return (yield)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    if has_gpu():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # the other way writes down the stack, for a GPU that may still come
    np.random.seed(0)


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Generator[None, None, None]:
    """A process runs many files. A process group that the tests of a file have made ends with the file."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder of the real data."""
    if not (GSM8K / "solutions.jsonl").exists():
        pytest.skip(f"GSM8K is not there ({GSM8K}); set PADFREE_GSM8K to its folder")
    return GSM8K


@pytest.fixture(scope="session")
def gsm8k_solutions(gsm8k: Path) -> list[dict[str, object]]:
    """1,319 questions with four solutions of uneven length each, and whether each is right."""
    return [json.loads(line) for line in (gsm8k / "solutions.jsonl").read_text(encoding="utf-8").splitlines()]
