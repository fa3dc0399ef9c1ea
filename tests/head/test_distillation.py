"""`distillation_loss`: the divergences and gradients of full logits, in chunks of tokens, by every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.head import DistillationLoss, distillation_loss, score
from tests.head.cases import imitate_cuda
from tests.interpreter import DEVICE, needs_kernels
from tests.refused import refused

KINDS = ["forward-kl", "reverse-kl", "jsd"]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap and scale": {"softcap": 3.0, "logit_scale": 0.7},
}


class Case:
    """Hidden states and heads of a student and a teacher for some tokens, a third of them without a label."""

    def __init__(
        self,
        num_rows: int = 13,
        vocabulary: int = 531,
        dtype: torch.dtype = torch.float64,
        *,
        widths: tuple[int, int] = (7, 11),
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows * vocabulary)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        self.hidden, self.teacher_hidden = (draw(num_rows, width) for width in widths)
        self.head, self.teacher_head = (
            LmHead(
                weight=2 * draw(vocabulary, width) / width**0.5,
                bias=draw(vocabulary) if bias else None,
                softcap=softcap,
                logit_scale=logit_scale,
            )
            for width in widths
        )
        self.labels = torch.randint(vocabulary, (num_rows,), generator=generator).to(device)
        self.labels[1::3] = -100
        self.weights = torch.rand(num_rows, generator=generator, dtype=torch.float64).to(device)

    def run(self, backend: str, **options: Any) -> dict[str, Tensor]:
        """The results, and the gradients of the student."""
        hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (self.hidden, self.head.weight))
        bias = None if self.head.bias is None else self.head.bias.clone().requires_grad_()
        found = distillation_loss(
            hidden,
            replace(self.head, weight=weight, bias=bias),
            self.teacher_hidden,
            self.teacher_head,
            self.labels,
            **{"weights": self.weights, "temperature": 1.3, "backend": backend, **options},
        )
        found.loss.backward()
        gradients = {"grad_hidden": hidden.grad, "grad_weight": weight.grad}
        if bias is not None:
            gradients["grad_bias"] = bias.grad
        return {**results_of(found), **gradients}


def results_of(found: DistillationLoss) -> dict[str, Tensor]:
    names = ("loss", "divergences", "logprobs", "teacher_logprobs")
    return {name: getattr(found, name).detach() for name in names}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1e-3, float(tensor.double().abs().max()))
        difference = float((actual[name].double() - tensor.to(actual[name].device).double()).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference:.1e} of {scale:.1e}"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("top_k", [None, 1, 5, 531])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_full_logits(kind: str, top_k: int | None, form: dict[str, Any]) -> None:
    case = Case(**form)
    options: dict[str, Any] = {"divergence": kind, "beta": 0.3, "top_k": top_k}
    expected = case.run("reference", **options)
    for memory in ("speed", 1000):
        assert_same(case.run("chunked", memory=memory, **options), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition(kind: str) -> None:
    """Written out with full logits, independently of the reference."""
    case = Case()
    labelled = case.labels != -100
    student = (case.hidden[labelled] @ case.head.weight.T / 1.3).softmax(1)
    teacher = (case.teacher_hidden[labelled] @ case.teacher_head.weight.T / 1.3).softmax(1)
    mixture = 0.3 * teacher + 0.7 * student
    expected = {
        "forward-kl": (teacher * (teacher / student).log()).sum(1),
        "reverse-kl": (student * (student / teacher).log()).sum(1),
        "jsd": (0.3 * teacher * (teacher / mixture).log() + 0.7 * student * (student / mixture).log()).sum(1),
    }[kind]
    found = case.run("chunked", divergence=kind, beta=0.3)
    torch.testing.assert_close(found["divergences"][labelled], expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["loss"], (case.weights[labelled] * expected).sum(), rtol=1e-12, atol=1e-13)
    assert not found["divergences"][~labelled].any()
    for name, hidden, head in (
        ("logprobs", case.hidden, case.head),
        ("teacher_logprobs", case.teacher_hidden, case.teacher_head),
    ):
        scored = score(hidden, head, case.labels, temperature=1.3).logprobs
        torch.testing.assert_close(found[name], scored, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_compares_the_k_and_the_rest(kind: str) -> None:
    """A vocabulary of four, by hand: .5 .3 | .1 .1 of the teacher and .4 .2 | .3 .1 of the student, k = 2."""
    teacher, student = (
        torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64),
        torch.tensor([[0.4, 0.2, 0.3, 0.1]], dtype=torch.float64),
    )
    eye = torch.eye(4, dtype=torch.float64)
    found = distillation_loss(
        student.log(), eye, teacher.log(), eye, torch.tensor([0]), divergence=kind, beta=0.25, top_k=2
    )
    t, s = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64)
    m = 0.25 * t + 0.75 * s
    expected = {
        "forward-kl": (t * (t / s).log()).sum(),
        "reverse-kl": (s * (s / t).log()).sum(),
        "jsd": (0.25 * t * (t / m).log() + 0.75 * s * (s / m).log()).sum(),
    }[kind]
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_like_its_teacher_has_no_loss(kind: str) -> None:
    case = Case(widths=(7, 7))
    case.teacher_hidden, case.teacher_head = case.hidden, case.head
    for top_k in (None, 3):
        found = case.run("chunked", divergence=kind, top_k=top_k)
        for name in ("loss", "divergences", "grad_hidden", "grad_weight"):
            assert float(found[name].abs().max()) < 1e-14, name


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    case = Case(5, 70)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return distillation_loss(
            hidden, weight, case.teacher_hidden, case.teacher_head, case.labels,
            divergence=kind, top_k=4, memory=2000, backend="chunked",
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(
        loss, [case.hidden.requires_grad_(), case.head.weight.clone().requires_grad_()], fast_mode=True
    )


def test_an_entry_that_does_not_exist_counts_for_nothing() -> None:
    """A bias of -inf in both models."""
    case = Case(bias=True)
    for head in (case.head, case.teacher_head):
        assert head.bias is not None
        head.bias[-3:] = -torch.inf
    for kind in KINDS:
        found = case.run("chunked", divergence=kind, memory=1000)
        for name, tensor in found.items():
            assert tensor.isfinite().all(), (kind, name)
        assert not found["grad_weight"][-3:].any()


@pytest.mark.parametrize("num_rows", [0, 2])
def test_no_labels_at_all(num_rows: int) -> None:
    case = Case(num_rows, 40)
    case.labels[:] = -100
    for backend in ("reference", "chunked"):
        for name, tensor in case.run(backend).items():
            assert not tensor.any(), (backend, name)


def test_without_gradients_and_twice() -> None:
    case = Case()
    arguments = (case.teacher_hidden, case.teacher_head, case.labels)
    hidden = case.hidden.clone().requires_grad_()
    found = distillation_loss(hidden, case.head, *arguments, backend="chunked", num_labels=9)
    with torch.no_grad():
        again = distillation_loss(hidden, case.head, *arguments, backend="chunked")
    assert_same(results_of(again), results_of(found), 0.0)
    (first,) = torch.autograd.grad(found.loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(found.loss, hidden)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="distillation_loss: backward was called a second time"):
        torch.autograd.grad(found.loss, hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_err_by_their_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA stores and multiplies, against float64 arithmetic on the same bfloat16 numbers."""
    case = Case(40, 1100, torch.bfloat16, widths=(24, 32))
    exact = Case(40, 1100, torch.bfloat16, widths=(24, 32))
    exact.hidden, exact.teacher_hidden = exact.hidden.double(), exact.teacher_hidden.double()
    exact.head, exact.teacher_head = (
        replace(head, weight=head.weight.double()) for head in (exact.head, exact.teacher_head)
    )
    for top_k in (None, 8):
        expected = exact.run("reference", divergence=kind, top_k=top_k)
        on_cpu = case.run("chunked", divergence=kind, top_k=top_k, memory=200_000)
        assert_same(on_cpu, expected, 1e-2)
        assert_same({"divergences": on_cpu["divergences"]}, {"divergences": expected["divergences"]}, 1e-5)
    imitate_cuda(monkeypatch)
    assert_same(case.run("chunked", divergence=kind, memory=200_000), exact.run("reference", divergence=kind), 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"divergence": "kl"}, "^divergence: 'kl'; give one of forward-kl, reverse-kl, jsd$"),
        ({"divergence": "jsd", "beta": 1.0}, "^beta: 1.0; give a number above 0 and below 1"),
        ({"top_k": 0}, "^top_k: 0; give 1 or more tokens"),
        ({"weights": torch.ones(3)}, r"^weights: has shape \(3,\) on cpu for 13 tokens"),
        ({"temperature": 0.0}, "^temperature: 0.0; give a number above 0"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case().run("chunked", **change)


def test_teachers_that_are_refused() -> None:
    case = Case()
    case.teacher_head = replace(case.teacher_head, weight=case.teacher_head.weight[:500])
    with pytest.raises(
        ValueError, match=r"^teacher weight: has a vocabulary of 500, but the student has 531; give a teacher"
    ):
        case.run("chunked")
    case.teacher_hidden = case.teacher_hidden[:4]
    with refused("teacher_hidden"):
        case.run("chunked")
    case.teacher_hidden = case.teacher_hidden.float()
    with refused("teacher_hidden"):
        case.run("chunked")


# Kernels


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_reference(kind: str) -> None:
    form = {"forward-kl": {}, "reverse-kl": {"bias": True}, "jsd": {"softcap": 3.0, "logit_scale": 0.7}}[kind]
    case = Case(5, 150, torch.float32, device=DEVICE, **form)
    for top_k in (None, 4):
        options: dict[str, Any] = {"divergence": kind, "top_k": top_k}
        assert_same(case.run("triton", memory=2000, **options), case.run("reference", **options), 1e-4)


@needs_kernels
@pytest.mark.parametrize("bias", [False, True], ids=["blocks of one size", "blocks of two sizes"])
def test_fused_matmuls_are_the_reference(bias: bool) -> None:
    """bfloat16: the matmuls of both models are fused. A bias makes the student's blocks smaller."""
    case = Case(6, 300, torch.bfloat16, widths=(16, 24), bias=True, device=DEVICE)
    case.teacher_head = replace(case.teacher_head, bias=None)
    if not bias:
        case.head = replace(case.head, bias=None)
    assert_same(case.run("triton", divergence="jsd"), case.run("reference", divergence="jsd"), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [None, 16])
def test_the_memory_limit_is_kept_and_the_host_does_not_synchronise(top_k: int | None) -> None:
    memory = 160 << 20
    case = Case(2048, 32_000, torch.bfloat16, widths=(512, 768), device="cuda")
    hidden, weight = case.hidden.requires_grad_(), case.head.weight.detach().requires_grad_()
    number = int((case.labels != -100).sum())
    held = 0
    for turn in range(2):  # the first call also compiles and allocates the workspace of cuBLAS
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            distillation_loss(
                hidden, weight, case.teacher_hidden, case.teacher_head, case.labels, num_labels=number, memory=memory,
                top_k=top_k,
            ).loss.backward()  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    # `kth_largest` stores float32 logits of a tile of tokens and the results of topk
    assert held <= memory + (8 << 20) + (0 if top_k is None else memory)
