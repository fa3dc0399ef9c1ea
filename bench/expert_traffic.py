"""Bytes that a rank sends in a step of a mixture of experts whose experts are divided over n ranks.

    predicted    by `padfree.tools.planner.traffic`, as in a dry run: weights and gradients, and tokens
    counted      on all TCP connections of a rank (`TCP_INFO`), without headers

gloo sends everything over TCP, so the Linux kernel counts what a rank sends. The counts include a short header per
message and messages of a few bytes. All values are averages over the ranks.

    even     all experts are chosen equally often, as the prediction assumes: the routes are replayed
    own      the routers choose, with random weights

    PYTHONPATH=src python bench/expert_traffic.py
    PYTHONPATH=src python bench/expert_traffic.py --ranks 2 --layers 1
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import spawn

from padfree.config.sections import ParallelConfig
from padfree.distributed import make_mesh
from padfree.losses import SFTSettings
from padfree.model.routers import routers_of
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from padfree.tools.planner.traffic import EXPERTS, Placement, step_traffic
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer

SENT, SENT_AGAIN = 200, 208
"""Offsets of `tcpi_bytes_sent` and `tcpi_bytes_retrans` in the `tcp_info` of Linux."""
WAYS: dict[str, dict[str, Any]] = {
    "none": {"checkpointing": "none", "reshard": False},
    "full": {"checkpointing": "full", "reshard": True},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes that a rank sends in a step, on average over the ranks."""

    ranks: int
    expert: int
    checkpointing: str
    routes: str
    weights: float  # predicted: weights, gradients and numbers of the step
    tokens: float  # predicted: tokens to their experts and back
    counted: float

    @property
    def ratio(self) -> float:
        return self.counted / (self.weights + self.tokens)


def bytes_sent() -> int:
    """Return the bytes that the TCP connections of this process have sent since they were opened, without headers."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, sent_again = (struct.unpack_from("Q", info, offset)[0] for offset in (SENT, SENT_AGAIN))
                total += sent - sent_again
    return total


def samples_of(count: int, length: int, *, layers: int, experts: int, top: int, even: bool) -> list[Sample]:
    """Return samples of random tokens. With `even`, their routes choose all experts equally often."""
    rng = np.random.default_rng(0)
    routes = np.arange(length * top, dtype=np.uint8).reshape(length, 1, top) % experts
    return [
        Sample(
            tokens=rng.integers(0, 64, length),
            uid=f"sample {index}",
            routes=np.repeat(routes, layers, axis=1) if even else None,
        )
        for index in range(count)
    ]


def measure(rank: int, world: int, layers: int, tokens: int) -> list[Row]:
    """Run a step in each layout and count its bytes. Collective, with gloo on the CPU."""
    return [
        _row(world, expert, layers, tokens, checkpointing, options, routes)
        for expert in (1, 2, 4, 8)
        if expert <= world
        for checkpointing, options in WAYS.items()
        for routes in ("even", "own")
    ]


def _row(
    world: int, expert: int, layers: int, tokens: int, checkpointing: str, options: dict[str, Any], routes: str
) -> Row:
    mesh = make_mesh("cpu", expert=expert)
    sizes = {"num_experts": 8, "hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": layers}
    model = build("qwen3_moe", **sizes)
    skeleton = build("qwen3_moe", **sizes)
    top, number = model.config.num_experts_per_tok, len(routers_of(model))
    parallelize(model, transformations(mesh, replay=routes == "even", **options))
    scorer = Scorer(
        model, mesh, max_tokens=tokens, overlong="alone", pack_settings=PackSettings(routes=routes == "even")
    )
    engine = Engine(scorer, make_optimizer(model, OptimizerConfig(lr=1e-3)), LossSettings(loss=SFTSettings()))
    samples = samples_of(2 * world, tokens // 2, layers=number, experts=8, top=top, even=routes == "even")
    prepared = engine.prepare(samples)
    engine.gradients(prepared)  # connects the ranks and allocates
    counts = []
    for _ in range(2):
        dist.barrier()
        counts.append(bytes_sent())
        dist.barrier()
        if len(counts) == 1:
            engine.step(samples)
    total = torch.tensor(float(counts[1] - counts[0]), dtype=torch.float64)
    dist.all_reduce(total)
    planned = step_traffic(
        ParallelConfig(expert=expert, compile="none", **options),
        "float32",
        skeleton,
        prepared.plan,
        Placement(ranks=world, expert=expert),
        "gloo",
    )
    kinds = {kind: float(sent.mean()) for kind, sent in planned.inside.items()}
    exchanged = kinds.pop(EXPERTS, 0.0)
    return Row(
        ranks=world,
        expert=expert,
        checkpointing=checkpointing,
        routes=routes,
        weights=sum(kinds.values()),
        tokens=exchanged,
        counted=float(total) / world,
    )


def run(rank: int, world: int, store: str, layers: int, tokens: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rows = measure(rank, world, layers, tokens)
    if rank == 0:
        Path(store).with_name("rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, CPU", flush=True)
    rows = []
    for world in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            given = (world, f"{folder}/store", arguments.layers, arguments.tokens)
            spawn(run, given, nprocs=world)  # type: ignore[no-untyped-call]
            rows += [Row(**row) for row in json.loads((Path(folder) / "rows.json").read_text())]
    print("KiB per rank and step")
    print("| ranks | `parallel.expert` | checkpointing | routes | weights | tokens | predicted | counted | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        kib = [f"{size / 1024:,.0f}" for size in (row.weights, row.tokens, row.weights + row.tokens, row.counted)]
        layout = (row.ranks, row.expert, row.checkpointing, row.routes)
        print(f"| {' | '.join(map(str, layout))} | {' | '.join(kib)} | {row.ratio:.4f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
