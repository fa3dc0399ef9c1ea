"""The arguments of the flash kernels. `test_function` checks their results on a machine that has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padfree.attention import flash, torch_varlen
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments

SEGMENTS = Segments.from_lengths([4, 7])


@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (5, 4), (6, 5), (7, -1), (100, -1)])
def test_a_window_counts_the_keys_to_the_left(window: int | None, left: int) -> None:
    """A window that contains all keys is passed as no window, which selects a faster kernel."""
    assert flash.window_left(AttentionSpec(scale=1.0, window=window), SEGMENTS) == left


def test_queries_without_keys_are_filled() -> None:
    segments_q, segments_k = Segments.from_lengths([3, 2]), Segments.from_lengths([2, 0])
    out, lse = torch.full((5, 2, 4), torch.nan), torch.full((2, 5), torch.nan).T
    out[1:3], lse[1:3] = 1.0, 1.0
    out, lse = flash.fill_blind_queries(out, lse, segments_q, segments_k, AttentionSpec(scale=1.0))
    assert out[:, 0, 0].tolist() == [0, 1, 1, 0, 0]
    assert lse[:, 1].tolist() == [-torch.inf, 1, 1, -torch.inf, -torch.inf]


def test_the_kernel_gets_the_lse_it_gave() -> None:
    given = torch.randn(2, 11)  # [H, Tq]
    assert flash.lse_for_kernel(given.T, SEGMENTS, SEGMENTS).data_ptr() == given.data_ptr()


def test_the_kernel_gets_plus_infinity_for_queries_without_keys() -> None:
    lse = torch.tensor([[-torch.inf], [0.5]])
    got = flash.lse_for_kernel(lse, Segments.from_lengths([2]), Segments.from_lengths([1]))
    assert got.tolist() == [[torch.inf, 0.5]]


def test_inputs_are_copied_only_if_their_last_dimension_is_not_contiguous() -> None:
    good, bad = torch.randn(2, 5, 4).transpose(0, 1), torch.randn(4, 5, 2).transpose(0, 2)
    same, copied = flash.flash_inputs(good, bad)
    assert same is good
    assert copied.stride(-1) == 1
    assert torch.equal(copied, bad)


def test_torch_operators_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments match the operators' schemas, in order and by name."""
    calls: dict[str, dict[str, Any]] = {}

    def recorder(name: str, *results: torch.Tensor) -> Any:
        schema = getattr(torch.ops.aten, name).default._schema

        def record(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            names = [argument.name for argument in schema.arguments]
            positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
            assert len(args) == len(positional)
            assert set(kwargs) <= set(names)
            calls[name] = {**dict(zip(positional, args, strict=True)), **kwargs}
            return results

        return SimpleNamespace(default=record)

    q, k = torch.randn(11, 4, 8), torch.randn(11, 2, 8)
    out, lse = torch.randn(11, 4, 8), torch.randn(4, 11)
    empty = torch.empty(0)
    operators = SimpleNamespace(
        _flash_attention_forward=recorder("_flash_attention_forward", out, lse, empty, empty, empty),
        _flash_attention_backward=recorder("_flash_attention_backward", q, k, k),
    )
    monkeypatch.setattr(torch_varlen.torch, "ops", SimpleNamespace(aten=operators))
    spec = AttentionSpec(scale=0.25, window=3)
    got_out, got_lse = torch_varlen.BACKEND.forward(q, k, k, SEGMENTS, SEGMENTS, spec)
    torch_varlen.BACKEND.backward(out, q, k, k, got_out, got_lse, SEGMENTS, SEGMENTS, spec)
    assert got_lse.shape == (11, 4)
    for call in calls.values():
        assert call["cum_seq_q"] is SEGMENTS.cu_seqlens
        assert (call["max_q"], call["max_k"]) == (7, 7)
        assert (call["window_size_left"], call["window_size_right"]) == (2, 0)
        assert (call["scale"], call["is_causal"], call["dropout_p"]) == (0.25, True, 0.0)
    assert calls["_flash_attention_backward"]["logsumexp"].shape == (4, 11)
