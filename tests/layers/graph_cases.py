"""The graphs of compiled layers after the graph passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from padfree.layers import compile as compiled
from padfree.layers.compile import InductorPass


@contextmanager
def graphs_after(chosen: Callable[[fx.Graph], int]) -> Iterator[list[fx.Graph]]:
    """The graphs after this pass of the list, and before the next one."""
    seen: list[fx.Graph] = []

    def run_and_look(graph: fx.Graph) -> int:
        count = chosen(graph)
        graph.lint()
        seen.append(graph)
        return count

    passes = tuple(replace(each, run=run_and_look) if each.run is chosen else each for each in compiled.PASSES)
    assert passes != compiled.PASSES, "no pass of the list"
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "PASSES", passes)
        patch.setattr(InductorPass, "uuid", lambda self: None)  # no cache: the pass must be called
        yield seen
    torch._dynamo.reset()


def passes_alone(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    """Replaces `inner_compile` of Inductor: runs its passes and ours, then interprets the graph. No code is generated,
    which would take long."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, is_inference=False)
    graph.recompile()
    return make_boxed_func(graph.forward)


def calls(graphs: list[fx.Graph]) -> list[str]:
    """Names of our operators in the order of the graphs."""
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [str(target).split(".")[1] for target in targets if str(target).startswith("padfree.")]
