"""The norms as operators: ways to cut the kernels up against each other, torch.compile, and what the bytes need.

    PYTHONPATH=src python bench/norms.py

For some shapes in bfloat16 on a GPU. Lines, of which the floor is their bytes at 4.3 TB/s:

    forward            x -> y, rstd
    forward, sum       a, b -> y, a + b, rstd
    backward, n        n gradients of y, x, rstd -> dx, dweight; and the gradient that passes by, added to dx
    rotated forward    x [T, H, d], cos, sin [T, d] -> y, rstd
    rotated backward   dy, x, rstd, cos, sin -> dx, dweight

`compiled` is torch.compile of the same function in plain torch, for a fixed shape. A configuration that cannot be
compiled or launched says so, and the next one is tried. All are timed for the first line of a kind, and the best three
for the others. Before the times, results of every configuration are compared with plain torch.
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
from padfree.layers.ops.qk_norm_rope import rotated_norm, rotated_norm_backward
from padfree.layers.ops.rms_norm import norm, norm_backward
from padfree.layers.ops.triton_rms_norm import Choice, Configuration, backward, choose, forward

SHAPES = {(14_918, 2560): 18.0, (14_918, 1024): 11.0, (8192, 4096): 11.0}
"""T and D, and the seconds after which nothing but what is chosen is timed: most of them are the compiler's."""

ROTATED_SHAPES = {(14_918, 32, 128): 14.0, (14_918, 8, 128): 8.0}
"""T, H and d, and the seconds."""

BANDWIDTH = 4.3e12
EPS = 1e-6
REPETITIONS = 12
AHEAD_CYCLES = 200_000  # that the host may be behind
# rows, warps, stages, resident
FORWARD = [
    Configuration(1, 2, 1, 10), Configuration(1, 2, 1, 16), Configuration(1, 4, 1, 4), Configuration(1, 8, 1, 4),
]  # fmt: skip
BACKWARD = [
    Configuration(1, 2, 1, 4), Configuration(1, 2, 2, 4), Configuration(1, 4, 1, 4), Configuration(1, 4, 2, 3),
    Configuration(1, 4, 3, 2), Configuration(1, 8, 1, 2),
]  # fmt: skip
ROTATED_FORWARD = [
    Configuration(8, 2, 1, 8), Configuration(8, 2, 1, 16), Configuration(16, 4, 1, 4), Configuration(16, 4, 1, 8),
    Configuration(16, 4, 2, 8), Configuration(16, 8, 1, 4), Configuration(32, 4, 1, 4), Configuration(32, 8, 1, 4),
]  # fmt: skip
ROTATED_BACKWARD = [
    Configuration(8, 2, 1, 8), Configuration(8, 2, 1, 10), Configuration(16, 4, 1, 4), Configuration(16, 4, 1, 6),
    Configuration(16, 4, 2, 4), Configuration(16, 4, 3, 4), Configuration(16, 8, 1, 4), Configuration(32, 8, 1, 3),
]  # fmt: skip
ROTATED_CHOICE = Choice(triton_qk_norm_rope.FORWARD, triton_qk_norm_rope.BACKWARD)


@dataclass
class Tensors:
    """Of one shape [1, T, D]."""

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
    num_bytes: int  # that are read or written
    plain: Callable[[], Any]
    kernel: Callable[..., Any]
    is_forward: bool = False


def lines(tensors: Tensors) -> list[Line]:
    a, b, weight, rstd = tensors.a, tensors.b, tensors.weight, tensors.rstd
    size = a.nbytes

    def plain_sum() -> Any:
        total = a + b
        return *norm(total, weight, EPS), total

    def backward_line(num: int, residual: Tensor | None) -> Line:
        arguments = (tensors.dys[:num], a, weight, rstd, residual)
        return Line(
            f"backward, {num}" + ("" if residual is None else ", residual"),
            size * (num + 2 + (residual is not None)),
            partial(norm_backward, *arguments),
            partial(backward, *arguments),
        )

    return [
        backward_line(3, b),
        Line("forward, sum", 4 * size, plain_sum, partial(forward, a, b, weight, EPS), is_forward=True),
        backward_line(2, b),
        backward_line(1, b),
        backward_line(1, None),
        Line("forward", 2 * size, lambda: norm(a, weight, EPS), partial(forward, a, None, weight, EPS), True),
    ]


@dataclass
class Heads:
    """Of one shape [1, T, H, d], and the angles [1, T, d]."""

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


def rotated_lines(heads: Heads) -> list[Line]:
    size, angles = heads.x.nbytes, 2 * heads.cos.nbytes
    return [
        Line(
            "rotated forward",
            2 * size + angles,
            partial(rotated_norm, *heads.forward_arguments),
            partial(triton_qk_norm_rope.forward, *heads.forward_arguments),
            is_forward=True,
        ),
        Line(
            "rotated backward",
            3 * size + angles,
            partial(rotated_norm_backward, *heads.backward_arguments),
            partial(triton_qk_norm_rope.backward, *heads.backward_arguments),
        ),
    ]


def median(call: Callable[[], Any], flush: Tensor) -> float:
    """Microseconds on the device, the cache filled with something else before each call."""
    times = median_event_seconds(call, repeats=REPETITIONS, before=flush.zero_, sleep_cycles=AHEAD_CYCLES, wait=False)
    return 1e6 * times[0]


def short(by: Configuration) -> str:
    return f"{by.rows} rows {by.warps} warps {by.stages} stages {by.resident} resident"


def attempt(name: str, call: Callable[[], float]) -> float | None:
    try:
        return call()
    except Exception as error:
        print(f"    {name:44}{type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
        return None


def fits(width: int, by: Configuration) -> bool:
    """More numbers of a thread would not fit into its registers."""
    return width <= 48 * 32 * by.warps // by.rows


def bench_shape(shape: tuple[int, int], seconds: float) -> None:
    tensors = Tensors.random(shape)
    forwards, backwards = ([by for by in kind if fits(shape[1], by)] for kind in (FORWARD, BACKWARD))
    print(f"T {shape[0]}, D {shape[1]}")
    bench_lines(lines(tensors), choose(shape[1]), forwards, backwards, seconds)


def bench_rotated(shape: tuple[int, int, int], seconds: float) -> None:
    heads = Heads.random(shape)
    print(f"T {shape[0]}, H {shape[1]}, d {shape[2]}")
    bench_lines(rotated_lines(heads), ROTATED_CHOICE, ROTATED_FORWARD, ROTATED_BACKWARD, seconds)


def bench_lines(
    lines: list[Line], choice: Choice, forwards: list[Configuration], backwards: list[Configuration], seconds: float
) -> None:
    deadline = time.perf_counter() + seconds
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    best = {True: forwards, False: backwards}
    for line in lines:
        chosen = choice.forward if line.is_forward else choice.backward
        floor = 1e6 * line.num_bytes / BANDWIDTH
        print(f"  {line.name}: floor {floor:.0f} us", flush=True)
        times: dict[Configuration, float] = {}
        for by in dict.fromkeys([chosen, *best[line.is_forward]]):
            if by != chosen and time.perf_counter() > deadline:
                continue
            found = attempt(short(by), partial(median, partial(line.kernel, by=by), flush))
            if found is not None:
                times[by] = found
                mark = "  (chosen)" if by == chosen else ""
                print(f"    {short(by):44}{found:8.1f} us {floor / found:6.2f}{mark}", flush=True)
        best[line.is_forward] = sorted(times, key=lambda by: times[by])[:3]
        if chosen in times:
            print(f"    the host launches it in {1e6 * launch_seconds(partial(line.kernel, by=chosen)):.0f} us")
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
        [by for by in kind if fits(shape[1], by)] for kind in ([choice.forward, *FORWARD], [choice.backward, *BACKWARD])
    )
    check_configurations(
        "forward",
        lambda by: forward(tensors.a, tensors.b, tensors.weight, EPS, by)[:2],
        (norm(total, weight, EPS)[0], total),
        forwards,
    )
    check_configurations(
        "backward",
        lambda by: backward(tensors.dys, tensors.a, tensors.weight, tensors.rstd, tensors.b, by=by),
        norm_backward(dys, a, weight, rstd, b),
        backwards,
    )


def check_rotated(shape: tuple[int, int, int]) -> None:
    heads = Heads.random(shape)
    exact = heads.double()
    check_configurations(
        "rotated forward",
        lambda by: triton_qk_norm_rope.forward(*heads.forward_arguments, by=by)[:1],
        rotated_norm(*exact.forward_arguments)[:1],
        [ROTATED_CHOICE.forward, *ROTATED_FORWARD],
    )
    check_configurations(
        "rotated backward",
        lambda by: triton_qk_norm_rope.backward(*heads.backward_arguments, by=by),
        rotated_norm_backward(*exact.backward_arguments),
        [ROTATED_CHOICE.backward, *ROTATED_BACKWARD],
    )


def check_configurations(
    name: str,
    call: Callable[[Configuration], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    configurations: list[Configuration],
) -> None:
    """The largest relative distance from plain torch in float64, for every configuration."""

    def error(by: Configuration) -> float:
        pairs = zip(call(by), expected, strict=True)
        return max(float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs)

    for by in dict.fromkeys(configurations):
        worst = attempt(short(by), partial(error, by))
        if worst is not None:
            print(f"    {'right' if worst < 4e-3 else 'WRONG'} {worst:.1e}  {name}, {short(by)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; share of the floor in the last column")
    check((1001, 2560))
    check_rotated((1001, 8, 128))
    for shape, seconds in SHAPES.items():
        bench_shape(shape, seconds)
        torch.cuda.empty_cache()
    for rotated_shape, seconds in ROTATED_SHAPES.items():
        bench_rotated(rotated_shape, seconds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
