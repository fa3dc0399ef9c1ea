"""Kernels of RMSNorm and QK-norm with RoPE, compared with torch.compile and the memory bandwidth.

    PYTHONPATH=src python bench/rms_norm.py

The floor of each operation is the time to move its bytes at 4.3 TB/s. The operations, with their inputs and outputs:

    forward            x -> y, rstd
    forward, add       a, b -> y, a + b, rstd
    backward, n        n gradients of y, x, rstd -> dx, dweight; with the residual's gradient, added to dx
    qk_norm_rope       x [T, H, d], cos, sin [T, d] -> y, rstd
    its backward       dy, x, rstd, cos, sin -> dx, dweight

`compiled` is torch.compile of the same function. The script compares every configuration with plain torch, times all of
them for the first shape, and only the three best for the other shapes. A configuration that cannot be compiled is left
out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timer import launch_seconds, median_event_seconds
from torch import Tensor

from padfree.layers.ops import triton_qk_norm_rope
from padfree.layers.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward
from padfree.layers.ops.rms_norm import rms_norm, rms_norm_backward
from padfree.layers.ops.triton_rms_norm import Choice, LaunchConfiguration, backward, choose, forward

SHAPES = {(14_918, 2560): 18.0, (14_918, 1024): 11.0, (8192, 4096): 11.0}
"""T, D, and the number of seconds after which only the chosen configuration is timed."""

QK_NORM_ROPE_SHAPES = {(14_918, 32, 128): 14.0, (14_918, 8, 128): 8.0}
"""T, H, d, and the number of seconds after which only the chosen configuration is timed."""

BANDWIDTH = 4.3e12
EPS = 1e-6
REPETITIONS = 12
AHEAD_CYCLES = 200_000  # lets the host run ahead of the device
# rows, warps, stages, resident
FORWARD = [
    LaunchConfiguration(1, 2, 1, 10),
    LaunchConfiguration(1, 2, 1, 16),
    LaunchConfiguration(1, 4, 1, 4),
    LaunchConfiguration(1, 8, 1, 4),
]
BACKWARD = [
    LaunchConfiguration(1, 2, 1, 4),
    LaunchConfiguration(1, 2, 2, 4),
    LaunchConfiguration(1, 4, 1, 4),
    LaunchConfiguration(1, 4, 2, 3),
    LaunchConfiguration(1, 4, 3, 2),
    LaunchConfiguration(1, 8, 1, 2),
]
QK_NORM_ROPE_FORWARD = [
    LaunchConfiguration(8, 2, 1, 8),
    LaunchConfiguration(8, 2, 1, 16),
    LaunchConfiguration(16, 4, 1, 4),
    LaunchConfiguration(16, 4, 1, 8),
    LaunchConfiguration(16, 4, 2, 8),
    LaunchConfiguration(16, 8, 1, 4),
    LaunchConfiguration(32, 4, 1, 4),
    LaunchConfiguration(32, 8, 1, 4),
]
QK_NORM_ROPE_BACKWARD = [
    LaunchConfiguration(8, 2, 1, 8),
    LaunchConfiguration(8, 2, 1, 10),
    LaunchConfiguration(16, 4, 1, 4),
    LaunchConfiguration(16, 4, 1, 6),
    LaunchConfiguration(16, 4, 2, 4),
    LaunchConfiguration(16, 4, 3, 4),
    LaunchConfiguration(16, 8, 1, 4),
    LaunchConfiguration(32, 8, 1, 3),
]
QK_NORM_ROPE_CHOICE = Choice(triton_qk_norm_rope.FORWARD, triton_qk_norm_rope.BACKWARD)


@dataclass
class Tensors:
    """Random tensors of one shape [1, T, D]."""

    a: Tensor
    b: Tensor
    dys: list[Tensor]
    weight: Tensor
    rstd: Tensor

    @classmethod
    def random(cls, shape: tuple[int, int], device: str = "cuda") -> Tensors:
        a, b, *dys = (torch.randn(1, *shape, device=device).bfloat16() for _ in range(5))
        weight = torch.rand(shape[1], device=device).bfloat16() + 0.5
        rstd = (a.float().square().mean(-1) + EPS).rsqrt()
        return cls(a, b, dys, weight, rstd)


@dataclass
class Line:
    name: str
    num_bytes: int  # bytes read and written
    plain: Callable[[], Any]
    kernel: Callable[..., Any]
    is_forward: bool = False


def lines(tensors: Tensors) -> list[Line]:
    a, b, weight, rstd = tensors.a, tensors.b, tensors.weight, tensors.rstd
    size = a.nbytes

    def plain_add() -> Any:
        total = a + b
        return *rms_norm(total, weight, EPS), total

    def backward_line(num: int, residual: Tensor | None) -> Line:
        arguments = (tensors.dys[:num], a, weight, rstd, residual)
        return Line(
            f"backward, {num}" + ("" if residual is None else ", residual"),
            size * (num + 2 + (residual is not None)),
            partial(rms_norm_backward, *arguments),
            partial(backward, *arguments),
        )

    return [
        backward_line(3, b),
        Line("forward, add", 4 * size, plain_add, partial(forward, a, b, weight, EPS), is_forward=True),
        backward_line(2, b),
        backward_line(1, b),
        backward_line(1, None),
        Line("forward", 2 * size, lambda: rms_norm(a, weight, EPS), partial(forward, a, None, weight, EPS), True),
    ]


@dataclass
class Heads:
    """Random tensors of one shape [1, T, H, d], and the angles [1, T, d]."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    rstd: Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int], device: str = "cuda") -> Heads:
        x, dy = (torch.randn(1, *shape, device=device).bfloat16() for _ in range(2))
        weight = torch.rand(shape[2], device=device).bfloat16() + 0.5
        angle = torch.randn(1, shape[0], shape[2], device=device)
        rstd = (x.float().square().mean(-1) + EPS).rsqrt()
        return cls(x, dy, weight, angle.cos().bfloat16(), angle.sin().bfloat16(), rstd)

    def double(self) -> Heads:
        tensors = (self.x, self.dy, self.weight, self.cos, self.sin, self.rstd)
        return Heads(*(tensor.double() for tensor in tensors))

    @property
    def forward_arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.x, self.weight, self.cos, self.sin, EPS

    @property
    def backward_arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.dy, self.x, self.weight, self.rstd, self.cos, self.sin


def qk_norm_rope_lines(heads: Heads) -> list[Line]:
    size, angles = heads.x.nbytes, 2 * heads.cos.nbytes
    return [
        Line(
            "qk_norm_rope",
            2 * size + angles,
            partial(qk_norm_rope, *heads.forward_arguments),
            partial(triton_qk_norm_rope.forward, *heads.forward_arguments),
            is_forward=True,
        ),
        Line(
            "qk_norm_rope backward",
            3 * size + angles,
            partial(qk_norm_rope_backward, *heads.backward_arguments),
            partial(triton_qk_norm_rope.backward, *heads.backward_arguments),
        ),
    ]


def median(call: Callable[[], Any], flush: Tensor) -> float:
    """Return the median microseconds of a call on the device, with a cold cache."""
    times = median_event_seconds(call, repeats=REPETITIONS, before=flush.zero_, sleep_cycles=AHEAD_CYCLES, wait=False)
    return 1e6 * times[0]


def short(configuration: LaunchConfiguration) -> str:
    return ", ".join(f"{value} {name}" for name, value in configuration._asdict().items())


def attempt(name: str, call: Callable[[], float]) -> float | None:
    try:
        return call()
    except Exception as error:
        print(f"    {name:44}{type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
        return None


def fits(width: int, configuration: LaunchConfiguration) -> bool:
    """Whether the values that a thread holds fit into its registers."""
    return width <= 48 * 32 * configuration.warps // configuration.rows


def bench_shape(shape: tuple[int, int], seconds: float) -> None:
    tensors = Tensors.random(shape)
    forwards, backwards = (
        [configuration for configuration in kind if fits(shape[1], configuration)] for kind in (FORWARD, BACKWARD)
    )
    print(f"T {shape[0]}, D {shape[1]}")
    bench_lines(lines(tensors), choose(shape[1]), forwards, backwards, seconds)


def bench_qk_norm_rope(shape: tuple[int, int, int], seconds: float) -> None:
    heads = Heads.random(shape)
    print(f"T {shape[0]}, H {shape[1]}, d {shape[2]}")
    bench_lines(qk_norm_rope_lines(heads), QK_NORM_ROPE_CHOICE, QK_NORM_ROPE_FORWARD, QK_NORM_ROPE_BACKWARD, seconds)


def bench_lines(
    lines: list[Line],
    choice: Choice,
    forwards: list[LaunchConfiguration],
    backwards: list[LaunchConfiguration],
    seconds: float,
) -> None:
    deadline = time.perf_counter() + seconds
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    best = {True: forwards, False: backwards}
    for line in lines:
        chosen = choice.forward if line.is_forward else choice.backward
        floor = 1e6 * line.num_bytes / BANDWIDTH
        print(f"  {line.name}: floor {floor:.0f} us", flush=True)
        times: dict[LaunchConfiguration, float] = {}
        for configuration in dict.fromkeys([chosen, *best[line.is_forward]]):
            if configuration != chosen and time.perf_counter() > deadline:
                continue
            found = attempt(
                short(configuration), partial(median, partial(line.kernel, configuration=configuration), flush)
            )
            if found is not None:
                times[configuration] = found
                mark = "  (chosen)" if configuration == chosen else ""
                print(f"    {short(configuration):44}{found:8.1f} us {floor / found:6.2f}{mark}", flush=True)
        best[line.is_forward] = sorted(times, key=lambda configuration: times[configuration])[:3]
        if chosen in times:
            print(f"    launch on the host: {1e6 * launch_seconds(partial(line.kernel, configuration=chosen)):.0f} us")
        if time.perf_counter() < deadline:
            torch._dynamo.reset()
            found = attempt("compiled", partial(median, torch.compile(line.plain, dynamic=False), flush))
            if found is not None:
                print(f"    {'compiled':44}{found:8.1f} us {floor / found:6.2f}", flush=True)


def check(shape: tuple[int, int]) -> None:
    tensors = Tensors.random(shape)
    a, b, weight, rstd = (tensor.double() for tensor in (tensors.a, tensors.b, tensors.weight, tensors.rstd))
    total = (tensors.a + tensors.b).double()
    dys = [dy.double() for dy in tensors.dys]
    choice = choose(shape[1])
    forwards, backwards = (
        [configuration for configuration in kind if fits(shape[1], configuration)]
        for kind in ([choice.forward, *FORWARD], [choice.backward, *BACKWARD])
    )
    check_configurations(
        "forward",
        lambda configuration: forward(tensors.a, tensors.b, tensors.weight, EPS, configuration)[:2],
        (rms_norm(total, weight, EPS)[0], total),
        forwards,
    )
    check_configurations(
        "backward",
        lambda configuration: backward(
            tensors.dys, tensors.a, tensors.weight, tensors.rstd, tensors.b, configuration=configuration
        ),
        rms_norm_backward(dys, a, weight, rstd, b),
        backwards,
    )


def check_qk_norm_rope(shape: tuple[int, int, int]) -> None:
    heads = Heads.random(shape)
    exact = heads.double()
    check_configurations(
        "qk_norm_rope",
        lambda configuration: triton_qk_norm_rope.forward(*heads.forward_arguments, configuration=configuration)[:1],
        qk_norm_rope(*exact.forward_arguments)[:1],
        [QK_NORM_ROPE_CHOICE.forward, *QK_NORM_ROPE_FORWARD],
    )
    check_configurations(
        "qk_norm_rope backward",
        lambda configuration: triton_qk_norm_rope.backward(*heads.backward_arguments, configuration=configuration),
        qk_norm_rope_backward(*exact.backward_arguments),
        [QK_NORM_ROPE_CHOICE.backward, *QK_NORM_ROPE_BACKWARD],
    )


def check_configurations(
    name: str,
    call: Callable[[LaunchConfiguration], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    configurations: list[LaunchConfiguration],
) -> None:
    """Print the largest relative distance of every configuration from plain torch in float64."""

    def error(configuration: LaunchConfiguration) -> float:
        pairs = zip(call(configuration), expected, strict=True)
        return max(float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs)

    for configuration in dict.fromkeys(configurations):
        worst = attempt(short(configuration), partial(error, configuration))
        if worst is not None:
            print(f"    {'right' if worst < 4e-3 else 'WRONG'} {worst:.1e}  {name}, {short(configuration)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; the last column is floor / time")
    check((1001, 2560))
    check_qk_norm_rope((1001, 8, 128))
    for shape, seconds in SHAPES.items():
        bench_shape(shape, seconds)
        torch.cuda.empty_cache()
    for heads_shape, seconds in QK_NORM_ROPE_SHAPES.items():
        bench_qk_norm_rope(heads_shape, seconds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
