"""The backend that a call gets, on simulated machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import (
    BACKENDS,
    AttentionBackend,
    Capabilities,
    choose_backend,
    flash4,
    reference,
    register_backend,
    selection,
    varlen_attention,
)
from padfree.attention.spec import AttentionSpec
from padfree.cp import shard
from padfree.model import attach, hidden_states
from padfree.segments import Segments
from padfree.testing.models import build, row
from tests.refused import refused

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ALL = ("fa4", "flex")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """`machine("fa4", major=9)`: a GPU of compute capability 9.0 on which only the package of fa4 is installed."""

    def pretend(*packages: str, major: int = 9) -> None:
        selection._choose.cache_clear()
        monkeypatch.setattr(selection, "_compute_capability", lambda device: (major, 0) if device == CUDA else (0, 0))
        for name in ALL:
            monkeypatch.setattr(BACKENDS[name], "is_installed", lambda there=name in packages: there)

    yield pretend
    selection._choose.cache_clear()


@pytest.mark.parametrize(
    ("packages", "major", "request_", "chosen"),
    [
        (ALL, 9, {}, "fa4"),
        (("flex",), 9, {}, "torch"),
        ((), 9, {}, "torch"),
        (ALL, 10, {}, "fa4"),
        (ALL, 8, {}, "torch"),  # fa4 has no backward before Hopper
        (ALL, 12, {}, "torch"),
        (ALL, 7, {}, "flex"),
        (ALL, 9, {"softcap": True}, "fa4"),
        (("flex",), 9, {"softcap": True}, "flex"),
        (ALL, 9, {"dtype": FP32}, "flex"),
        ((), 9, {"dtype": FP64}, "reference"),
        (ALL, 9, {"head_dim": 36}, "flex"),
        (ALL, 9, {"head_dim": 256}, "fa4"),
        (ALL, 10, {"head_dim": 160}, "torch"),
        (ALL, 10, {"head_dim": 256}, "fa4"),
        (ALL, 10, {"head_dim": 256, "softcap": True}, "flex"),
        (ALL, 9, {"head_dim": 192, "value_dim": 128}, "flex"),
        (ALL, 9, {"head_dim": 80}, "torch"),
        (ALL, 9, {"head_dim": 64, "value_dim": 128}, "flex"),
        (("flex",), 9, {"raw_backward": True}, "torch"),
    ],
)
def test_auto_takes_the_fastest_backend_that_supports_the_call(
    machine: object, packages: tuple[str, ...], major: int, request_: dict[str, object], chosen: str
) -> None:
    machine(*packages, major=major)
    arguments = {"dtype": BF16, "head_dim": 128, **request_}
    assert choose_backend(CUDA, **arguments) == chosen


@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32, FP64])
@pytest.mark.parametrize("softcap", [False, True])
def test_everything_on_the_cpu_goes_to_the_cpu_kernels(dtype: torch.dtype, softcap: bool) -> None:
    assert choose_backend("cpu", dtype, 40, value_dim=72, softcap=softcap, raw_backward=True) == "cpu"


@pytest.mark.parametrize(
    ("requested", "device", "request_", "message"),
    [
        ("fa5", CPU, {}, "backend: 'fa5' is unknown; use 'auto' or one of fa4, torch"),
        (
            "flex",
            CPU,
            {},
            "'flex' does not support this call: the backend runs on cuda, not on cpu; use 'auto' or 'cpu' or",
        ),
        ("torch", CPU, {}, "the backend runs on cuda, not on cpu"),
        ("cpu", CUDA, {}, "the backend runs on cpu, not on cuda"),
        ("torch", CUDA, {"dtype": FP32}, r"torch.float32 is not supported .*; use 'auto' or 'flex'"),
        ("torch", CUDA, {"head_dim": 36}, r"head size 36 is not supported \(only 8 to 256 in steps of 8\)"),
        ("torch", CUDA, {"head_dim": 264}, "head size 264 is not supported"),
        ("torch", CUDA, {"value_dim": 64}, "q and k have head size 128 but v has 64; use 'auto' or 'flex'"),
        ("torch", CUDA, {"softcap": True}, "the backend does not support softcap; use 'auto' or 'flex' or 'reference'"),
        ("flex", CUDA, {"raw_backward": True}, "ring attention needs; use 'auto' or 'torch' or 'reference'"),
        ("fa4", CUDA, {}, r"the backend's package is not installed \(pip install 'padfree\[fa4\]'\); use 'auto' or"),
    ],
)
def test_a_named_backend_that_does_not_support_a_call_is_refused_with_reason_and_fix(
    machine: object, requested: str, device: torch.device, request_: dict[str, object], message: str
) -> None:
    machine("flex")
    with pytest.raises(ValueError, match=message):
        choose_backend(device, **{"dtype": BF16, "head_dim": 128, **request_}, requested=requested)


@pytest.mark.parametrize(
    ("major", "message"),
    [(8, r"compute capability 8.0 is not supported \(only 9 to 11\)"), (12, "compute capability 12.0")],
)
def test_fa4_is_refused_on_devices_it_has_no_kernels_for(machine: object, major: int, message: str) -> None:
    machine("fa4", major=major)
    with pytest.raises(ValueError, match=message):
        choose_backend(CUDA, BF16, 128, requested="fa4")


def test_fa4_has_fewer_head_sizes_on_blackwell(machine: object) -> None:
    machine("fa4", major=10)
    with pytest.raises(ValueError, match="head size 192 is not supported on Blackwell"):
        choose_backend(CUDA, BF16, 192, requested="fa4")


def test_auto_says_why_no_backend_supports_a_call_and_never_falls_back_to_the_reference(machine: object) -> None:
    machine(major=7)
    with pytest.raises(
        ValueError, match=r"'auto' found no backend for this call \(fa4: .*; torch: .*\); .* backend='reference'"
    ):
        choose_backend(CUDA, BF16, 128)
    assert choose_backend(CUDA, BF16, 128, requested="reference") == "reference"


def test_a_device_that_is_not_there() -> None:
    with refused("device"):
        choose_backend(CUDA, BF16, 128)


class Halved(AttentionBackend):
    """A user-defined backend: the reference with half of its output."""

    name = "halved"
    capabilities = Capabilities(devices=("cpu",), dtypes=(FP64,), lengths_on_host=True, raw_backward=False)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = reference.BACKEND.forward(*args)
        return out / 2, lse

    def backward(self, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError


def test_a_user_defined_backend() -> None:
    try:
        register_backend(Halved())
        segments = Segments.from_lengths([3, 2])
        q, k, v = (torch.randn(5, 2, 4, dtype=FP64).requires_grad_() for _ in range(3))
        mine = varlen_attention(q, k, v, segments, segments, backend="halved")
        right = varlen_attention(q, k, v, segments, segments, backend="reference")
        torch.testing.assert_close(mine, right / 2)
        (found,), (expected,) = (torch.autograd.grad(out.sum(), v) for out in (mine, right))
        torch.testing.assert_close(found, expected / 2)
        assert choose_backend(CPU, FP64, 4) == "cpu", "the built-in backends come first"
        with refused("name"):
            register_backend(Halved())
    finally:
        BACKENDS.pop("halved", None)
        selection._choose.cache_clear()


class Own(AttentionBackend):
    """A user-defined backend with its own backward, which `auto` does not choose."""

    name = "own"
    capabilities = Capabilities(devices=("cpu",), dtypes=(FP64,), auto_dtypes=(), lengths_on_host=True)

    def __init__(self) -> None:
        self.calls = [0, 0]

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.calls[0] += 1
        return reference.BACKEND.forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls[1] += 1
        return reference.BACKEND.backward(*args)


def test_a_registered_backend_serves_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of every layer use it, and nothing else does: gradients are those of the reference."""
    own, batch = Own(), shard(row([5, 1, 9], pad=1))
    monkeypatch.setitem(BACKENDS, "own", own)
    del BACKENDS["own"]  # and afterwards by monkeypatch
    register_backend(own)
    assert choose_backend(CPU, FP64, 16) == "cpu"
    gradients = []
    for backend in ("own", "reference"):
        model = attach(build("qwen3").double(), backend=backend)
        own.calls = [0, 0]  # calls of the probe
        hidden_states(model, batch).square().sum().backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.model.parameters()]))
        assert own.calls == ([2, 2] if backend == "own" else [0, 0]), "two layers"
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_the_table_in_the_documentation_is_what_the_backends_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
    assert selection.capability_table() in page.read_text(encoding="utf-8")


def test_flash_attention_2_does_not_pass_for_4(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Both are named `flash_attn`; version 4 is recognised by its folder `cute` and by the package cutlass."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not flash4._is_installed.__wrapped__()
    (package / "cute").mkdir()
    (package / "cute" / "interface.py").touch()
    (tmp_path / "cutlass.py").touch()
    assert flash4._is_installed.__wrapped__()


def test_a_flash_attention_4_that_is_broken_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> None:
        raise OSError("libtvm_ffi.so: cannot open shared object file\n  in two lines")

    monkeypatch.setattr(flash4, "import_module", failing)
    q, segments = torch.zeros(3, 2, 64), Segments.from_lengths([3])
    with refused("backend", "'fa4' is not usable: flash-attn-4 cannot be imported") as caught:
        flash4.BACKEND.forward(q, q, q, segments, segments, AttentionSpec(scale=1.0))
    assert "libtvm_ffi.so" in str(caught.value)
    assert "\n" not in str(caught.value)
