"""Experts that files store one by one: every rank reads its part, without a whole copy on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from padfree.distributed import make_mesh
from padfree.model import load
from padfree.model.load import load_model
from padfree.model.named_tensors import local_part
from padfree.model.stored_experts import stored_names
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from tests.ranks import run_ranks

ONE_BY_ONE = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "qwen2_moe",
    "olmoe",
    "minimax_m2",
]
LAYOUTS = [{"expert": 1}, {"expert": 2}]


def saved(folder: Path, name: str, **changes: Any) -> Path:
    build(name, **changes).save_pretrained(folder)
    return folder


def never(*_: object) -> None:
    raise AssertionError("the files are loaded with transformers")


def read_by_ranks(rank: int, world: int, folders: list[Path]) -> None:
    """Each rank compares what it has read with what transformers loads."""
    for folder in folders:
        expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
        for layout in LAYOUTS:
            mesh = make_mesh("cpu", **layout)
            with mock.patch.object(load, "through_transformers", never):
                model = load_model(
                    folder, dtype=torch.bfloat16, shard=lambda each, mesh=mesh: parallelize(each, transformations(mesh))
                )
            for key, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                assert ".experts." not in key or local_part(parameter).numel() == parameter.numel() // world
                assert torch.equal(parameter.full_tensor().float(), expected[key].float()), (folder.name, layout, key)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_read_their_parts_of_each_expert(world: int, tmp_path: Path) -> None:
    run_ranks(world, read_by_ranks, [saved(tmp_path / name, name) for name in ONE_BY_ONE])


def names_of(changes: dict[str, str | None]) -> Any:
    model = build("qwen3_moe", num_hidden_layers=1)
    names = [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(4) for part in ("gate", "up")
    ]
    return stored_names(model, [new for name in names if (new := changes.get(name, name)) is not None])


def test_the_parts_of_an_expert_are_in_order() -> None:
    prefix = "model.layers.0.mlp.experts"
    expected = [[f"{prefix}.{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in range(4)]
    assert names_of({}) == {f"{prefix}.gate_up_proj": expected}


@pytest.mark.parametrize("name", [None, "model.layers.0.mlp.experts.7.up_proj.weight"])
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_incomplete_experts_are_left_to_transformers(expert: int, name: str | None) -> None:
    assert names_of({f"model.layers.0.mlp.experts.{expert}.up_proj.weight": name}) is None


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list whose only entry becomes the largest growth of this process's own memory in bytes.

    The pages of mapped files do not count, because all processes share them and the kernel can drop them.
    """
    done, found = threading.Event(), [0]

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    before = own()

    def watch() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], own() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def load_large(rank: int, world: int, folder: Path, through: bool) -> list[float]:
    """The largest growth of memory, relative to the bytes of the model, for each layout."""
    found = []
    for layout in LAYOUTS:
        mesh = make_mesh("cpu", **layout)
        sources = mock.patch.object(load, "stored_names", return_value=None) if through else mock.MagicMock()
        with sources, peak_memory() as peak:
            model = load_model(folder, shard=lambda each, mesh=mesh: parallelize(each, transformations(mesh)))
        found.append(peak[0] / sum(4 * parameter.numel() for parameter in model.parameters()))
        del model
    return found


@pytest.mark.slow
def test_no_rank_has_a_whole_copy(tmp_path: Path, record_property: Any) -> None:
    """404 MB of weights over two ranks. The ratios are in the report of `pytest --junitxml`."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64}
    saved(tmp_path, "qwen3_moe", **sizes)
    for through in (False, True):
        ratios = run_ranks(2, load_large, tmp_path, through)
        record_property("with transformers" if through else "by slices", ratios)
        if through:
            assert max(ratios[0]) > 1.4, "rank 0 has the whole model and its part"
        else:
            assert all(0.4 < ratio < 0.65 for each in ratios for ratio in each), ratios
