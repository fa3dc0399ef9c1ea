"""Runs over several hosts: the numbers of one process, what is said when a host is lost, and going on afterwards.

There are two starts for all tests, of processes that have imported everything:

    two hosts of two      every layout; runs whose bytes are counted; a folder that is refused; then the first host is
                          killed
    three hosts of one    checkpoints of the two hosts are gone on with; short outages; a host is killed and comes back;
                          then one host is cut off and another one stopped for good
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from padfree.config import Config, config_from_dict
from padfree.packing import CostModel, plan_step
from padfree.packing.context_sizes import context_sizes
from padfree.testing.models import save_with_tokenizer
from padfree.tools.planner.traffic import Placement, Traffic, step_traffic
from padfree.train.batcher import make_batcher
from padfree.train.preflight import preflight
from padfree.train.run import train
from tests.hosts.network import Host
from tests.ranks import torchrun
from tests.train.trainer_cases import lines

LIMIT = 400.0
"""Seconds for processes that start and end by themselves, on a machine with other things to do."""

pytestmark = pytest.mark.slow


def settings(folder: Path, model: Path, kind: str, **sections: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{a}+{'1' * b}=", "response": str(a + b)} for a in range(4) for b in range(1, 5)]
    data = folder.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": [str(data)], "epochs": None},
        "batch": {"samples": 8, "max_tokens": 40},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(folder), "steps": 3, "device": "cpu", "timeout": 120.0},
    }
    if kind == "rl":
        reward = "tests.hosts.worker:share_of_digits"
        values["rollout"] = {"reward": reward, "samples_per_prompt": 2, "max_new_tokens": 6, "max_concurrent": 5}
        values["loss"] = {"kind": "clip", "temperature": 0.8}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return values


def start(
    hosts: Sequence[Host],
    runs: list[dict[str, Any]],
    folder: Path,
    *,
    processes: int = 2,
    restarts: int = 0,
    own_folder: Path | None = None,
    among: Sequence[Host] | None = None,
) -> list[Any]:
    """torchrun on each of these hosts, which meet at the first one of `among`, all hosts of the run.

    It goes through `runs`, which are as `tests.hosts.worker` wants them.
    """
    among = among or hosts
    (folder / "runs.json").write_text(json.dumps(runs))
    options = [
        *("--nnodes", str(len(among)), "--nproc-per-node", str(processes), "--max-restarts", str(restarts)),
        *("--rdzv-id", folder.name, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{among[0].name}:29500"),
    ]
    words = (options, str(Path(__file__).with_name("worker.py")), str(folder / "runs.json"))
    env = {
        "OMP_NUM_THREADS": "1",
        "PADFREE_CACHE": str(folder / "cache"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a host that comes back is told no address
    }
    return [
        host.fork(torchrun, *words, output=folder / f"{host.name}.log", env=env, own_folder=own_folder)
        for host in hosts
    ]


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("host-*.log")))


def assert_same_run(folder: Path, expected: Path, tolerance: float = 1e-5) -> None:
    found = lines(folder)
    assert len(found) == len(lines(expected))
    for line, other in zip(found, lines(expected), strict=True):
        assert line == pytest.approx(other, rel=10 * tolerance, abs=tolerance)
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (folder, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance)


def wait_until(ready: Callable[[], bool], folder: Path, processes: Sequence[Any] = ()) -> None:
    """Look again and again, as long as these processes run."""
    deadline = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < deadline, said(folder)
        assert all(process.is_alive() for process in processes), said(folder)
        time.sleep(0.1)


def steps_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def endless(folder: Path, model: Path) -> dict[str, Any]:
    """A run that only a fault ends: it notices one soon, and does not take a busy machine for one."""
    return {"settings": settings(folder, model, "sft", run={"steps": 100_000, "timeout": 30.0}), "pause": 0.2}


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "both": {"replicate": 2, "context": 2},
    "context inside a host": {"context": 2},
    "context over hosts": {"context": 4},
    "context by the row": {"context": "auto"},
}
SAVED = ("data", "both")
"""Runs that are gone on with. SFT in other layouts is what bytes are counted of."""


TRAFFIC: dict[str, dict[str, Any]] = {
    "weights over hosts": {},
    "weights gathered twice": {"reshard": True},
    "weights on each host": {"replicate": 2},
    "context inside a host": {"context": 2, "replicate": 2, "checkpointing": "full"},
    "context over hosts": {"context": 4},
    "a ring over hosts": {"context": 4, "method": "ring"},
    "heads over hosts": {"context": 4, "method": "ulysses"},
    "context by the row": {"context": "auto"},
}
HEADER = 66
"""Bytes of Ethernet, IP and TCP with time stamps, of each frame: data and acknowledgements alike."""


@dataclass(frozen=True, kw_only=True)
class TwoHosts:
    """What two hosts of two processes have left behind."""

    folder: Path
    counted: list[dict[str, Any]]  # settings
    output: str


def counted_runs(folder: Path) -> list[dict[str, Any]]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
    model = save_with_tokenizer(folder / "larger", max_position_embeddings=2048, **sizes)
    rows = [{"prompt": "1" * (150 + 29 * number), "response": "2"} for number in range(8)]
    data = folder / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = {"compile": "none", "reshard": False, "checkpointing": "none"}
    return [
        settings(
            folder / f"counted {name}", model, "sft", data={"path": [str(data)]}, run={"steps": 2},
            parallel={**fixed, **parallel}, checkpoint={"export": False},
            batch={"max_tokens": 120 if parallel.get("context") == "auto" else 600},
        )
        for name, parallel in TRAFFIC.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def two_hosts(hosts: list[Host], model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoHosts:
    folder = tmp_path_factory.mktemp("two")
    runs = []
    for kind in ("sft", "rl"):
        for name in SAVED if kind == "sft" else LAYOUTS:
            run = settings(
                folder / f"{kind} {name}", model_folder, kind, parallel=LAYOUTS[name],
                batch={"max_tokens": 8} if LAYOUTS[name].get("context") == "auto" else {},
                checkpoint={"export": name in SAVED}, run={"steps": 3 if name in SAVED else 2},
            )  # fmt: skip
            runs.append({"settings": run})
    counted = counted_runs(folder)
    runs += [{"settings": run, "counted": True} for run in counted]
    own = folder / "own"
    own.mkdir()
    refused = settings(own / "run", model_folder, "sft")
    refused["data"]["path"] = [str(folder / "rows.jsonl")]
    runs += [{"settings": refused, "refused": True}, endless(folder / "endless", model_folder)]
    started = start(hosts[:2], runs, folder, own_folder=own)
    wait_until(lambda: steps_of(folder / "endless") >= 2, folder, started)
    hosts[0].signal(signal.SIGKILL)
    wait_until(lambda: said(folder).count("on host-2:") >= 2, folder)
    hosts[1].signal(signal.SIGKILL)
    for process in started:
        process.join()
    return TwoHosts(folder=folder, counted=counted, output=said(folder))


def run_alone(folder: Path, model: Path, kind: str, steps: int) -> Path:
    """One process, undisturbed."""
    train(config_from_dict(settings(folder, model, kind, run={"steps": steps})))
    return folder


@pytest.fixture(scope="module")
def alone(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return {kind: run_alone(folder / kind, model_folder, kind, 5) for kind in ("sft", "rl")}


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_two_hosts_train_as_one_process_does(
    kind: str, two_hosts: TwoHosts, alone: dict[str, Path], model_folder: Path
) -> None:
    """And one process goes on with what they have saved."""
    for name in SAVED if kind == "sft" else LAYOUTS:
        expected = losses(alone[kind])[: 3 if name in SAVED else 2]
        assert losses(two_hosts.folder / f"{kind} {name}") == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    train(config_from_dict(settings(two_hosts.folder / f"{kind} data", model_folder, kind, run={"steps": 5})))
    assert_same_run(two_hosts.folder / f"{kind} data", alone[kind])


def test_all_layouts_of_two_hosts_have_the_losses_of_one_process(two_hosts: TwoHosts, tmp_path: Path) -> None:
    run = two_hosts.counted[0]
    train(config_from_dict({**run, "run": {**run["run"], "folder": str(tmp_path / "alone")}}))
    expected = losses(tmp_path / "alone")
    assert len(expected) == 2
    for other in two_hosts.counted:
        folder = Path(other["run"]["folder"])
        assert losses(folder) == pytest.approx(expected, rel=1e-5, abs=1e-6), folder.name


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]


def test_hosts_send_what_a_dry_run_says(hosts: list[Host], two_hosts: TwoHosts) -> None:
    """Counted on the links and inside the hosts, frames' headers taken off. What is left over is what gloo writes
    before each message, and messages of a few bytes: numbers of the step, signs of life."""
    headers: list[float] = []
    for run in two_hosts.counted:
        config = config_from_dict(run)
        planned = planned_traffic(config)
        for index, host in enumerate(hosts[:2]):
            counts = json.loads((Path(config.run.folder) / f"sent-{host.name}.json").read_text())
            for number, (before, after) in enumerate(pairwise(counts), start=1):
                inside, between = (
                    [now - then for then, now in zip(before[device], after[device], strict=True)]
                    for device in ("lo", "eth0")
                )
                headers.append(HEADER * between[1] / between[0])
                for (sent, frames), promised in zip((inside, between), planned[number].of_host(index), strict=True):
                    payload = sent - HEADER * frames
                    assert promised <= payload <= 1.005 * promised + 100_000, (config.run.folder, host.name, number)
    assert len(headers) == 2 * len(TRAFFIC)
    assert max(headers) < 0.03


def planned_traffic(config: Config) -> list[Traffic]:
    """Of the steps of a run of two hosts of two processes, as `--dry-run` counts it."""
    preflight_result = preflight(config, processes=4, device_type="cpu", dry=True, planned=True)
    by_row = config.parallel.context == "auto"
    context = 1 if by_row else config.parallel.context
    placement = Placement(ranks=4, hosts=2, context=context, replicate=config.parallel.replicate)
    batches = islice(make_batcher(config, preflight_result.source.samples), config.run.steps)
    plans = [
        plan_step(
            [len(sample) for group in groups for sample in group],
            ranks=4 // context,
            max_tokens=config.batch.max_tokens * context,
            cost=CostModel.from_config(preflight_result.model.config),
            contexts=context_sizes(4) if by_row else (1,),
        )
        for groups in batches
    ]
    return [
        step_traffic(config.parallel, config.model.dtype, preflight_result.model, plan, placement, "gloo")
        for plan in plans
    ]


def test_a_folder_that_hosts_do_not_share_is_refused(two_hosts: TwoHosts) -> None:
    line = f"refused: run.folder: {two_hosts.folder / 'own' / 'run'} on host-2 is not the folder of rank 0"
    for rank in range(4):
        assert two_hosts.output.count(f"rank {rank} {line}") == 1, two_hosts.output


def test_the_host_of_rank_0_is_named_when_it_is_killed(two_hosts: TwoHosts) -> None:
    for rank in (2, 3):
        line = f"rank {rank} ended: rank {rank} on host-2: ranks 0 and 1 on host-1, where the rendezvous store is, "
        assert f"{line}cannot be reached" in two_hosts.output, two_hosts.output


def test_three_hosts_go_on_after_outages_and_name_who_stays_away(
    hosts: list[Host], two_hosts: TwoHosts, alone: dict[str, Path], model_folder: Path, tmp_path: Path
) -> None:
    _, second, third = hosts
    resumed = [
        {"settings": settings(two_hosts.folder / f"{kind} both", model_folder, kind, run={"steps": 5})}
        for kind in ("sft", "rl")
    ]
    disturbed = settings(tmp_path / "run", model_folder, "sft", checkpoint={"every": 2}, run={"steps": 10})
    runs = [*resumed, {"settings": disturbed, "pause": 0.4}, endless(tmp_path / "endless", model_folder)]
    started = start(hosts, runs, tmp_path, processes=1, restarts=2)
    undisturbed = run_alone(tmp_path / "alone", model_folder, "sft", 10)

    wait_until(lambda: steps_of(tmp_path / "run") >= 2, tmp_path, started)
    second.cut_off()
    third.signal(signal.SIGSTOP)
    time.sleep(5)
    second.connect()
    third.signal(signal.SIGCONT)
    wait_until(lambda: steps_of(tmp_path / "run") >= 5, tmp_path, started)
    assert "ended" not in said(tmp_path), "outages that are shorter than run.timeout do not show"

    third.signal(signal.SIGKILL)
    started[2].join()
    started[2:] = start([third], runs, tmp_path, processes=1, restarts=2, among=hosts)
    wait_until(lambda: steps_of(tmp_path / "endless") >= 2, tmp_path, started)
    assert "rank 0 ended: rank 0 on host-1: rank 2 on host-3 is gone, stuck or cut off" in said(tmp_path)
    assert_same_run(tmp_path / "run", undisturbed)
    for kind, path in alone.items():
        assert_same_run(two_hosts.folder / f"{kind} both", path)

    second.cut_off()
    third.signal(signal.SIGSTOP)
    expected = [
        "rank 0 ended: rank 0 on host-1: rank 1 on host-2, rank 2 on host-3 are gone, stuck or cut off",
        "rank 1 ended: rank 1 on host-2: rank 0 on host-1, where the rendezvous store is, cannot be reached",
    ]
    wait_until(lambda: all(line in said(tmp_path) for line in expected), tmp_path)
    second.connect()
    for host in hosts:
        host.signal(signal.SIGKILL)
