"""Float8 linear layers on a GPU: the speed of a decoder layer, and of its matmuls and casts.

    section    what is measured
    check      casts compared bit by bit with plain torch; matmuls and a linear layer compared with a reference
    layers     forward and backward of one compiled decoder layer with the sizes of Qwen3-8B and Qwen3-4B, in bfloat16
               and in float8: 16,384 tokens in 16 samples; and the distance between the gradients
    matmuls    matmuls of the MLP of Qwen3-8B in bfloat16 and in float8 (`use_fast_accum` true and false)
    casts      bytes per second of the casts to float8, for several launch parameters

    PYTHONPATH=src python bench/float8.py
    PYTHONPATH=src python bench/float8.py --section layers

The time of a layer includes the casts, but not the optimizer. A cast must move at least 3 bytes per element, and 2 to
find the largest value of each column. The distance between two gradients is the norm of their difference divided by the
norm of the bfloat16 gradient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from gpu_only import cuda_device
from step_ways import fresh
from timer import median_event_seconds, median_seconds
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import padfree.layers.ops.float8_linear as reference
from padfree import attach
from padfree.choices import Float8Product
from padfree.cp import shard
from padfree.layers.compile import compile_layers
from padfree.layers.float8 import use_float8
from padfree.model.decoder_linears import decoder_linears
from padfree.model.structure import layers_of
from padfree.testing.models import row

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16},
}  # fmt: skip
TOKENS, SAMPLES = 16_384, 16
VOCABULARY = 1024
UNEVEN = 37  # a sample is longer or shorter than the mean by this number of tokens
ALL: tuple[Float8Product, ...] = ("output", "input-gradient", "weight-gradient")
PRODUCTS: dict[str, list[tuple[Float8Product, ...]]] = {"8b": [(), ALL, ALL[:2]], "4b": [(), ALL]}

MATMUL_ERROR = 4e-3  # largest accepted relative error of a token; rounding to bfloat16 gives about 2e-3
LINEAR_ERROR = 6e-3
AHEAD_CYCLES = 2_000_000  # lets the host run ahead of the device
SECTIONS = ("check", "layers", "matmuls", "casts")

operators = torch.ops.padfree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, help="run only this section")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, report = cuda_device()
    for section in [arguments.section] if arguments.section else SECTIONS:
        if section == "check":
            check(device)
        elif section == "layers":
            report["layers"] = {shape: layers(shape, device, products) for shape, products in PRODUCTS.items()}
        elif section == "matmuls":
            report["matmuls"] = matmuls(device)
        else:
            casts(device)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def spread(x: Tensor) -> Tensor:
    """Return x with rows of very different sizes, some of them with large columns."""
    generator = torch.Generator(x.device).manual_seed(1)
    exponents = torch.randint(-20, 4, (x.shape[0], 1), generator=generator, device=x.device)
    x = x.float() * torch.exp2(exponents.float())
    x[:, 1::7] *= 30
    return x.bfloat16()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return median_event_seconds(call, repeats=8, sleep_cycles=AHEAD_CYCLES, wait=False)[0]
    return median_seconds(call, device, repeats=1)


# Correctness


def check(device: torch.device) -> None:
    for shape in [(1000, 4096), (37, 96), (1, 16), (130, 20_480), (513, 12_288), (0, 64)]:
        check_casts(shape, device)
    print("casts: the same bits as in plain torch")
    worst = max(matmul_error(tokens, device) for tokens in (1, 5, 16, 77, 1000, 4096))
    assert worst < MATMUL_ERROR, worst
    print(f"matmuls: relative error of a token at most {worst:.1e} (rounding to bfloat16 gives about 2e-3)")
    for tokens in (77, 1000):
        for name, error in linear_errors(tokens, device).items():
            assert error < LINEAR_ERROR, (name, tokens, error)
            print(
                f"linear layer, {name} of {2 * tokens} tokens: relative distance from the CPU {error:.1e}", flush=True
            )


def check_casts(shape: tuple[int, int], device: torch.device) -> None:
    """Compare the casts with plain torch. If a row or column has NaN or infinity, its scale must be NaN."""
    x = spread(random(*shape, device=device))
    if shape[0] > 3:
        x[0] = 0
        x[1, 3], x[2, 5] = float("inf"), float("nan")
    largest = x.new_empty(0, dtype=torch.int32)
    for columns in (False, True):
        q, scale, largest = operators.float8_rows(x, columns)
        exact_q, exact_scale, exact_largest = reference.float8_rows(x, columns=columns)
        assert_same_cast(q, scale, exact_q, exact_scale)
        known = exact_largest >> 23 != 255
        assert torch.equal(largest >> 23 != 255, known), (shape, columns)
        assert torch.equal(largest[known], exact_largest[known]), (shape, columns)
    for given in (largest, largest[:0]):
        q, scale = operators.float8_columns(x, given)
        assert_same_cast(q, scale, *reference.float8_columns(x, given))


def assert_same_cast(q: Tensor, scale: Tensor, exact_q: Tensor, exact_scale: Tensor) -> None:
    finite = torch.isfinite(exact_scale[:, 0])
    assert torch.equal(torch.isfinite(scale[:, 0]), finite), q.shape
    assert torch.equal(scale[finite], exact_scale[finite]), q.shape
    assert torch.equal(q[finite].view(torch.uint8), exact_q[finite].view(torch.uint8)), q.shape


def matmul_error(tokens: int, device: torch.device) -> float:
    """Return the largest relative error of a token in a float8 matmul, with and without bias."""
    worst = 0.0
    a, b = (spread(random(rows, 1024, device=device, seed=rows)) for rows in (tokens, 1536))
    (a_q, a_scale, _), (b_q, b_scale, _) = operators.float8_rows(a, False), operators.float8_rows(b, False)
    for bias in (None, random(1536, device=device)):
        found = operators.float8_matmul(a_q, b_q, a_scale, b_scale, bias, torch.bfloat16)
        exact = reference.float8_matmul(a_q, b_q, a_scale, b_scale, bias, torch.float32)
        worst = max(worst, float(((found.float() - exact).norm(dim=1) / exact.norm(dim=1)).max()))
    return worst


def linear_errors(tokens: int, device: torch.device) -> dict[str, float]:
    """Return the relative distances of output and gradients of a float8 linear layer on the GPU from the CPU's."""
    x, weight, gradient = (
        random(2, tokens, 512, device=device),
        spread(random(768, 512, device=device, seed=2)),
        random(2, tokens, 768, device=device, seed=3),
    )
    results = []
    for place in (device, torch.device("cpu")):
        leaves = [each.to(place).detach().requires_grad_() for each in (x, weight)]
        y = operators.float8_linear(*leaves, None, True, True, True)
        y.backward(gradient.to(place))
        results.append([each.detach().cpu().float() for each in (y, *(leaf.grad for leaf in leaves))])
    names = ("output", "input gradient", "weight gradient")
    return {name: apart(found, exact) for name, found, exact in zip(names, *results, strict=True)}


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# Decoder layers


def layers(shape: str, device: torch.device, products: list[tuple[Float8Product, ...]]) -> list[dict[str, Any]]:
    """Measure a decoder layer with each of these sets of float8 products. The first set is empty: bfloat16."""
    rows: list[dict[str, Any]] = []
    exact: dict[str, Tensor] = {}
    for float8 in products:
        with fresh():
            found, gradients = layer(shape, device, float8)
        rows.append(found)
        line = (
            f"{shape} layer, {found['products']:42s} {found['seconds'] * 1e3:7.2f} ms  {found['TFLOP/s']:5.0f} TFLOP/s"
        )
        if exact:
            distances = {name: apart(gradients[name], exact[name]) for name in exact}
            whole = sum(float((gradients[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5
            found["distance"] = whole / sum(float(value.norm()) ** 2 for value in exact.values()) ** 0.5
            worst = max(distances, key=lambda name: distances[name])
            found["times as fast"] = rows[0]["seconds"] / found["seconds"]
            line += f"  {found['times as fast']:.2f} times as fast; distance of the gradient {found['distance']:.3f}"
            line += f", at most {distances[worst]:.3f} ({worst})"
        exact = exact or gradients
        print(line, flush=True)
    return rows


def layer(
    shape: str, device: torch.device, float8: tuple[Float8Product, ...], tokens: int = TOKENS
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the time of forward and backward, and the gradients of the layer's weights."""
    config = cast(Any, Qwen3Config)(**SHAPES[shape], num_hidden_layers=1, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    with device:
        model = cast(Any, Qwen3ForCausalLM)(config).to(torch.bfloat16)
    attach(model, "auto")
    linears = decoder_linears(model)
    if float8:
        for linear in linears.values():
            use_float8(linear, float8)
    compile_layers(layers_of(model), "inductor" if device.type == "cuda" else "eager")
    lengths = [tokens // SAMPLES + (UNEVEN if number % 2 else -UNEVEN) for number in range(SAMPLES)]
    inputs = shard(row(lengths, vocabulary=VOCABULARY).to(device)).model_inputs()
    gradient = random(1, tokens, config.hidden_size, device=device) * 1e-4

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.model(**inputs).last_hidden_state.backward(gradient)

    step()
    gradients = {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and ".layers." in name
    }
    seconds = seconds_of(step, device)
    weights = sum(linear.weight.numel() for linear in linears.values())
    attention = 6 * sum(length**2 for length in lengths) * config.num_attention_heads * config.head_dim
    work = 6 * tokens * weights + attention
    name = ", ".join(float8) or "bfloat16"
    return {"products": name, "seconds": seconds, "TFLOP/s": work / seconds / 1e12}, gradients


# Matmuls and casts alone


def matmuls(device: torch.device, tokens: int = TOKENS, shape: str = "8b") -> dict[str, dict[str, float]]:
    width, inner = SHAPES[shape]["hidden_size"], SHAPES[shape]["intermediate_size"]
    found = {}
    for name, (m, k, n) in {
        "output, gate": (tokens, width, inner),
        "input gradient, gate": (tokens, inner, width),
        "weight gradient, gate": (inner, tokens, width),
        "weight gradient, down": (width, tokens, inner),
    }.items():
        found[name] = rates = matmul_rates(m, k, n, device)
        print(f"{name:24s} " + "  ".join(f"{way} {rate:5.0f} TFLOP/s" for way, rate in rates.items()), flush=True)
    return found


def matmul_rates(m: int, k: int, n: int, device: torch.device) -> dict[str, float]:
    """Return the TFLOP/s of [m, k] times the transpose of [n, k], in bfloat16 and in float8."""
    a, b = random(m, k, device=device), random(n, k, device=device, seed=1)
    (a_q, a_scale, _), (b_q, b_scale, _) = operators.float8_rows(a, False), operators.float8_rows(b, False)
    scaled: Any = torch._scaled_mm
    run = partial(scaled, a_q, b_q.T, scale_a=a_scale, scale_b=b_scale.T, out_dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {
        "bfloat16": lambda: a @ b.T,
        "float8, fast": partial(run, use_fast_accum=True),
        "float8, not fast": partial(run, use_fast_accum=False),
    }
    return {name: 2e-12 * m * n * k / seconds_of(call, device) for name, call in ways.items()}


def casts(device: torch.device) -> None:
    from padfree.layers.ops import triton_float8 as kernels  # needs triton

    launches = ((8, 4, 1), (8, 4, 2), (16, 2, 1), (16, 2, 2), (8, 2, 3), (16, 2, 3), (4, 6, 2))
    tiles = ((128, 64, 4), (128, 64, 8), (64, 64, 4), (128, 128, 8), (256, 32, 4), (128, 32, 4), (64, 64, 2))
    for width in (SHAPES["8b"]["hidden_size"], SHAPES["8b"]["intermediate_size"]):
        x = random(TOKENS, width, device=device)
        largest = kernels.rows(x, columns=True)[2]

        def rate(bytes_per_element: int, call: Callable[[], object], elements: int = x.numel()) -> str:
            return f"{bytes_per_element * elements / seconds_of(call, device) / 1e12:.2f} TB/s"

        print(f"casts of [{TOKENS}, {width}]: rows {rate(3, partial(kernels.rows, x, columns=False))}")
        print(f"  largest of each column {rate(2, partial(kernels._largest, x))}", flush=True)
        for launch in launches:
            by = kernels.RowsLaunch(*launch)
            speed = rate(3, partial(kernels.rows, x, columns=True, configuration=by))
            print(f"  rows with the largest of each column {speed}  {by}", flush=True)
        for sizes in tiles:
            tile = kernels.CastTile(*sizes)
            print(f"  columns {rate(3, partial(kernels.columns, x, largest, tile))}  {tile}", flush=True)


if __name__ == "__main__":
    main()
