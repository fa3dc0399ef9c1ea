"""Which results a compiled layer saves for backward. `test_compile` has the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import padfree.attention.operator  # noqa: F401 (the operator)
from padfree.layers.recompute import Kept, mark_saved


class Layer(nn.Module):
    """Names of the matmuls are those of the attributes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor, cu_seqlens: Tensor, longest: Tensor) -> Tensor:
        q, k, v = (layer(x).view(-1, 2, 4) for layer in (self.q, self.k, self.v))
        attended, _ = torch.ops.padfree.self_attention(
            q * 2, k, v, None, cu_seqlens, longest, 0.5, None, None, "reference"
        )
        x = x + self.o(attended.flatten(1))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def kept_by(kept: Kept) -> set[str]:
    """The modules whose results are saved; attention's results, both of them, as well."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        mark_saved(graph.graph, kept)
        graphs.append(graph)
        return graph.forward

    torch.compile(Layer(), backend=backend)(
        torch.randn(5, 8), torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor(3)
    )
    (graph,) = graphs
    nodes = [node for node in graph.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    assert len([node for node in nodes if "self_attention" in str(node.target)]) == 1
    assert len([node for node in nodes if "getitem" in str(node.target)]) >= 1
    weights = [str(node.args[1]) for node in nodes if "linear" in str(node.target)]
    return {name for name in ("q", "k", "v", "o", "gate", "up", "down") if any(f"_{name}_" in text for text in weights)}


def test_what_is_kept() -> None:
    assert kept_by("selective") == set()
    assert kept_by("host") == {"q", "k", "v", "o"}
