"""The distillation loss: padfree, full logits, and Liger's fused JSD, relative to a floor.

    PYTHONPATH=src python bench/distill.py --device cuda --json distill.json

The floor is the time of the four matmuls for N labelled tokens: the logits of both models, and the gradients of the
student's hidden states and weight. Columns:

    ms, × floor     the median, and its ratio to the floor
    GiB             the peak of allocated memory, minus the inputs and the returned gradients
    errors          relative distance ‖x − exact‖ / ‖exact‖ of the gradients from float64, for fewer tokens

The run fails if padfree's error exceeds that of full logits, or if padfree exceeds its memory budget.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from timer import median_on
from torch import Tensor

from padfree.head import distillation_loss

Kind = Literal["forward-kl", "reverse-kl", "jsd"]
KINDS: tuple[Kind, ...] = ("forward-kl", "reverse-kl", "jsd")
BETA = 0.5
BUDGET = 2 << 30  # bytes, without the returned gradients
LOGIT_DEVIATION = 3.0

# (N, D, E, V), dtype, tokens of the error check, repetitions
SIZES: dict[str, tuple[tuple[int, int, int, int], torch.dtype, int, int]] = {
    "cuda": ((8192, 2048, 4096, 151_936), torch.bfloat16, 512, 7),
    "cpu": ((256, 64, 128, 8192), torch.float32, 64, 3),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    teacher_hidden: Tensor  # [N, E]
    teacher_weight: Tensor  # [V, E]
    labels: Tensor  # [N]

    @staticmethod
    def make(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
        num_rows, width, teacher_width, vocabulary = shape
        generator = torch.Generator(device).manual_seed(0)

        def draw(rows: int, columns: int, deviation: float) -> Tensor:
            return (deviation * torch.randn(rows, columns, generator=generator, device=device)).to(dtype)

        return Inputs(
            hidden=draw(num_rows, width, 1.0).requires_grad_(),
            weight=draw(vocabulary, width, LOGIT_DEVIATION / width**0.5).requires_grad_(),
            teacher_hidden=draw(num_rows, teacher_width, 1.0),
            teacher_weight=draw(vocabulary, teacher_width, LOGIT_DEVIATION / teacher_width**0.5),
            labels=torch.randint(vocabulary, (num_rows,), generator=generator, device=device),
        )

    def first(self, num_rows: int, dtype: torch.dtype) -> Inputs:
        """Return the inputs with only the first `num_rows` tokens, in `dtype`."""
        return Inputs(
            hidden=self.hidden[:num_rows].detach().to(dtype, copy=True).requires_grad_(),
            weight=self.weight.detach().to(dtype, copy=True).requires_grad_(),
            teacher_hidden=self.teacher_hidden[:num_rows].to(dtype),
            teacher_weight=self.teacher_weight.to(dtype),
            labels=self.labels[:num_rows],
        )

    def forget_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


Loss = Callable[[Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    name: str
    kind: Kind
    loss: Loss
    ours: bool = False
    exact: bool = True  # whether the loss equals the loss from full logits


@dataclass(kw_only=True)
class Result:
    name: str
    milliseconds: float | None = None
    times_floor: float | None = None
    gibibytes: float | None = None
    error_grad_hidden: float | None = None
    error_grad_weight: float | None = None
    note: str = ""


def full_logits(inputs: Inputs, *, kind: Kind) -> Tensor:
    """Compute the loss from the full logits of both models, as an ordinary training loop does."""
    wide = torch.float64 if inputs.hidden.dtype == torch.float64 else torch.float32
    student = (inputs.hidden @ inputs.weight.T).to(wide).log_softmax(1)
    with torch.no_grad():
        teacher = (inputs.teacher_hidden @ inputs.teacher_weight.T).to(wide).log_softmax(1)
    if kind == "forward-kl":
        return torch.nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)
    if kind == "reverse-kl":
        return torch.nn.functional.kl_div(teacher, student, reduction="sum", log_target=True)
    mixture = (BETA * teacher.exp() + (1 - BETA) * student.exp()).log()
    of_teacher, of_student = (
        torch.nn.functional.kl_div(mixture, one, reduction="sum", log_target=True) for one in (teacher, student)
    )
    return BETA * of_teacher + (1 - BETA) * of_student


def ours(inputs: Inputs, *, kind: Kind, top_k: int | None = None) -> Tensor:
    return distillation_loss(
        inputs.hidden,
        inputs.weight,
        inputs.teacher_hidden,
        inputs.teacher_weight,
        inputs.labels,
        divergence=kind,
        beta=BETA,
        top_k=top_k,
        num_labels=len(inputs.labels),
        memory=BUDGET,
    ).loss


def liger_methods() -> list[Method]:
    """Return Liger's fused linear JSD, if it is installed. Its mean over tokens is multiplied by N to get the sum."""
    if not importlib.util.find_spec("liger_kernel"):
        return []
    from liger_kernel.transformers import LigerFusedLinearJSD

    def run(inputs: Inputs, *, kind: Kind) -> Tensor:
        beta = {"forward-kl": 0.0, "reverse-kl": 1.0, "jsd": BETA}[kind]
        module = LigerFusedLinearJSD(jsd_beta=beta)
        loss: Tensor = module(inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, None)
        return loss * len(inputs.hidden)

    return [Method(name=f"Liger fused JSD, {kind}", kind=kind, loss=partial(run, kind=kind)) for kind in KINDS]


def methods() -> list[Method]:
    listed = []
    for kind in KINDS:
        listed.append(Method(name=f"full logits, {kind}", kind=kind, loss=partial(full_logits, kind=kind)))
        listed.append(Method(name=f"distillation_loss, {kind}", kind=kind, loss=partial(ours, kind=kind), ours=True))
    top = partial(ours, kind="forward-kl", top_k=64)
    listed.append(
        Method(name="distillation_loss, forward-kl, top 64", kind="forward-kl", loss=top, ours=True, exact=False)
    )
    return listed


def time_floor(inputs: Inputs, device: torch.device, repetitions: int) -> float:
    """Return the milliseconds of the four matmuls, with values as large as in training."""
    with torch.no_grad():
        logits = inputs.hidden @ inputs.weight.T
        taught = torch.empty_like(logits)
        gradient = logits * (1e-3 / LOGIT_DEVIATION)
        outs = torch.empty_like(inputs.hidden), torch.empty_like(inputs.weight)

        def matmuls() -> None:
            torch.mm(inputs.hidden, inputs.weight.T, out=logits)
            torch.mm(inputs.teacher_hidden, inputs.teacher_weight.T, out=taught)
            torch.mm(gradient, inputs.weight, out=outs[0])
            torch.mm(gradient.T, inputs.hidden, out=outs[1])

        return 1e3 * median_on(matmuls, device, repeats=repetitions)


def peak_bytes(call: Callable[[], None], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def train(method: Method, inputs: Inputs) -> None:
    inputs.forget_gradients()
    method.loss(inputs).backward()  # type: ignore[no-untyped-call]


def measure_errors(chosen: list[Method], results: dict[str, Result], inputs: Inputs, num_rows: int) -> None:
    exact, few = inputs.first(num_rows, torch.float64), inputs.first(num_rows, inputs.hidden.dtype)
    for method in chosen:
        result = results[method.name]
        if result.note or not method.exact:
            continue
        exact.forget_gradients()
        full_logits(exact, kind=method.kind).backward()  # type: ignore[no-untyped-call]
        train(method, few)
        result.error_grad_hidden = distance(few.hidden.grad, exact.hidden.grad)
        result.error_grad_weight = distance(few.weight.grad, exact.weight.grad)


def distance(actual: Tensor | None, exact: Tensor | None) -> float:
    assert actual is not None
    assert exact is not None
    return float((actual.double() - exact).norm() / exact.norm())


def check_promises(chosen: list[Method], results: dict[str, Result], dtype: torch.dtype) -> None:
    slack = 1.02 if dtype == torch.bfloat16 else 2.0
    for method in chosen:
        result, full = results[method.name], results[f"full logits, {method.kind}"]
        if not method.ours:
            continue
        held = result.gibibytes
        assert not method.exact or held is None or held <= BUDGET / 2**30, f"{method.name}: {held:.2f} GiB"
        for field in ("error_grad_hidden", "error_grad_weight"):
            error, limit = getattr(result, field), getattr(full, field)
            if error is not None and limit is not None:
                assert error <= slack * limit, f"{method.name}: {field} {error:.2e}, full logits {limit:.2e}"


def bench(device: torch.device) -> list[Result]:
    shape, dtype, check_rows, repetitions = SIZES[device.type]
    inputs = Inputs.make(shape, dtype, device)
    chosen = [*methods(), *(liger_methods() if device.type == "cuda" else [])]
    results = {method.name: Result(name=method.name) for method in chosen}
    floor = time_floor(inputs, device, repetitions)
    returned = sum(tensor.numel() * tensor.element_size() for tensor in (inputs.hidden, inputs.weight))
    for method in chosen:
        result = results[method.name]

        def call(method: Method = method) -> None:
            train(method, inputs)

        try:
            milliseconds = 1e3 * median_on(call, device, repeats=repetitions)
            inputs.forget_gradients()
            peak = peak_bytes(call, device)
        except Exception as error:
            if method.ours:
                raise
            result.note = f"failed: {type(error).__name__}"  # an error of another library, or out of memory
            continue
        finally:
            inputs.forget_gradients()
        result.milliseconds, result.times_floor = milliseconds, milliseconds / floor
        result.gibibytes = None if peak is None else (peak - returned) / 2**30
    measure_errors(chosen, results, inputs, check_rows)
    check_promises(chosen, results, dtype)
    rows = [Result(name="floor: four matmuls", milliseconds=floor, times_floor=1.0), *results.values()]
    if device.type == "cuda" and not liger_methods():
        rows.append(Result(name="Liger fused JSD", note="not installed"))
    return rows


def describe(device: torch.device) -> dict[str, str]:
    names = [name for name in ("torch", "triton", "liger-kernel") if any(importlib.metadata.distributions(name=name))]
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return {**{name: importlib.metadata.version(name) for name in names}, "hardware": hardware}


def print_table(results: list[Result]) -> None:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print(f"{'':40}{'ms':>10}{'× floor':>9}{'GiB':>8}{'d hidden':>10}{'d weight':>10}")
    for result in results:
        cells = [
            f"{number(result.milliseconds, '.1f'):>10}",
            f"{number(result.times_floor, '.3f'):>9}",
            f"{number(result.gibibytes, '.2f'):>8}",
            f"{number(result.error_grad_hidden, '.1e'):>10}",
            f"{number(result.error_grad_weight, '.1e'):>10}",
        ]
        print(f"{result.name:40}{''.join(cells)}  {result.note}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    environment = describe(device)
    print("  ".join(f"{name} {value}" for name, value in environment.items()))
    print("N {} D {} E {} V {}".format(*SIZES[device.type][0]))
    results = bench(device)
    print_table(results)
    if arguments.json:
        report: dict[str, Any] = {"environment": environment, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
