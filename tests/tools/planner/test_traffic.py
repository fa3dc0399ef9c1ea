"""Bytes that processes send each other, by kind and link. tests/hosts compares them with real links."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padfree.config import Config, config_from_dict
from padfree.packing import plan_step
from padfree.sizes import ModelSizes
from padfree.testing.models import build
from padfree.tools.planner.traffic import (
    EXPERTS,
    GATHER,
    METRICS,
    REDUCE,
    REPLICAS,
    Placement,
    Traffic,
    fsdp_units,
    step_traffic,
)


def settings(**parallel: object) -> dict[str, object]:
    return {
        "model": {"path": "a-model"},
        "data": {"path": ["rows.jsonl"]},
        "batch": {"samples": 4, "max_tokens": 64},
        "run": {"folder": "runs"},
        "parallel": {"compile": "none", "checkpointing": "none", "reshard": False, **parallel},
    }


def test_a_context_group_is_inside_a_host_and_so_are_the_weights_of_a_replica() -> None:
    for hosts, each in ((2, 4), (4, 8), (128, 8)):
        ranks = hosts * each
        for context in (1, 2, 4):
            placement = Placement(ranks=ranks, hosts=hosts, context=context, replicate=hosts)
            assert placement.hosts_of(placement.context_groups) == 1
            assert placement.hosts_of(placement.shard_groups) == 1
            assert placement.hosts_of(placement.replica_groups) == hosts
    wide = Placement(ranks=8, hosts=2, context=8)
    assert wide.hosts_of(wide.context_groups) == 2
    assert [*wide.lines()] == [
        "hosts: 2 with 4 processes each; host 0: ranks 0 to 3, host 1: ranks 4 to 7",
        "  weights are gathered over 2 hosts",
        "  the 8 context ranks of a pack are over 2 hosts",
    ]


def test_a_ring_leaves_each_host_once() -> None:
    traffic = Traffic(placement=Placement(ranks=8, hosts=2))
    traffic.rings("ring", np.arange(8)[None], 800.0)
    assert traffic.inside["ring"].tolist() == [700, 700, 700, 0, 700, 700, 700, 0]
    assert traffic.between["ring"].tolist() == [0, 0, 0, 700, 0, 0, 0, 700]
    assert traffic.of_host(1) == (2100.0, 700.0)
    assert traffic.table() == {"ring": (2100.0, 700.0)}


def traffic_of(config: Config, *rest: Any) -> Traffic:
    return step_traffic(config.parallel, config.model.dtype, *rest)


def test_what_a_step_sends_by_hand() -> None:
    model = build("qwen3")
    units = fsdp_units(model, 4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(unit.gathered for unit in units) == parameters, "all first dimensions are multiples of 4"
    root = next(unit for unit in units if unit.is_root).gathered
    plan = plan_step([40, 30, 20, 10, 50, 60], ranks=4, max_tokens=64)
    micro_batches = plan.num_micro_batches
    sharded = config_from_dict(settings())
    flat = traffic_of(sharded, model, plan, Placement(ranks=4, hosts=2), "nccl")
    # in float32, one of two ranks of a host sends to the other host
    assert flat.of_host(0)[1] == pytest.approx(
        micro_batches * 0.75 * 4 * parameters * 2 + flat.table()[METRICS][1], rel=1e-12
    )
    gloo = traffic_of(sharded, model, plan, Placement(ranks=4, hosts=2), "gloo")
    assert gloo.table()[REDUCE][1] == 2 * flat.table()[REDUCE][1]
    again = traffic_of(config_from_dict(settings(reshard=True)), model, plan, Placement(ranks=4, hosts=2), "nccl")
    assert again.table()[GATHER][1] == pytest.approx(flat.table()[GATHER][1] * (2 - root / parameters))
    replicas = traffic_of(
        config_from_dict(settings(replicate=2)), model, plan, Placement(ranks=4, hosts=2, replicate=2), "nccl"
    )
    assert replicas.between[GATHER].sum() == replicas.between[REDUCE].sum() == 0
    # two shards of a half each; both ranks of a host send theirs, n twice (P - 1)/P times
    assert replicas.table()[REPLICAS] == (0.0, micro_batches * 4 * parameters)


def test_a_row_over_two_ranks_sends_the_keys_that_are_read_elsewhere() -> None:
    model = build("qwen3")
    sizes = ModelSizes.of(model.config)
    plan = plan_step([64], ranks=1, max_tokens=64)
    rows = settings(context=2, layout="contiguous")
    found = traffic_of(config_from_dict(rows), model, plan, Placement(ranks=2, hosts=2, context=2), "nccl")
    # 32 keys and values of each layer go from the first half to the second, their gradients back
    one_way = sizes.layers * 32 * (sizes.key + sizes.value) * 4
    assert found.between["context, allgather"].tolist() == [one_way, one_way]
    twice = config_from_dict(settings(context=2, layout="contiguous", checkpointing="full"))
    again = traffic_of(twice, model, plan, Placement(ranks=2, hosts=2, context=2), "nccl")
    assert again.between["context, allgather"].tolist() == [2 * one_way, one_way]


def test_experts_over_ranks_send_tokens_instead_of_weights() -> None:
    model = build("qwen3_moe")  # 2 layers with 4 experts, top 2, hidden size 64
    experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    plan = plan_step([16, 16, 16, 16], ranks=4, max_tokens=16)
    whole = traffic_of(config_from_dict(settings()), model, plan, Placement(ranks=4, hosts=2), "nccl")
    config, placement = config_from_dict(settings(expert=2)), Placement(ranks=4, hosts=2, expert=2)
    found = traffic_of(config, model, plan, placement, "nccl")
    # 16 tokens choose 2 experts each, and every second choice is on the other rank of the host; the rows and their
    # outputs, forward and backward, and the counts of the other rank's 2 experts
    assert found.inside[EXPERTS].tolist() == [2 * (4 * 16 * 64 * 4 + 2 * 8)] * 4
    assert found.between[EXPERTS].sum() == 0
    # each rank gathers half of the experts, from one other rank instead of three
    gathered = whole.inside[GATHER] + whole.between[GATHER] - found.inside[GATHER] - found.between[GATHER]
    assert gathered.tolist() == [4 * experts * 3 / 4 - 4 * experts / 2 * 1 / 2] * 4
    assert list(placement.lines())[-1] == "  the 2 ranks that divide the experts are inside a host"
    full = traffic_of(config_from_dict(settings(expert=2, checkpointing="full")), model, plan, placement, "nccl")
    assert full.inside[EXPERTS].tolist() == [2 * (6 * 16 * 64 * 4 + 2 * 2 * 8)] * 4
