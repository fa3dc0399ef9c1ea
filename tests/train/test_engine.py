"""A step does not depend on the division of its samples, and a non-finite step does not change the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.distributed import Mesh, make_mesh
from padfree.losses import SFTSettings
from padfree.sample import Sample
from padfree.train.engine import LossSettings
from padfree.train.finite_checks import NonFiniteError
from padfree.train.step import StepReport
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LOSSES, LR, make_engine, make_samples, small_model, two_steps, weights_of

ODD = (5, 9, 4, 13, 7)
BATCHES: dict[str, tuple[int, ...]] = {"eight": (5, 9, 4, 12, 7, 6, 3, 8), "odd": ODD, "one sample": (4,)}
RUNS = [(loss, "eight") for loss in LOSSES] + [("gspo", "odd"), ("clip", "one sample")]
FEW_RUNS = [("sft", "eight"), ("gspo", "odd"), ("clip", "one sample")]

Outcome = tuple[list[StepReport], dict[str, Tensor]]


def outcomes(mesh: Mesh, runs: list[tuple[str, str]], **changes: Any) -> dict[tuple[str, str], Outcome]:
    return {
        (loss, batch): two_steps(make_engine(mesh, LOSSES[loss], **changes), make_samples(BATCHES[batch]))
        for loss, batch in runs
    }


@pytest.fixture(scope="module")
def reference(mesh: Mesh) -> dict[tuple[str, str], Outcome]:
    """Everything in one pack on one process."""
    return outcomes(mesh, RUNS, max_tokens=1000)


def ranks(rank: int, world: int, layouts: list[dict[str, int]]) -> tuple[list[Any], Any]:
    """Every loss on two context ranks; a few on other layouts (`test_layout_invariance` covers all of them)."""
    found = [
        outcomes(make_mesh("cpu", **layout), RUNS if (world, layout) == (2, {"context": 2}) else FEW_RUNS)
        for layout in layouts
    ]
    return found if rank == 0 else [], poisoned(make_mesh("cpu"), clean_samples())


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 5e-5) -> None:
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=tolerance)
        assert mine.gradient_norm == pytest.approx(other.gradient_norm, rel=tolerance)
        assert mine.statistics == pytest.approx(other.statistics, rel=tolerance, abs=tolerance)
        assert (mine.num_labels, mine.num_tokens) == (other.num_labels, other.num_tokens)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, atol=tolerance, rtol=0)


def test_the_cases_can_fail(reference: dict[tuple[str, str], Outcome]) -> None:
    for (loss, batch), (reports, weights) in reference.items():
        if batch == "eight":
            assert all(report.gradient_norm > 1e-3 for report in reports), (loss, batch)
        assert any((weight - weights_of(small_model())[name]).abs().max() > 1e-3 for name, weight in weights.items())
    assert len({reports[0].loss for reports, _ in reference.values()}) == len(reference)


def test_micro_batches_do_not_show(mesh: Mesh, reference: dict[tuple[str, str], Outcome]) -> None:
    for case, found in outcomes(mesh, RUNS).items():
        assert_same(found, reference[case])
        assert found[0][0].plan.num_micro_batches > 1 or case[1] == "one sample"


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"context": 1}, {"context": 2}, {"replicate": 2}]),
        (4, [{"context": 2}]),
    ],
)
def test_ranks_do_not_show(
    world: int, layouts: list[dict[str, int]], reference: dict[tuple[str, str], Outcome]
) -> None:
    results = run_ranks(world, ranks, layouts)
    for by_case in results[0][0]:
        for case, outcome in by_case.items():
            assert_same(outcome, reference[case])
    message, uids, untouched = results[0][1]
    assert all(result[1] == results[0][1] for result in results), "every rank raises the same error for a NaN"
    assert uids == ["s0-3"]
    assert untouched
    assert message.startswith("step 7: the loss is nan on rank")


def test_the_loss_is_that_of_single_samples(mesh: Mesh) -> None:
    """Against plain transformers code, one sample at a time, with torch's AdamW."""
    samples = make_samples()
    engine = make_engine(mesh, LossSettings(loss=SFTSettings(), max_grad_norm=0.5))
    report = engine.step(samples)

    plain = small_model()
    count = sum(sample.num_labels for sample in samples)
    total = 0.0
    for sample in samples:
        logits = plain(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, :-1]
        scores = logits.log_softmax(-1)[torch.arange(len(sample) - 1), torch.from_numpy(sample.tokens[1:])]
        loss = -(scores * torch.from_numpy(sample.mask[1:])).sum() / count
        loss.backward()
        total += loss.item()
    assert report.loss == pytest.approx(total, rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-2).step()
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(engine.model)[name], weight, atol=1e-5, rtol=0)


def test_report(mesh: Mesh) -> None:
    samples = make_samples(ODD)
    report = make_engine(mesh, LOSSES["sft"]).step(samples, lr_factor=0.0)
    assert report.num_samples == 5
    assert report.num_tokens == sum(ODD)
    assert report.num_labels == sum(sample.num_labels for sample in samples)
    assert report.padding_share == 0.0
    assert report.statistics == {"nll": pytest.approx(report.loss, rel=1e-5)}


def test_nothing_to_train_on_is_a_loss_of_zero(mesh: Mesh) -> None:
    samples = [Sample(tokens=np.arange(4), loss_mask=np.zeros(4))]
    report = make_engine(mesh, LOSSES["sft"]).step(samples)
    assert (report.loss, report.gradient_norm, report.num_labels) == (0.0, 0.0, 0)


def test_no_token_at_all_is_refused(mesh: Mesh) -> None:
    with refused("samples"):
        make_engine(mesh, LOSSES["sft"]).step([Sample(tokens=[])])


def poisoned(mesh: Mesh, samples: list[Sample]) -> tuple[str, list[str], bool]:
    """Token 39 makes every score NaN: the error, its samples, and whether the weights are unchanged."""
    model = small_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[39] = float("nan")
    engine = make_engine(mesh, LOSSES["sft"], model)
    before = weights_of(engine.model)
    with pytest.raises(NonFiniteError) as caught:
        engine.step(samples, step=7)
    after = weights_of(engine.model)
    same = all(torch.equal(after[name].nan_to_num(), weight.nan_to_num()) for name, weight in before.items())
    return str(caught.value), [str(sample.uid) for sample in caught.value.samples], same


def clean_samples() -> list[Sample]:
    """Samples in which only s0-3 has token 39."""
    samples = []
    for index, sample in enumerate(make_samples()):
        tokens = np.minimum(sample.tokens, 38)
        if index == 3:
            tokens[2] = 39
        samples.append(Sample(tokens=tokens, loss_mask=sample.mask, uid=sample.uid))
    return samples


def test_nan_stops_before_the_update_and_names_the_sample(mesh: Mesh) -> None:
    message, uids, same = poisoned(mesh, clean_samples())
    assert uids == ["s0-3"]
    assert same
    assert message.startswith("step 7: the loss is nan on rank 0 before the update; inspect sample s0-3")


def test_an_infinite_gradient_of_a_finite_loss_stops_too(mesh: Mesh) -> None:
    engine = make_engine(mesh, LOSSES["sft"])
    engine.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    before = weights_of(engine.model)
    with pytest.raises(NonFiniteError, match=r"gradient norm is nan .* with a finite loss .*\(s0-0, s0-1"):
        engine.step(make_samples())
    for name, weight in weights_of(engine.model).items():
        assert torch.equal(weight, before[name])


def test_a_ratio_needs_old_logprobs(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="old_logprobs: is missing"):
        make_engine(mesh, LOSSES["clip"]).step(make_samples())
