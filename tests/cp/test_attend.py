"""Every method on real process groups of 2 and 4 ranks: parity with one process, no leaks, and the bytes they send.

Starting processes takes most of the time, so each group runs all its cases once, and the tests check the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from padfree.batch import AttnContext
from padfree.cp import attend, communication_bytes, gather_tokens, make_layout
from padfree.distributed import PeerLostError
from padfree.segments import Segments
from tests.cp.cases import KINDS, ROWS, Inputs, context_of, inputs_for, one_process, packed, relative_error
from tests.ranks import run_ranks
from tests.refused import refused

METHODS = ("allgather", "ring", "ulysses")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "one key head": {"key_heads": 1},
    "other value size": {"value_dim": 6},
    "soft cap": {"softcap": 3.0},
    "window": {"window": 5},
    "wide window": {"window": 64},
    "full": {"causal": False},
}


def computed(inputs: Inputs, context: AttnContext) -> list[Tensor]:
    """This rank's tokens of the output and of the gradients of q, k and v, and its part of that of the sinks."""
    own = context.plan.own
    q, k, v = (t[own].requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    out = attend(q, k, v, context, sinks=sinks, **inputs.options)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    return [out.detach(), *torch.autograd.grad((out * inputs.dout[own]).sum(), leaves)]


def worst_error(inputs: Inputs, expected: list[Tensor], context: AttnContext, group: Any) -> float:
    got = computed(inputs, context)
    if inputs.sinks is not None:
        dist.all_reduce(got[-1], group=group)
    own = context.plan.own
    want = [t[own] for t in expected[:4]] + expected[4:]
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def parity(rank: int, world: int, group: Any) -> dict[Any, float]:
    errors = {}
    for name in ROWS:
        batch = packed(ROWS[name], world)
        inputs = inputs_for(batch.num_tokens).to(torch.float64)
        expected = one_process(inputs, batch.segments)
        for method, kind in product(METHODS, KINDS):
            context = context_of(batch, world, rank, group, kind=kind, method=method)
            errors[method, kind, name] = worst_error(inputs, expected, context, group)
    batch = packed(ROWS["over three ranks"], world)
    for option in OPTIONS:
        inputs = inputs_for(batch.num_tokens, **OPTIONS[option]).to(torch.float64)
        expected = one_process(inputs, batch.segments)
        for method in METHODS:
            if (method, option) == ("ring", "window"):
                continue
            context = context_of(batch, world, rank, group, method=method)
            errors[method, "balanced", option] = worst_error(inputs, expected, context, group)
    return errors


def repeated(rank: int, world: int, group: Any) -> dict[str, bool]:
    """Whether gradients are bit-identical in a second run, and under activation checkpointing."""
    batch = packed(ROWS["head and tail on a rank"], world)
    inputs = inputs_for(batch.num_tokens)
    same = {}
    for method in METHODS:
        context = context_of(batch, world, rank, group, method=method)
        expected = computed(inputs, context)
        q, k, v = (t[context.plan.own].requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        out = checkpoint(attend, q, k, v, context, use_reentrant=False)
        again = attend(q, k, v, context)
        scores = [(x * inputs.dout[context.plan.own]).sum() for x in (out, again, again)]
        gradients = [torch.autograd.grad(score, [q, k, v], retain_graph=score is scores[1]) for score in scores]
        same[method] = all(torch.equal(a, b) for got in gradients for a, b in zip(got, expected[1:], strict=True))
    return same


def leaks(rank: int, world: int, group: Any) -> dict[Any, bool]:
    """Whether a document's output changed, by a bit, when all others were changed."""
    changed = {}
    lengths = [3, 21, 1, 8, 4]
    batch = packed(lengths, 4)
    assert batch.pad_length
    before, other = (inputs_for(batch.num_tokens, seed=seed).tensors[:3] for seed in (0, 1))
    for method, kind in product(METHODS, KINDS):
        context = context_of(batch, world, rank, group, kind=kind, method=method)
        own = context.plan.own
        before_change = attend(*(t[own] for t in before), context)
        for document in range(batch.segments.num_segments):
            kept = batch.sample_index[own] == document
            mixed = (torch.where(kept[:, None, None], a[own], b[own]) for a, b in zip(before, other, strict=True))
            again = attend(*mixed, context)
            changed[method, kind, document] = not torch.equal(before_change[kept], again[kept])
            if not kept.all():
                assert not torch.equal(before_change[~kept], again[~kept])  # the other documents did change
    return changed


@contextmanager
def counting(rank: int) -> Iterator[list[int]]:
    """Counts the bytes that this rank sends to other ranks."""
    sent = [0]
    exchange, transfer = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_exchange(output: Tensor, given: Tensor, receive: Any, send: Any, **options: Any) -> Any:
        key_bytes = given[:1].numel() * given.element_size()
        sent[0] += key_bytes * (sum(send) - send[rank])
        return exchange(output, given, receive, send, **options)

    def counted_transfer(operations: list[Any]) -> Any:
        sent[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return transfer(operations)

    with (
        mock.patch.object(dist, "all_to_all_single", counted_exchange),
        mock.patch.object(dist, "batch_isend_irecv", counted_transfer),
    ):
        yield sent


def volumes(rank: int, world: int, group: Any) -> dict[Any, tuple[int, int, int, int]]:
    """Bytes sent in forward and backward, and the prediction of the formula."""
    found = {}
    shape = {"heads": 8, "dim": 4, "value_dim": 6}
    for method, kind, key_heads, dtype in product(METHODS, KINDS, (1, 4), (torch.float32, torch.bfloat16)):
        batch = packed(ROWS["over three ranks"], world)
        window = 7 if method != "ring" and key_heads == 1 else None
        inputs = inputs_for(batch.num_tokens, key_heads=key_heads, **shape).to(dtype)
        context = context_of(batch, world, rank, group, kind=kind, method=method, backend="reference")
        q, k, v = (t[context.plan.own].requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        with counting(rank) as sent:
            out = attend(q, k, v, context, window=window)
            forward = sent[0]
            (out * inputs.dout[context.plan.own]).sum().backward()
        formula = communication_bytes(
            method,
            make_layout(batch.segments, world, kind),
            batch.segments,
            num_heads=8,
            num_key_heads=key_heads,
            head_dim=4,
            value_dim=6,
            element_size=dtype.itemsize,
            window=window,
        )
        found[method, kind, key_heads, str(dtype)] = (
            forward,
            sent[0] - forward,
            int(formula.forward[rank]),
            int(formula.backward[rank]),
        )
    return found


def gathering(rank: int, world: int, group: Any) -> dict[Any, float]:
    """The error of a weight's gradient, summed over ranks, when the loss is computed from gathered tokens."""
    errors = {}
    for kind, loss in product(KINDS, ("replicated", "partial")):
        batch = packed(ROWS["short documents"], world)
        total = batch.num_tokens
        context = context_of(batch, world, rank, group, kind=kind)
        tokens = torch.randn(total, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        own = context.plan.own

        def scored(pack: Tensor, first: int, last: int) -> Tensor:
            return (pack.cumsum(0)[first:last] ** 2).sum()  # every token matters for all after it

        pack = gather_tokens(tokens[own] * weight, context, loss=loss)
        share = total // world
        span = (0, total) if loss == "replicated" else (rank * share, (rank + 1) * share)
        scored(pack, *span).backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad, group=group)

        alone = torch.ones(3, dtype=torch.float64, requires_grad=True)
        scored(tokens * alone, 0, total).backward()
        assert torch.equal(pack.detach(), tokens)
        errors[kind, loss] = relative_error(weight.grad, alone.grad)
    return errors


def refusals(rank: int, world: int, group: Any) -> dict[str, str]:
    batch = packed(ROWS["one document"], world)
    inputs = inputs_for(batch.num_tokens, heads=world + 1, key_heads=world + 1)

    def message(call: Callable[[], Any]) -> str:
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    def attended(inputs: Inputs, context: AttnContext, **options: Any) -> Any:
        return attend(*(t[context.plan.own] for t in inputs.tensors[:3]), context, **options)

    context = {method: context_of(batch, world, rank, group, method=method) for method in METHODS}
    alone = context_of(batch, world, rank)
    few = inputs_for(batch.num_tokens, heads=3 * world, key_heads=3) if world == 2 else inputs
    return {
        "heads": message(lambda: attended(inputs, context["ulysses"])),
        "key heads": message(lambda: attended(few, context["ulysses"])),
        "window": message(lambda: attended(inputs, context["ring"], window=3)),
        "causal": message(lambda: attended(inputs, context["allgather"], window=3, causal=False)),
        "group": message(lambda: attended(inputs, alone)),
        "tokens": message(lambda: attend(inputs.q, inputs.k, inputs.v, context["allgather"])),
        "wrong rank": message(lambda: context_of(batch, world, (rank + 1) % world, group)),
    }


def everything(rank: int, world: int) -> dict[str, Any]:
    # A group that is not the whole world, in a different order, must work as well as the default group.
    group = dist.new_group(list(range(world))[::-1])
    parts = (parity, repeated, leaks, volumes, gathering, refusals)
    return {part.__name__: part(dist.get_rank(group), world, group) for part in parts}


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, everything)


def test_outputs_and_gradients_equal_one_process(results: list[dict[str, Any]]) -> None:
    cases = results[0]["parity"]
    assert len(cases) == len(METHODS) * (len(KINDS) * len(ROWS) + len(OPTIONS)) - 1
    for rank, result in enumerate(results):
        wrong = {case: error for case, error in result["parity"].items() if not error < 1e-12}
        assert not wrong, f"rank {rank}"


def test_gradients_are_the_same_every_time(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["repeated"] == dict.fromkeys(METHODS, True)


def test_no_document_sees_another(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["leaks"]) == len(METHODS) * len(KINDS) * 6
        assert not [case for case, changed in result["leaks"].items() if changed]


def test_bytes_sent_are_those_of_the_formula(results: list[dict[str, Any]]) -> None:
    for result in results:
        for case, (forward, backward, expected_forward, expected_backward) in result["volumes"].items():
            assert (forward, backward) == (expected_forward, expected_backward), case
    assert sum(counts[0] for result in results for counts in result["volumes"].values()) > 0


def test_gathered_tokens_give_the_gradient_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(error < 1e-12 for error in result["gathering"].values()), result["gathering"]


def test_what_cannot_be_done_is_refused_in_one_line(results: list[dict[str, Any]]) -> None:
    messages = results[0]["refusals"]
    assert "\n" not in "".join(messages.values())
    for name, setting, cure in (
        ("heads", "method: 'ulysses'", "allgather"),
        ("key heads", "method: 'ulysses'", "allgather"),
        ("window", "method: 'ring'", "allgather"),
        ("causal", "window: 3", "causal=True"),
        ("group", "group: is not set", "shard()"),
        ("tokens", "q: shape", "one element per token"),
        ("wrong rank", "group:", "of this group"),
    ):
        assert messages[name].startswith(setting), messages[name]
        assert cure in messages[name], messages[name]


def test_the_formula_by_hand() -> None:
    """One document of 16 tokens on 4 ranks, contiguous, 2 bytes an element, 2 key heads of 4 and 6."""
    segments = Segments.from_lengths([16])
    layout = make_layout(segments, 4, "contiguous")
    shape = {"num_heads": 8, "num_key_heads": 2, "head_dim": 4, "value_dim": 6}
    key_bytes = 2 * (4 + 6) * 2
    found = communication_bytes("allgather", layout, segments, **shape)
    assert found.forward.tolist() == [
        4 * key_bytes * n for n in (3, 2, 1, 0)
    ]  # rank 0's keys go to all that come after
    assert found.backward.tolist() == [4 * key_bytes * n for n in (0, 1, 2, 3)]
    found = communication_bytes("ring", layout, segments, **shape)
    assert found.forward.tolist() == [3 * 4 * key_bytes] * 4
    assert found.backward.tolist() == [3 * 4 * key_bytes + 4 * 4 * 2 * key_bytes] * 4
    found = communication_bytes("ulysses", layout, segments, **shape)
    heads = 2 * (4 + 6) + 1 * (4 + 6)  # 2 of 8 heads of q and the output, 1 head of k and v
    assert found.forward.tolist() == found.backward.tolist() == [3 * 4 * heads * 2] * 4
    assert communication_bytes("allgather", layout, segments, window=3, **shape).forward.sum() == 3 * 2 * key_bytes
    with refused("method"):
        communication_bytes("star", layout, segments, **shape)


def abandoned(rank: int, world: int, method: str) -> str:
    """The peer exits between forward and backward."""
    batch = packed(ROWS["one document"], world)
    context = context_of(batch, world, rank, dist.group.WORLD, method=method)
    inputs = inputs_for(batch.num_tokens)
    q, k, v = (t[context.plan.own].requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    out = attend(q, k, v, context)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerLostError) as caught:
        out.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_peer_that_dies_before_backward_is_named(method: str) -> None:
    message = run_ranks(2, abandoned, method, group_timeout=5.0, dying=[1])[0]
    assert "\n" not in message
    assert "in the group of ranks [0, 1] failed after" in message
