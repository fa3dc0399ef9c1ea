"""What the passes over compiled layers' graphs leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
from torch import fx

from padfree.layers.compile import GraphPass


@contextmanager
def graphs_after(place: str) -> Iterator[list[fx.Graph]]:
    """The graphs after the pass that is found in that place, and before the next one."""
    seen: list[fx.Graph] = []
    module, name = place.rsplit(".", 1)
    change = getattr(import_module(module), name)

    def change_and_look(graph: fx.Graph) -> None:
        change(graph)
        graph.lint()
        seen.append(graph)

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, change_and_look)
        patch.setattr(GraphPass, "uuid", lambda self: None)  # no cache: the pass must be called
        yield seen
    torch._dynamo.reset()


def calls(graphs: list[fx.Graph]) -> list[str]:
    """Names of our operators in the order of the graphs."""
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [str(target).split(".")[1] for target in targets if str(target).startswith("padfree.")]
