"""Log-probabilities and their gradients: padfree, full logits, Liger and cut-cross-entropy.

    PYTHONPATH=src python bench/head.py --device cuda --json head.json

Times are relative to a floor, the time of three matmuls for N labelled tokens: the logits, and the gradients of hidden
states and weight. Columns:

    ms, × floor     the median, and its ratio to the floor
    GiB             the peak of allocated memory, minus the inputs and the returned gradients
    errors          relative distance ‖x − exact‖ / ‖exact‖ of log-probabilities and gradients from float64, for fewer
                    tokens and a proportionally smaller memory budget, so that chunks are as in the timed run

The run fails if padfree's error exceeds that of full logits, or if padfree exceeds its memory budget.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timer import median_on
from torch import Tensor

from padfree.head import fused_loss, score
from padfree.head.budget import BUDGETS

# (N, D, V), dtype, tokens of the error check, repetitions
SIZES: dict[str, tuple[list[tuple[int, int, int]], torch.dtype, int, int]] = {
    "cuda": ([(8192, 2048, 151_936), (16_384, 4096, 151_936)], torch.bfloat16, 1024, 7),
    "cpu": ([(256, 128, 8192), (512, 256, 8192)], torch.float32, 128, 3),
}
ENTROPY_WEIGHT = 0.1
LOGIT_DEVIATION = 3.0

Loss = tuple[Tensor, Tensor | None]
"""The loss to differentiate, and log-probabilities [N] if the method has them."""


@dataclass(frozen=True, kw_only=True)
class Method:
    name: str
    run: Callable[[Tensor, Tensor, Tensor, float], Loss]  # hidden, weight, labels, fraction of the memory budget
    entropy: bool = False
    budget: int | None = None  # bytes; only padfree's methods have one


@dataclass(kw_only=True)
class Result:
    shape: tuple[int, int, int]
    name: str
    milliseconds: float | None = None
    times_floor: float | None = None
    gibibytes: float | None = None
    error_logprobs: float | None = None
    error_grad_hidden: float | None = None
    error_grad_weight: float | None = None
    note: str = ""


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor, share: float, *, entropy: bool) -> Loss:
    """Compute full logits and a float32 log-softmax, as an ordinary model does."""
    log_p = (hidden @ weight.T).float().log_softmax(1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    if not entropy:
        return -logprobs.sum(), logprobs
    return -logprobs.sum() + ENTROPY_WEIGHT * (log_p.exp() * log_p).sum(), logprobs


def our_score(hidden: Tensor, weight: Tensor, labels: Tensor, share: float, *, entropy: bool) -> Loss:
    scores = score(hidden, weight, labels, entropy=entropy, num_labels=len(labels), memory=int(BUDGETS["low"] * share))
    loss = -scores.logprobs.sum()
    if scores.entropy is not None:
        loss = loss - ENTROPY_WEIGHT * scores.entropy.sum()
    return loss, scores.logprobs


def our_fused(hidden: Tensor, weight: Tensor, labels: Tensor, share: float, *, entropy: bool, memory: str) -> Loss:
    def token_loss(logprobs: Tensor, entropies: Tensor | None, rows: Tensor) -> Tensor:
        return -logprobs if entropies is None else -logprobs - ENTROPY_WEIGHT * entropies

    fused = fused_loss(
        hidden,
        weight,
        labels,
        token_loss,
        entropy=entropy,
        num_labels=len(labels),
        memory=int(BUDGETS[memory] * share),
    )
    return fused.loss, fused.logprobs


def methods() -> list[Method]:
    ways: list[tuple[str, Callable[..., Loss], int | None]] = [
        ("full logits", full_logits, None),
        ("score", our_score, BUDGETS["low"]),
        ("fused_loss speed", partial(our_fused, memory="speed"), BUDGETS["speed"]),
        ("fused_loss low", partial(our_fused, memory="low"), BUDGETS["low"]),
    ]
    return [
        Method(
            name=f"{name}, entropy" if entropy else name,
            run=partial(way, entropy=entropy),
            entropy=entropy,
            budget=budget,
        )
        for name, way, budget in ways
        for entropy in (False, True)
    ]


def other_methods() -> tuple[list[Method], list[str]]:
    """Return the methods of other libraries, and the names of the libraries that are not installed."""
    listed, missing = [], []
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        listed.append(Method(name="Liger, summed loss", run=lambda h, w, y, s: (liger(w, h, y), None)))
    else:
        missing.append("Liger, summed loss")
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        def cut(filter_eps: str | None) -> Callable[[Tensor, Tensor, Tensor, float], Loss]:
            def run(hidden: Tensor, weight: Tensor, labels: Tensor, share: float) -> Loss:
                losses = linear_cross_entropy(hidden, weight, labels, reduction="none", filter_eps=filter_eps)
                return losses.sum(), -losses

            return run

        listed.append(Method(name="cut-cross-entropy", run=cut("high")))
        listed.append(Method(name="cut-cross-entropy, unfiltered", run=cut(None)))
    else:
        missing.append("cut-cross-entropy")
    return listed, missing


class Clock:
    """Measures the milliseconds of a call, and its peak memory."""

    def __init__(self, device: torch.device, repetitions: int) -> None:
        self.device = device
        self.repetitions = repetitions

    def median(self, call: Callable[[], None]) -> float:
        return 1e3 * median_on(call, self.device, repeats=self.repetitions)

    def peak_bytes(self, call: Callable[[], None]) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator, device=device)
    weight = torch.randn(vocabulary, width, generator=generator, device=device) * (LOGIT_DEVIATION / width**0.5)
    labels = torch.randint(vocabulary, (num_rows,), generator=generator, device=device)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def train(method: Method, hidden: Tensor, weight: Tensor, labels: Tensor, share: float = 1.0) -> Tensor | None:
    """Run forward and backward. Leave the gradients in .grad, and return the log-probabilities."""
    hidden.grad = weight.grad = None
    loss, logprobs = method.run(hidden, weight, labels, share)
    loss.backward()  # type: ignore[no-untyped-call]
    return None if logprobs is None else logprobs.detach()


def time_floor(clock: Clock, hidden: Tensor, weight: Tensor) -> float:
    """Return the milliseconds of the three matmuls, with values as large as in training."""
    with torch.no_grad():
        logits = hidden @ weight.T
        gradient = logits * (1e-3 / LOGIT_DEVIATION)
        outs = torch.empty_like(hidden), torch.empty_like(weight)

        def products() -> None:
            torch.mm(hidden, weight.T, out=logits)
            torch.mm(gradient, weight, out=outs[0])
            torch.mm(gradient.T, hidden, out=outs[1])

        return clock.median(products)


@dataclass(frozen=True, kw_only=True)
class Exact:
    logprobs: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def exact_results(hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: bool) -> Exact:
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    scores = score(hidden, weight, labels, entropy=entropy, backend="reference")
    loss = -scores.logprobs.sum()
    if scores.entropy is not None:
        loss = loss - ENTROPY_WEIGHT * scores.entropy.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return Exact(logprobs=scores.logprobs.detach(), grad_hidden=hidden.grad, grad_weight=weight.grad)


def distance(actual: Tensor | None, exact: Tensor) -> float:
    assert actual is not None
    return float((actual.double() - exact).norm() / exact.norm())


def measure_errors(
    chosen: list[Method], results: dict[str, Result], inputs: tuple[Tensor, Tensor, Tensor], num_rows: int
) -> None:
    share = num_rows / len(inputs[0])
    hidden, weight, labels = inputs[0][:num_rows].detach().requires_grad_(), inputs[1], inputs[2][:num_rows]
    for entropy in (False, True):
        exact = exact_results(hidden, weight, labels, entropy=entropy)
        for method in chosen:
            result = results[method.name]
            if method.entropy != entropy or result.note:
                continue
            logprobs = train(method, hidden, weight, labels, share)
            if logprobs is not None:
                result.error_logprobs = distance(logprobs, exact.logprobs)
            result.error_grad_hidden = distance(hidden.grad, exact.grad_hidden)
            result.error_grad_weight = distance(weight.grad, exact.grad_weight)
            hidden.grad = weight.grad = None
        del exact


def check_promises(chosen: list[Method], results: dict[str, Result], dtype: torch.dtype) -> None:
    """Check padfree's memory budget, and that its errors do not exceed those of full logits."""
    slack = 1.02 if dtype == torch.bfloat16 else 2.0
    for method in chosen:
        if method.budget is None:
            continue
        held = results[method.name].gibibytes
        assert held is None or held <= method.budget / (1 << 30), f"{method.name}: {held:.2f} GiB"
        ours, full = results[method.name], results["full logits, entropy" if method.entropy else "full logits"]
        for field in ("error_logprobs", "error_grad_hidden", "error_grad_weight"):
            error, limit = getattr(ours, field), getattr(full, field)
            if limit is not None:
                assert error <= slack * limit, f"{method.name}: {field} {error:.2e}, full logits {limit:.2e}"


def bench_shape(shape: tuple[int, int, int], device: torch.device) -> list[Result]:
    _, dtype, check_rows, repetitions = SIZES[device.type]
    clock = Clock(device, repetitions)
    inputs = make_inputs(shape, dtype, device)
    hidden, weight, labels = inputs
    others, missing = other_methods() if device.type == "cuda" else ([], [])
    chosen = [*methods(), *others]
    results = {method.name: Result(shape=shape, name=method.name) for method in chosen}
    floor = time_floor(clock, hidden, weight)
    returned = sum(tensor.numel() * tensor.element_size() for tensor in (hidden, weight))

    for method in chosen:
        result = results[method.name]

        def call(method: Method = method) -> None:
            train(method, hidden, weight, labels)

        try:
            result.milliseconds = clock.median(call)
            hidden.grad = weight.grad = None
            peak = clock.peak_bytes(call)
        except Exception as error:
            if method.budget is not None:
                raise
            result.note = f"failed: {type(error).__name__}"  # an error of another library, or out of memory
            continue
        finally:
            hidden.grad = weight.grad = None
        result.times_floor = result.milliseconds / floor
        result.gibibytes = None if peak is None else (peak - returned) / (1 << 30)
    floor = statistics.mean([floor, time_floor(clock, hidden, weight)])
    for result in results.values():
        if result.milliseconds is not None:
            result.times_floor = result.milliseconds / floor

    measure_errors(chosen, results, inputs, check_rows)
    check_promises(chosen, results, dtype)
    rows = [Result(shape=shape, name="floor: three matmuls", milliseconds=floor, times_floor=1.0), *results.values()]
    rows += [Result(shape=shape, name=name, note="not installed") for name in missing]
    return rows + time_extras(clock, shape, inputs, floor, results)


def time_extras(
    clock: Clock,
    shape: tuple[int, int, int],
    inputs: tuple[Tensor, Tensor, Tensor],
    floor: float,
    results: dict[str, Result],
) -> list[Result]:
    """Time the loss with only half of the tokens labelled, and scores without gradients."""
    hidden, weight, labels = inputs
    half = labels.masked_fill(torch.arange(len(labels), device=labels.device) % 2 == 1, -100)
    number = int((half != -100).sum())

    def sparse_fused() -> None:
        hidden.grad = weight.grad = None
        loss = fused_loss(hidden, weight, half, lambda logprobs, *_: -logprobs, num_labels=number).loss
        loss.backward()  # type: ignore[no-untyped-call]

    def sparse_score() -> None:
        hidden.grad = weight.grad = None
        score(hidden, weight, half, num_labels=number).logprobs.sum().backward()  # type: ignore[no-untyped-call]

    def forward() -> None:
        with torch.no_grad():
            score(hidden, weight, labels, entropy=True, num_labels=len(labels))

    rows = []
    for name, call, whole in (
        ("fused_loss speed, half the labels", sparse_fused, "fused_loss speed"),
        ("score, half the labels", sparse_score, "score"),
        ("score, entropy, no gradient", forward, None),
    ):
        milliseconds = clock.median(call)
        note = ""
        if whole is not None:
            all_labels = results[whole].milliseconds
            assert all_labels is not None
            note = f"{milliseconds / all_labels:.2f} of the time with all labels"
        rows.append(
            Result(shape=shape, name=name, milliseconds=milliseconds, times_floor=milliseconds / floor, note=note)
        )
    hidden.grad = weight.grad = None
    return rows


def describe(device: torch.device) -> dict[str, str]:
    names = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    found = {name: importlib.metadata.version(name) for name in names if _is_installed(name)}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"python": platform.python_version(), **found, "hardware": hardware}


def _is_installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


def print_table(results: list[Result]) -> None:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print(f"{'':36}{'ms':>10}{'× floor':>9}{'GiB':>8}{'logprob':>10}{'d hidden':>10}{'d weight':>10}")
    shape = None
    for result in results:
        if result.shape != shape:
            shape = result.shape
            print("N {} D {} V {}".format(*shape))
        errors = (result.error_logprobs, result.error_grad_hidden, result.error_grad_weight)
        cells = [
            f"{number(result.milliseconds, '.1f'):>10}",
            f"{number(result.times_floor, '.3f'):>9}",
            f"{number(result.gibibytes, '.2f'):>8}",
            *(f"{number(error, '.1e'):>10}" for error in errors),
        ]
        print(f"  {result.name:34}{''.join(cells)}  {result.note}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    environment = describe(device)
    print("  ".join(f"{name} {value}" for name, value in environment.items()))
    results: list[Result] = []
    for shape in SIZES[device.type][0]:
        results += bench_shape(shape, device)
    print_table(results)
    if arguments.json:
        report: dict[str, Any] = {"environment": environment, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
