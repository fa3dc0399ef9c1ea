"""`fused_loss`: the loss and gradients of the reference, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.head import fused_loss, score
from tests.head.cases import assert_same
from tests.refused import refused

BACKENDS = [
    pytest.param("chunked", "cpu", id="chunked-cpu"),
    pytest.param("chunked", "cuda", id="chunked-cuda", marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", id="triton-cuda", marks=pytest.mark.gpu),
]
TOLERANCES = [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 2e-2, 2e-2)]
SHAPES = [(1, 64, 3), (3, 47, 31), (31, 123, 47), (47, 31, 1023), (123, 3, 4100)]  # N, D, V
MEMORIES = ["speed", 200_000, 20_000, 2_000]


def make_inputs(num_rows: int, width: int, vocabulary: int, dtype: torch.dtype, ignored: float = 0.3) -> list[Tensor]:
    """hidden, weight, bias, labels, advantages."""
    generator = torch.Generator().manual_seed(num_rows * vocabulary + width)
    labels = torch.randint(vocabulary, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < ignored] = -100
    return [
        torch.randn(num_rows, width, generator=generator).to(dtype),
        (2 * torch.randn(vocabulary, width, generator=generator) / width**0.5).to(dtype),
        torch.randn(vocabulary, generator=generator).to(dtype),
        labels,
        torch.randn(num_rows, generator=generator),
    ]


def policy_loss(advantages: Tensor) -> Any:
    """A clipped ratio with an entropy bonus: neither linear nor the same for any two tokens."""

    def token_loss(logprobs: Tensor, entropy: Tensor | None, positions: Tensor) -> Tensor:
        here = advantages.to(logprobs)[positions]
        ratio = (logprobs + 3.0 + here).exp()
        loss = -torch.minimum(ratio * here, ratio.clamp(0.8, 1.3) * here)
        if entropy is not None:
            loss = loss - 0.1 * entropy.square()
        return loss

    return token_loss


def run(inputs: list[Tensor], backend: str, *, scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
    hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs[:3])
    labels, advantages = inputs[3:]
    fused = fused_loss(hidden, weight, labels, policy_loss(advantages), bias=bias, backend=backend, **options)
    assert not fused.logprobs.requires_grad
    (scale * fused.loss).backward()
    results = {
        "loss": fused.loss,
        "logprobs": fused.logprobs,
        "grad_hidden": hidden.grad,
        "grad_weight": weight.grad,
        "grad_bias": bias.grad,
    }
    if fused.entropy is not None:
        results["entropy"] = fused.entropy
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
def test_every_backend_is_the_reference(
    backend: str, device: str, dtype: torch.dtype, atol: float, rtol: float, shape: tuple[int, int, int], entropy: bool
) -> None:
    inputs = make_inputs(*shape, dtype)
    options: dict[str, Any] = {"entropy": entropy, "temperature": 1.3, "softcap": 6.0}
    expected = run(inputs, "reference", **options)
    on_device = [tensor.to(device) for tensor in inputs]
    for memory in MEMORIES if shape[0] < 100 else ["speed", 200_000]:
        assert_same(run(on_device, backend, memory=memory, **options), expected, atol, rtol)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_it_is_score_and_a_loss(backend: str, device: str) -> None:
    inputs = [tensor.to(device) for tensor in make_inputs(40, 24, 700, torch.float32)]
    actual = run(inputs, backend, memory=50_000)
    hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs[:3])
    positions = (inputs[3] != -100).nonzero()[:, 0]
    scores = score(hidden, weight, inputs[3], bias=bias, backend=backend)
    loss = policy_loss(inputs[4])(scores.logprobs[positions], None, positions)
    loss.sum().backward()
    torch.testing.assert_close(actual["loss"], loss.sum().detach().cpu())
    torch.testing.assert_close(actual["grad_hidden"], hidden.grad.cpu(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual["grad_weight"], weight.grad.cpu(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("memory", ["speed", 4000], ids=["one chunk", "chunks"])
def test_gradcheck(backend: str, memory: Any) -> None:
    hidden, weight, bias, labels, advantages = make_inputs(5, 7, 150, torch.float64, ignored=0.0)
    labels[2] = -100

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused_loss(
            hidden,
            weight,
            labels,
            lambda logprobs, entropy, positions: (logprobs * advantages.double()[positions]).exp() + entropy.square(),
            bias=bias,
            temperature=0.7,
            softcap=4.0,
            entropy=True,
            memory=memory,
            backend=backend,
        ).loss

    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize(("backend", "device"), [*BACKENDS, pytest.param("reference", "cpu", id="reference")])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_no_labels_at_all(backend: str, device: str, num_rows: int) -> None:
    """The results are zeros, and backward still runs."""
    inputs = [tensor.to(device) for tensor in make_inputs(num_rows, 8, 20, torch.float32, ignored=1.1)]
    results = run(inputs, backend, entropy=True)
    assert results["loss"].shape == ()
    assert results["logprobs"].shape == results["entropy"].shape == (num_rows,)
    assert results["grad_hidden"].shape == (num_rows, 8)
    assert results["grad_weight"].shape == (20, 8)
    for name, tensor in results.items():
        assert not tensor.any(), name


def test_tokens_without_a_label_get_exactly_zero() -> None:
    inputs = make_inputs(31, 8, 50, torch.float32)
    ignored = inputs[3] == -100
    assert ignored.any()
    inputs[0][ignored] = float("nan")
    results = run(inputs, "chunked", entropy=True, memory=3000)
    for name in ("logprobs", "entropy", "grad_hidden"):
        assert not results[name][ignored].any(), name
        assert results[name].isfinite().all(), name


def test_the_upstream_gradient_scales() -> None:
    inputs = make_inputs(12, 8, 50, torch.float32)
    one, two = run(inputs, "chunked"), run(inputs, "chunked", scale=-0.5)
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        assert torch.equal(two[name], -0.5 * one[name]), name


def test_backward_twice() -> None:
    hidden, weight, _, labels, _ = make_inputs(6, 8, 50, torch.float32)
    hidden.requires_grad_()
    loss = fused_loss(hidden, weight, labels, lambda logprobs, entropy, positions: -logprobs, backend="chunked").loss
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, hidden)


def test_without_gradients() -> None:
    inputs = make_inputs(12, 8, 50, torch.float32)
    expected = run(inputs, "chunked", entropy=True)
    hidden, weight, bias, labels, advantages = inputs
    with torch.no_grad():
        fused = fused_loss(hidden, weight, labels, policy_loss(advantages), bias=bias, entropy=True)
    assert not fused.loss.requires_grad
    torch.testing.assert_close(fused.loss, expected["loss"])
    assert torch.equal(fused.logprobs, expected["logprobs"])


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_a_single_gradient(wanted: str) -> None:
    inputs = make_inputs(31, 24, 200, torch.bfloat16)
    expected = run(inputs, "chunked", memory=20_000)
    tensors = dict(zip(("hidden", "weight", "bias"), inputs[:3], strict=True))
    tensors[wanted].requires_grad_()
    fused = fused_loss(
        tensors["hidden"],
        tensors["weight"],
        inputs[3],
        policy_loss(inputs[4]),
        bias=tensors["bias"],
        memory=20_000,
        backend="chunked",
    )
    fused.loss.backward()
    torch.testing.assert_close(tensors[wanted].grad, expected[f"grad_{wanted}"], atol=2e-2, rtol=2e-2)


def test_a_loss_that_ignores_the_entropy() -> None:
    hidden, weight, _, labels, _ = make_inputs(12, 8, 50, torch.float32)
    gradients = []
    for entropy in (False, True):
        weight = weight.detach().requires_grad_()
        fused = fused_loss(hidden, weight, labels, lambda logprobs, entropy, positions: -logprobs, entropy=entropy)
        gradients += torch.autograd.grad(fused.loss, weight)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_gradient_is_not_copied() -> None:
    """`.grad` is the memory that the forward pass filled: there is no second [V, D] tensor."""
    hidden, weight, _, labels, _ = make_inputs(6, 8, 50, torch.float32)
    weight.requires_grad_()
    fused = fused_loss(hidden, weight, labels, lambda logprobs, entropy, positions: -logprobs, backend="chunked")
    place = fused.loss.grad_fn.gradients[1].data_ptr()
    fused.loss.backward()
    assert weight.grad.data_ptr() == place


@pytest.mark.parametrize(
    ("token_loss", "message"),
    [
        (
            lambda logprobs, entropy, positions: logprobs.sum(),
            r"token_loss: returned a tensor of shape \(\) for 6 tokens",
        ),
        (
            lambda logprobs, entropy, positions: (logprobs, {"n": logprobs[:2]}),
            "token_loss: returned a tuple; return a tensor",
        ),
        (lambda logprobs, entropy, positions: logprobs.detach(), "token_loss: returned a tensor without gradient"),
    ],
)
def test_losses_that_are_refused(token_loss: Any, message: str) -> None:
    hidden, weight, _, labels, _ = make_inputs(6, 8, 50, torch.float32, ignored=0.0)
    with pytest.raises(ValueError, match=message):
        fused_loss(hidden.requires_grad_(), weight, labels, token_loss)


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    inputs = [tensor.to("cuda") for tensor in make_inputs(300, 64, 1000, torch.bfloat16)]
    number = int((inputs[3] != -100).sum())
    run(inputs, "triton", entropy=True, num_labels=number, memory=300_000)  # compiles
    hidden, weight = (tensor.requires_grad_() for tensor in inputs[:2])
    loss = policy_loss(inputs[4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_loss(
            hidden, weight, inputs[3], loss, entropy=True, num_labels=number, memory=300_000, backend="triton"
        ).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [48 << 20, 96 << 20, 512 << 20])
def test_the_memory_limit_is_kept(memory: int) -> None:
    """In addition to the returned gradients, with a small allowance for the scores."""
    inputs = [tensor.to("cuda") for tensor in make_inputs(2048, 512, 32_000, torch.bfloat16, ignored=0.0)]
    hidden, weight = (tensor.requires_grad_() for tensor in inputs[:2])
    for _ in range(2):  # the first call also allocates the workspace of cuBLAS
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused_loss(hidden, weight, inputs[3], policy_loss(inputs[4]), entropy=True, memory=memory).loss.backward()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    assert held <= memory + (8 << 20)


def test_a_whole_head_is_its_parts() -> None:
    hidden, weight, bias, labels, advantages = make_inputs(12, 8, 50, torch.float32)
    head = LmHead(weight=weight, bias=bias, softcap=3.0, logit_scale=0.5)
    parts = {"bias": bias, "softcap": 3.0, "logit_scale": 0.5}
    for backend in ("chunked", "reference"):
        loss = policy_loss(advantages)
        whole = fused_loss(hidden, head, labels, loss, backend=backend)
        assert torch.equal(whole.loss, fused_loss(hidden, weight, labels, loss, **parts, backend=backend).loss)
        logprobs = score(hidden, weight, labels, **parts, backend=backend).logprobs
        assert torch.equal(score(hidden, head, labels, backend=backend).logprobs, logprobs)
    for name, value in parts.items():
        with refused(name):
            score(hidden, head, labels, **{name: value})


def test_a_loss_that_returns_more_than_losses_is_refused() -> None:
    hidden, weight, _, labels, _ = make_inputs(12, 8, 50, torch.float32)
    with refused("token_loss"):
        fused_loss(hidden, weight, labels, lambda logprobs, entropy, positions: (-logprobs, {}))
