"""Time on more devices: overlapped and exposed communication, and where scaling stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from padfree.cli.main import main
from padfree.config import config_from_dict
from padfree.packing import CostModel
from padfree.testing.models import build, save_with_tokenizer
from padfree.tools.planner import DeviceMemory, PlanShape, TimeModel
from padfree.tools.planner.scaling import LINK_EFFICIENCY, Links, Scaling, plan_scaling
from padfree.tools.planner.traffic import Placement, weights_traffic
from tests.refused import refused
from tests.tools.planner.test_traffic import settings

LINKS = Links(inside=1e9, between=1e8, names=("a", "b"))


def scaled(seconds_a_token: float, *, samples: int = 512, length: int = 64, **changes: object) -> Scaling:
    ranks = 32
    config = config_from_dict(settings(**changes))
    return plan_scaling(
        [np.full(samples, length)] * 3,
        PlanShape(ranks=ranks, max_tokens=64, context=config.parallel.context),
        TimeModel(cost=CostModel(linear=seconds_a_token), per_second=1.0, source="a test"),
        config.parallel,
        config.model.dtype,
        hosts=ranks // 8,
        links=LINKS,
        need=DeviceMemory(config, build("qwen3")),
        memory=1e9,
    )


def test_long_computing_hides_the_weights_and_short_computing_does_not() -> None:
    slow = scaled(1.0)
    assert [time.ranks for time in slow.sharded] == [8, 16, 32]
    assert [time.ranks for time in slow.replicated] == [16, 32]
    assert slow.efficiency(slow.sharded) == pytest.approx([1.0] * 3, rel=1e-3)
    assert slow.limit(slow.sharded) is None
    assert slow.sharded[0].even == pytest.approx(512 * 64 / 8)
    fast = scaled(1e-9)
    limit = fast.limit(fast.sharded)
    assert limit is not None
    assert limit[0] == 8
    assert limit[1].startswith("gathering weights")
    # 64 micro-batches per rank; a ring of 8 on one host sends 7/8 of the weights and of the gradients: 3 units, 2
    # collectives each, latency of 8 devices; a micro-batch of 64 tokens hides 64 ns of it, and a third is exposed
    sent = weights_traffic(build("qwen3"), Placement(ranks=8), size=4, reshard=False, backend="nccl", micro_batches=1)
    moving = sum(float(each.max()) for each in sent.inside.values()) / LINKS.inside / LINK_EFFICIENCY + 6 * 8e-6
    assert fast.sharded[0].weights == pytest.approx(64 * (moving - 64e-9) + moving / 3, rel=1e-9)


def test_too_few_micro_batches_are_named_as_the_reason() -> None:
    few = scaled(1.0, samples=8)
    limit = few.limit(few.sharded)
    assert limit is not None
    assert limit == (8, limit[1])
    assert limit[1].startswith("ranks wait for the slowest rank (1.0 micro-batches per rank")


def test_keys_and_values_are_waited_for_but_in_a_ring() -> None:
    ways = ("allgather", "ring")
    gathered, ring = (scaled(1.0, context=2, length=128, samples=32, method=method).sharded[0] for method in ways)
    assert gathered.context > 0
    assert ring.context == 0


def test_links_are_named_or_given() -> None:
    assert Links.of(None, None, "A100") == Links(inside=300e9, between=50e9, names=("nvlink3", "ndr"))
    assert Links.of("12", "hdr", None) == Links(inside=12e9, between=25e9, names=("12", "hdr"))
    with refused("--link-between"):
        Links.of(None, "thread", None)


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_with_tokenizer(tmp_path / "model")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(" ".join(["40"] * 64))
    plan = ["plan", "--lengths", str(lengths), "--model", str(model), "--max-tokens", "64", "--ranks", "16"]
    page = tmp_path / "plan.html"
    assert main([*plan, "--gpu", "H100", "--hosts", "2", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "\nscaling      ranks hosts" in shown
    assert "\nassumed     nvlink4 inside a host, 450 GB/s per device; ndr between hosts, 50 GB/s" in shown
    assert "\nassumed     compute: assuming 40% of the 989 TFLOP/s of H100\n" in shown
    assert "Throughput per device relative to 8 devices" in page.read_text()
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"linear": 1e-6, "quadratic": 1e-9, "constant": 1e-3}))
    assert main([*plan, "--hosts", "2", f"batch.cost={cost}"]) == 0
    assert f"\nmeasured    compute: measured, {cost}\n" in capsys.readouterr().out
    for wrong, line in (
        (["--gpu", "H100", "--hosts", "3"], "--hosts: 3 does not divide 16 ranks"),
        (["--hosts", "2", "model.dtype=float32"], "--hosts: 2 needs step times in seconds"),
    ):
        assert main([*plan, *wrong]) == 1
        assert line in capsys.readouterr().err
