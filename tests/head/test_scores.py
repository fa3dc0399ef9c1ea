"""`score`: every backend against the reference, forward and backward, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.head import score
from tests.head.cases import assert_same
from tests.refused import refused

BACKENDS = [
    pytest.param("chunked", "cpu", id="chunked-cpu"),
    pytest.param("chunked", "cuda", id="chunked-cuda", marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", id="triton-cuda", marks=pytest.mark.gpu),
]
# The reference does not round in float32. In bfloat16 both round the gradients once, and may differ in the last bit.
TOLERANCES = [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 2e-2, 2e-2)]
SHAPES = [(1, 64, 3), (3, 47, 31), (31, 123, 47), (47, 31, 1023), (123, 3, 4100)]  # N, D, V


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None

    def to(self, device: str) -> Case:
        bias = None if self.bias is None else self.bias.to(device)
        return Case(self.hidden.to(device), self.weight.to(device), self.labels.to(device), bias)


def make_case(
    num_rows: int, width: int, vocabulary: int, dtype: torch.dtype, *, bias: bool = False, ignored: float = 0.3
) -> Case:
    generator = torch.Generator().manual_seed(num_rows * vocabulary + width)
    labels = torch.randint(vocabulary, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < ignored] = -100
    return Case(
        torch.randn(num_rows, width, generator=generator).to(dtype),
        (2 * torch.randn(vocabulary, width, generator=generator) / width**0.5).to(dtype),
        labels,
        torch.randn(vocabulary, generator=generator).to(dtype) if bias else None,
    )


def run(case: Case, backend: str, **options: Any) -> dict[str, Tensor]:
    """Scores and gradients, with a different upstream gradient for every token and both scores."""
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    bias = None if case.bias is None else case.bias.clone().requires_grad_()
    scores = score(hidden, weight, case.labels, bias=bias, backend=backend, **options)
    results = {"logprobs": scores.logprobs}
    pull = torch.linspace(-1, 2, len(case.labels), dtype=scores.logprobs.dtype, device=hidden.device)
    loss = (scores.logprobs * pull).sum()
    if scores.entropy is not None:
        results["entropy"] = scores.entropy
        loss = loss + (scores.entropy * pull.flip(0).square()).sum()
    loss.backward()
    results |= {"grad_hidden": hidden.grad, "grad_weight": weight.grad}
    if bias is not None:
        results["grad_bias"] = bias.grad
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
def test_every_backend_is_the_reference(
    backend: str, device: str, dtype: torch.dtype, atol: float, rtol: float, shape: tuple[int, int, int], entropy: bool
) -> None:
    case = make_case(*shape, dtype)
    expected = run(case, "reference", entropy=entropy)
    assert expected["logprobs"].dtype == torch.float32
    for memory in ("low", 3000):
        actual = run(case.to(device), backend, entropy=entropy, memory=memory)
        assert_same(actual, expected, atol, rtol)
        assert_same({"logprobs": actual["logprobs"]}, {"logprobs": expected["logprobs"]}, 2e-5, 2e-5)


OPTIONS = {
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 3.0},
    "logit_scale": {"logit_scale": 0.25},
    "all": {"temperature": 1.7, "softcap": 2.0, "logit_scale": 0.5},
}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_form_of_the_logits(backend: str, device: str, bias: bool, options: dict[str, float]) -> None:
    case = make_case(31, 47, 123, torch.float32, bias=bias)
    expected = run(case, "reference", entropy=True, **options)
    logits = case.hidden @ case.weight.T + (0 if case.bias is None else case.bias)
    logits = logits * options.get("logit_scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log_p = (logits / options.get("temperature", 1.0)).log_softmax(1)
    labelled = case.labels >= 0
    plain = log_p[labelled].gather(1, case.labels[labelled, None])[:, 0]
    torch.testing.assert_close(expected["logprobs"][labelled], plain, atol=1e-4, rtol=1e-4)
    plain_entropy = -(log_p.exp() * log_p).sum(1)[labelled]
    torch.testing.assert_close(expected["entropy"][labelled], plain_entropy, atol=1e-4, rtol=1e-4)
    assert_same(run(case.to(device), backend, entropy=True, memory=2000, **options), expected, 2e-5, 2e-5)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_temperature_per_token(backend: str, device: str) -> None:
    case = make_case(31, 47, 123, torch.float32)
    temperature = torch.linspace(0.5, 2.0, 31)
    expected = run(case, "reference", entropy=True, temperature=temperature)
    for token in (0, 30):
        alone = replace(case, hidden=case.hidden[token : token + 1], labels=torch.tensor([5]))
        one = score(alone.hidden, alone.weight, alone.labels, temperature=float(temperature[token]), entropy=True)
        with_label = case.labels.clone()
        with_label[token] = 5
        scores = score(case.hidden, case.weight, with_label, temperature=temperature, entropy=True)
        torch.testing.assert_close(scores.logprobs[token], one.logprobs[0])
        torch.testing.assert_close(scores.entropy[token], one.entropy[0])
    actual = run(case.to(device), backend, entropy=True, temperature=temperature.to(device))
    assert_same(actual, expected, 2e-5, 2e-5)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("memory", ["low", 4000], ids=["one piece", "pieces"])
def test_gradcheck(backend: str, memory: Any) -> None:
    case = make_case(5, 7, 150, torch.float64, bias=True, ignored=0.0)
    labels = case.labels.clone()
    labels[2] = -100
    inputs = [tensor.clone().requires_grad_() for tensor in (case.hidden, case.weight[:, :7], case.bias)]

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = score(
            hidden,
            weight,
            labels,
            bias=bias,
            temperature=0.7,
            softcap=4.0,
            entropy=True,
            memory=memory,
            backend=backend,
        )
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(both, inputs, fast_mode=True)


@pytest.mark.parametrize(("backend", "device"), [*BACKENDS, pytest.param("reference", "cpu", id="reference")])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_tokens_without_a_label(backend: str, device: str, num_rows: int) -> None:
    """They score exactly 0 and get exactly zero gradient; with no other tokens, backward still runs."""
    case = make_case(num_rows, 8, 20, torch.float32, bias=True, ignored=1.1).to(device)
    results = run(case, backend, entropy=True)
    assert results["logprobs"].shape == results["entropy"].shape == (num_rows,)
    assert results["grad_weight"].shape == (20, 8)
    for tensor in results.values():
        assert not tensor.any()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_tokens_without_a_label_are_not_read(backend: str, device: str) -> None:
    case = make_case(20, 8, 50, torch.float32, ignored=0.5)
    ignored = case.labels == -100
    assert ignored.any()
    assert not ignored.all()
    expected = run(case, "reference", entropy=True)
    case.hidden[ignored] = float("nan")
    actual = run(case.to(device), backend, entropy=True)
    assert_same(actual, expected, 2e-5, 2e-5)
    assert not actual["grad_hidden"][ignored].any()
    assert not actual["logprobs"][ignored].any()


@pytest.mark.parametrize(("backend", "device"), [*BACKENDS, pytest.param("reference", "cpu", id="reference")])
@pytest.mark.parametrize("size", [1e4, 3e4])
def test_large_logits_stay_finite(backend: str, device: str, size: float) -> None:
    weight = torch.tensor([[1.0], [-1.0], [0.9999], [0.5]])
    case = Case(torch.tensor([[size], [-size], [size]]), weight, torch.tensor([0, 0, 2])).to(device)
    results = run(case, backend, entropy=True)
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    # Token 0: a gap of size/10000 between the first and third entry; token 1: of 2·size between the first and second.
    gap = torch.tensor(size / 1e4)
    first = -torch.log1p((-gap).exp())
    torch.testing.assert_close(results["logprobs"], torch.stack([first, torch.tensor(-2 * size), first - gap]))


@pytest.mark.parametrize(("backend", "device"), [*BACKENDS, pytest.param("reference", "cpu", id="reference")])
def test_a_bias_of_minus_infinity_removes_an_entry(backend: str, device: str) -> None:
    case = make_case(9, 16, 200, torch.float32, bias=True, ignored=0.0)
    labels = case.labels % 150
    case.bias[150:] = float("-inf")
    shorter = run(Case(case.hidden, case.weight[:150], labels, case.bias[:150]), "reference", entropy=True)
    longer = run(replace(case, labels=labels).to(device), backend, entropy=True, memory=3000)
    for name in ("logprobs", "entropy", "grad_hidden"):
        torch.testing.assert_close(longer[name], shorter[name], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(longer["grad_weight"][:150], shorter["grad_weight"], atol=2e-5, rtol=2e-5)
    assert not longer["grad_weight"][150:].any()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_nan_is_not_hidden(backend: str, device: str) -> None:
    case = make_case(6, 8, 300, torch.float32, ignored=0.0)
    case.hidden[3, 2] = float("nan")
    logprobs = run(case.to(device), backend, entropy=True)["logprobs"]
    assert logprobs.isnan().tolist() == [False, False, False, True, False, False]


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    case = make_case(6, 8, 30, torch.float32, bias=True)
    hidden, weight, bias = case.hidden.requires_grad_(), case.weight, case.bias
    scores = score(hidden, weight, case.labels, bias=bias, entropy=True)
    (gradient,) = torch.autograd.grad(scores.entropy.sum(), hidden, retain_graph=True)
    assert gradient.any()
    (again,) = torch.autograd.grad(scores.entropy.sum(), hidden)
    assert torch.equal(gradient, again)
    with torch.no_grad():
        assert not score(hidden, weight, case.labels).logprobs.requires_grad


def test_the_number_of_labels_from_the_host() -> None:
    case = make_case(20, 8, 50, torch.float32)
    number = int((case.labels != -100).sum())
    assert 0 < number < 20
    assert_same(run(case, "chunked", num_labels=number), run(case, "chunked"), 0.0, 0.0)
    labelled = replace(case, labels=case.labels.clamp(min=0))
    assert_same(run(labelled, "chunked", num_labels=20), run(labelled, "reference"), 2e-5, 2e-5)
    with refused("num_labels"):
        run(case, "chunked", num_labels=number + 1)


@pytest.mark.gpu
def test_what_cuda_cannot_refuse_is_nan() -> None:
    case = make_case(20, 8, 50, torch.float32).to("cuda")
    number = int((case.labels != -100).sum())
    for wrong in (0, number - 1, number + 1, 20):
        with torch.no_grad():
            scores = score(case.hidden, case.weight, case.labels, num_labels=wrong, backend="triton")
        assert scores.logprobs.isnan().all()
    labels = case.labels.clamp(min=0)
    labels[4] = 50
    logprobs = run(replace(case, labels=labels), "triton")["logprobs"]
    assert logprobs.isnan().nonzero().tolist() == [[4]]


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    case = make_case(300, 64, 1000, torch.bfloat16).to("cuda")
    number = int((case.labels != -100).sum())
    run(case, "triton", entropy=True, num_labels=number)  # compiles
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = score(hidden, weight, case.labels, entropy=True, num_labels=number, backend="triton")
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast_changes_nothing() -> None:
    case = make_case(9, 16, 40, torch.bfloat16)
    expected = run(case, "chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        scores = score(hidden, weight, case.labels, backend="chunked")
        pull = torch.linspace(-1, 2, len(case.labels))
        (scores.logprobs * pull).sum().backward()
    assert torch.equal(scores.logprobs, expected["logprobs"])
    assert torch.equal(weight.grad, expected["grad_weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": torch.zeros(4, 5)},
            r"hidden, weight: have shapes \(4, 5\) and \(10, 8\); give hidden \[N, D\] and weight \[V, D\]",
        ),
        (
            {"hidden": torch.zeros(4, 8, dtype=torch.float16)},
            "hidden: torch.float16 is not supported; give bfloat16, float32",
        ),
        ({"weight": torch.zeros(10, 8).bfloat16()}, "weight: is torch.bfloat16, but hidden is torch.float32"),
        (
            {"labels": torch.zeros(5, dtype=torch.int64)},
            r"labels: is torch.int64 of shape \(5,\), but there are 4 tokens",
        ),
        ({"labels": torch.zeros(4)}, "labels: is torch.float32"),
        (
            {"labels": torch.tensor([1, -100, 10, 2])},
            "labels: 10 at token 2 is outside the vocabulary; give labels from 0 to 9",
        ),
        ({"labels": torch.tensor([1, -1, 3, 2])}, "labels: -1 at token 1 is outside the vocabulary"),
        ({"bias": torch.zeros(9)}, r"bias: has shape \(9,\), but the vocabulary has 10 entries"),
        ({"softcap": 0.0}, "softcap: 0.0; give a number above 0"),
        ({"temperature": 0.0}, "temperature: 0.0; give a number above 0"),
        ({"temperature": torch.ones(3)}, r"temperature: has shape \(3,\)"),
        ({"temperature": torch.tensor([1.0, 1.0, -1.0, 1.0])}, "temperature: is -1.0 for a token"),
        ({"temperature": torch.ones(4, requires_grad=True)}, "requires_grad=True"),
        ({"memory": "large"}, "memory: 'large' is not a known choice; give 'speed'"),
        ({"memory": 0}, "memory: 0; give 'speed'"),
        ({"backend": "fast"}, "backend: 'fast' is unknown; give 'auto'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(10, 8),
        "labels": torch.tensor([1, -100, 9, 2]),
    }
    with pytest.raises(ValueError, match=message):
        score(**(arguments | changes))
