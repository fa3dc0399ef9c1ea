"""Groups by purpose, in one process without a launcher and in several."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from padfree.distributed import PeerLostError, distributed, init_distributed, make_mesh
from padfree.distributed.mesh import fresh_store
from tests.ranks import rank_server, run_ranks
from tests.refused import refused


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not dist.is_initialized()
    with distributed(device="cpu", timeout=5.0) as device:
        mesh = make_mesh(device)
        for axis in (mesh.data, mesh.context, mesh.loss):
            assert (axis.rank, axis.size, axis.group.size()) == (0, 1, 1)
        layer = torch.nn.Linear(3, 2)
        fully_shard(layer, mesh=mesh.fsdp)
        layer(torch.ones(1, 3)).sum().backward()
        with distributed(device="cpu"):
            pass
        assert dist.is_initialized()  # an inner block leaves the outer group alone
    assert not dist.is_initialized()


def purposes(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for context, replicate in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4)):
        mesh = make_mesh(init_distributed(device="cpu"), context=context, replicate=replicate, timeout=7.0)
        for purpose in ("data", "context", "loss"):
            axis = getattr(mesh, purpose)
            members = dist.get_process_group_ranks(axis.group)
            assert members[axis.rank] == rank
            assert axis.size == len(members) == axis.group.size()
            found[context, replicate, purpose] = members
        found[context, replicate, "fsdp"] = mesh.fsdp.mesh.tolist()
        backend = mesh.context.group._get_backend(torch.device("cpu"))
        assert context == world or backend.options._timeout == timedelta(seconds=7)
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=make_mesh("cpu", context=2, replicate=2).fsdp)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)  # gloo supports plain sums only
    layer(torch.tensor([[1.0, float(rank)]])).sum().backward()
    found["gradient"] = layer.weight.grad.full_tensor().tolist()
    with refused("parallel.context"):
        make_mesh("cpu", context=3)
    return found


def test_every_purpose_has_its_ranks() -> None:
    results = run_ranks(4, purposes)
    for rank, found in enumerate(results):
        assert found[1, 1, "context"] == [rank]
        assert found[1, 1, "data"] == [0, 1, 2, 3]
        assert found[2, 1, "context"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found[2, 1, "data"] == [rank % 2, rank % 2 + 2]
        assert found[4, 1, "context"] == [0, 1, 2, 3]
        assert found[4, 1, "data"] == [rank]
        assert found[2, 2, "context"] == found[2, 1, "context"]
        assert all(found[c, r, "loss"] == [0, 1, 2, 3] for c, r in ((1, 1), (2, 1), (2, 2), (1, 4)))
        assert found[2, 1, "fsdp"] == [0, 1, 2, 3]
        assert found[2, 2, "fsdp"] == [[0, 1], [2, 3]]
        assert found[1, 4, "fsdp"] == [[0], [1], [2], [3]]
        assert found["gradient"] == [[4.0, 6.0]]  # summed over data and context, not averaged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu' is not a device type; choose 'auto', 'cpu' or 'cuda'"),
        ({"timeout": 0.0}, "timeout: 0.0 s is out of range; give more than 0"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_distributed(**options)


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="torch sees no GPU; choose 'cpu'"):
        init_distributed(device="cuda")


def test_a_second_start_ignores_keys_of_the_first() -> None:
    """Two starts of three processes each, after one that died before rank 0 answered."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    for rank in (1, 2):
        store.set(f"padfree/nonce/{rank}", f"of a dead process {rank}")
    for start in range(2):
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda rank: fresh_store(store, rank, 3, timeout=20.0), range(3)))
        assert not any(own.check(["address"]) for own in found)
        found[0].set("address", str(start))
        assert [own.get("address") for own in found] == [str(start).encode()] * 3
    with pytest.raises(PeerLostError, match=r"^rank 0: ranks \[1, 2\] did not start within 0 s; read their logs$"):
        fresh_store(store, 0, 3, timeout=0.2)
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerLostError, match=r"^rank 1: rank 0 did not start within 0 s; read its log$"):
        fresh_store(store, 1, 3, timeout=0.2)


def in_turn(folder: Path, delay: Callable[[int], tuple[float, float]]) -> None:
    """Make process groups one after the other, with delays in seconds before each group and at its end."""
    found = []
    for group in range(4):
        before, after = delay(group)
        time.sleep(before)
        with distributed(device="cpu", timeout=20.0):
            total = torch.tensor([1 << (4 * dist.get_rank() + group)])
            dist.all_reduce(total)
            found.append(int(total))
            time.sleep(after)
    (folder / os.environ["RANK"]).write_text(str(found))


def launched(rank: int, world: int, variables: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", **variables})
    torch.set_num_threads(1)
    function(*arguments)


def first_is_late(group: int) -> tuple[float, float]:
    return (0.3, 0.3) if os.environ["RANK"] == "0" else (0.0, 0.0)


def others_are_late(group: int) -> tuple[float, float]:
    return (0.0, 0.0) if os.environ["RANK"] == "0" else (0.3, 0.3)


@pytest.mark.parametrize("delay", [first_is_late, others_are_late])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_process_groups_in_turn(launcher: str, delay: Callable[..., Any], tmp_path: Path) -> None:
    """torchrun itself hosts the store of its workers. Otherwise, rank 0 hosts the store."""
    world, variables = 3, {}
    if launcher == "torchrun":
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port, variables["TORCHELASTIC_USE_AGENT_STORE"] = store.port, "True"
    else:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
    variables["MASTER_PORT"] = str(port)
    processes = [
        rank_server().Process(target=launched, args=(rank, world, variables, in_turn, tmp_path, delay), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * world
    assert [(tmp_path / str(rank)).read_text() for rank in range(world)] == [str([0x111, 0x222, 0x444, 0x888])] * world
