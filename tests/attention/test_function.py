"""The public functions: their contract on every backend, and every CUDA backend against the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from padfree.attention import varlen_attention, varlen_backward, varlen_forward
from padfree.segments import Segments
from tests.attention.cases import (
    FEWER_QUERIES,
    MASKS,
    MORE_QUERIES,
    ODD,
    Case,
    assert_same,
    cuda_backend,
    expected,
    leaked,
    make_inputs,
    run,
)

CUDA_BACKENDS = ("torch", "fa4", "flex")
CUDA_CASES = [
    *(Case(mask=mask, head_dim=128) for mask in MASKS),
    *(
        Case(mask=mask, queries=queries)
        for mask in ("causal", "full", "window")
        for queries in (FEWER_QUERIES, MORE_QUERIES)
    ),
    *(Case(head_dim=head_dim, heads=(4, 4)) for head_dim in (16, 40, 80, 96, 128, 192, 256)),
    Case(heads=(5, 1), head_dim=128, sinks=True),
    Case(queries=(1, 1, 0, 1), keys=(4, 1, 3, 9), heads=(4, 2)),
]
# A backend has different kernels per head size and group size; flex compiles one for each.
SHARED_KEYS = [Case(head_dim=head_dim) for head_dim in (96, 192, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *product([*CUDA_CASES, Case(head_dim=192, value_dim=128)], CUDA_BACKENDS),
        *product(SHARED_KEYS, [name for name in CUDA_BACKENDS if name != "flex"]),
    ],
    ids=str,
)
def test_cuda_backends_equal_the_reference(backend: str, case: Case) -> None:
    cuda_backend(backend, case, torch.bfloat16)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    got = run(case, inputs, backend)
    assert got["out"].dtype == got["dq"].dtype == torch.bfloat16
    assert_same(got, expected(case, inputs, torch.float32), atol=6e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(), Case(mask="softcap and window", head_dim=36), Case(sinks=True)], ids=str)
def test_flex_in_float32(case: Case) -> None:
    cuda_backend("flex", case, torch.float32)
    inputs = make_inputs(case, torch.float32, "cuda")
    assert_same(run(case, inputs, "flex"), expected(case, inputs, torch.float64), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("changed", [1, 4, 6])
def test_no_bit_of_a_segment_depends_on_another_on_cuda(backend: str, changed: int) -> None:
    case = Case(head_dim=128)
    cuda_backend(backend, case, torch.bfloat16)
    torch.use_deterministic_algorithms(
        True
    )  # sums by atomics differ from run to run, whatever the other segments contain
    try:
        assert leaked(backend, case, make_inputs(case, torch.bfloat16, "cuda"), changed) == []
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "backend", ["reference", "cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA_BACKENDS[:-1])]
)
@pytest.mark.parametrize("mask", ["causal", "full", "softcap"])
def test_raw_blocks_of_a_larger_softmax_add_up(backend: str, mask: str) -> None:
    """Keys in two blocks, merged by lse; then the backward of each with the merged out and lse: ring attention.

    The queries of a segment are aligned with its last keys, the second block; they see the first block entirely.
    """
    on_cuda = backend in CUDA_BACKENDS
    dtype, device = (torch.bfloat16, "cuda") if on_cuda else (torch.float32, "cpu")
    case = Case(mask=mask, queries=FEWER_QUERIES)
    if on_cuda:
        cuda_backend(backend, case, dtype)
    inputs = make_inputs(case, dtype, device)
    want = expected(case, inputs, torch.float32)
    earlier = [keys - queries for queries, keys in zip(FEWER_QUERIES, ODD, strict=True)]
    indices = _alternating(earlier, list(FEWER_QUERIES), inputs.q.device)
    arguments = {**case.arguments, "backend": backend}
    blocks = [
        (indices[0], Segments.from_lengths(earlier, device=device), {**arguments, "causal": False}),
        (indices[1], inputs.segments_q, arguments),
    ]
    parts = [
        varlen_forward(inputs.q, inputs.k[index], inputs.v[index], inputs.segments_q, segments, **options)
        for index, segments, options in blocks
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(torch.exp(part_lse - lse)[..., None] * part_out for part_out, part_lse in parts)
    got = {"out": out, "lse": lse, "dq": 0, "dk": torch.zeros_like(want["dk"]), "dv": torch.zeros_like(want["dv"])}
    for index, segments, options in blocks:
        dq, dk, dv = varlen_backward(
            inputs.dout, inputs.q, inputs.k[index], inputs.v[index], out, lse, inputs.segments_q, segments, **options
        )
        got["dq"] = got["dq"] + dq.float()
        got["dk"][index] += dk
        got["dv"][index] += dv
    tolerance = {"atol": 6e-2, "rtol": 2e-2} if on_cuda else {"atol": 1e-4, "rtol": 1e-4}
    assert_same(got, want, **tolerance)


def _alternating(earlier: list[int], later: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The token indices of the first and of the second part of each segment."""
    lengths = [length for pair in zip(earlier, later, strict=True) for length in pair]
    parts = torch.arange(sum(lengths), device=device).split(lengths)
    return torch.cat(parts[::2]), torch.cat(parts[1::2])


def test_auto_on_the_cpu_is_the_cpu_backend() -> None:
    case = Case(sinks=True)
    inputs = make_inputs(case, torch.float32)
    auto, named = run(case, inputs, "auto"), run(case, inputs, "cpu")
    assert all(torch.equal(auto[name], named[name]) for name in named)


def test_without_return_lse_only_the_output_comes_back() -> None:
    inputs = make_inputs(Case(), torch.float32)
    out = varlen_attention(inputs.q, inputs.k, inputs.v, inputs.segments_q, inputs.segments_k)
    assert isinstance(out, torch.Tensor)
    assert out.shape == inputs.q.shape


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens_at_all(lengths: list[int]) -> None:
    segments = Segments.from_lengths(lengths)
    q = torch.zeros(0, 4, 8, requires_grad=True)
    out, lse = varlen_attention(q, q, q, segments, segments, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape
    assert lse.shape == (0, 4)
    assert q.grad is not None


def test_queries_without_any_keys_at_all() -> None:
    q, k = torch.randn(3, 4, 8, requires_grad=True), torch.zeros(0, 2, 8, requires_grad=True)
    out, lse = varlen_attention(q, k, k, Segments.from_lengths([3, 0]), Segments.from_lengths([0, 0]), return_lse=True)
    out.sum().backward()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (q.grad == 0).all()


def test_gradients_only_for_inputs_that_require_them() -> None:
    inputs = make_inputs(Case(), torch.float32)
    q = inputs.q.requires_grad_()
    varlen_attention(q, inputs.k, inputs.v, inputs.segments_q, inputs.segments_k).sum().backward()
    assert q.grad is not None
    assert inputs.k.grad is None
    with torch.no_grad():
        assert not varlen_attention(q, inputs.k, inputs.v, inputs.segments_q, inputs.segments_k).requires_grad


def test_a_second_derivative_is_refused() -> None:
    inputs = make_inputs(Case(), torch.float32)
    q = inputs.q.requires_grad_()
    out = varlen_attention(q, inputs.k, inputs.v, inputs.segments_q, inputs.segments_k)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_activation_checkpointing_recomputes_the_same() -> None:
    case = Case(sinks=True)
    inputs = make_inputs(case, torch.float32)
    want = run(case, inputs, "auto")
    q, k, v, sinks = (tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v, inputs.sinks))

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return varlen_attention(*tensors[:3], inputs.segments_q, inputs.segments_k, sinks=tensors[3], **case.arguments)

    checkpoint(layer, q, k, v, sinks, use_reentrant=False).backward(inputs.dout)
    assert torch.equal(q.grad, want["dq"])
    assert torch.equal(sinks.grad, want["dsinks"])


def test_it_can_be_left_out_of_a_compiled_function() -> None:
    case = Case(mask="window")
    inputs = make_inputs(case, torch.float32)
    attention = torch.compiler.disable(varlen_attention)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(2 * q, k, v, inputs.segments_q, inputs.segments_k, **case.arguments)
        return 3 * out

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        out = function(*leaves)
        out.backward(inputs.dout)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 8, 4, 16)}, r"q, k, v: have shapes \(1, 8, 4, 16\)"),
        ({"k": torch.zeros(8, 2, 12)}, r"q, k, v: have shapes .*\(8, 2, 12\)"),
        ({"v": torch.zeros(8, 1, 16)}, "q, k, v: have shapes"),
        ({"q": torch.zeros(8, 3, 16)}, "have 3 query heads and 2 key heads"),
        ({"v": torch.zeros(8, 2, 16).double()}, "q, k, v: have different dtypes"),
        ({"segments_q": Segments.from_lengths([5, 2, 1])}, "3 and 2 segments"),
        ({"segments_k": Segments.from_lengths([5, 2])}, "segments_k: has 7 tokens, but its tensor has 8"),
        (
            {"segments_q": Segments.from_lengths([5, 3], device="meta")},
            "segments_q: is on meta, but q is on cpu; move it with .to",
        ),
        ({"sinks": torch.zeros(2)}, r"sinks: has shape \(2,\), but q has 4 heads"),
        ({"window": -1}, "window: -1"),
        ({"backend": "fa4"}, "'fa4' does not support this call"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    segments = Segments.from_lengths([5, 3])
    arguments = {
        "q": torch.zeros(8, 4, 16),
        "k": torch.zeros(8, 2, 16),
        "v": torch.zeros(8, 2, 16),
        "segments_q": segments,
        "segments_k": segments,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        varlen_attention(**arguments)
