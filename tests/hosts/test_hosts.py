"""Runs over several hosts: the numbers of one process, what is said when a host is lost, and going on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import decoders
from transformers import AutoTokenizer

from padfree.config import Config, config_from_dict
from padfree.packing import CostModel, plan_step
from padfree.packing.context_sizes import context_sizes
from padfree.planner.traffic import Placement, Traffic, step_traffic
from padfree.train.decide import decide
from padfree.train.run import train
from padfree.train.training_data import make_batcher
from tests.hosts.network import Host, connected_hosts, no_hosts_reason
from tests.models import save_with_tokenizer
from tests.train.loop_cases import lines

LIMIT = 400.0
"""Seconds for processes that start and end by themselves, on a machine with other things to do."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if reason := no_hosts_reason():
        pytest.skip(reason)
    with connected_hosts(3) as found:
        yield found


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_with_tokenizer(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder: Path, model: Path, kind: str, **sections: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{a}+{'1' * b}=", "response": str(a + b)} for a in range(4) for b in range(1, 5)]
    data = folder.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": [str(data)], "epochs": None},
        "batch": {"samples": 8, "max_tokens": 40},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "run": {"folder": str(folder), "steps": 3, "device": "cpu", "timeout": 120.0},
    }
    if kind == "rl":
        reward = "tests.hosts.worker:share_of_digits"
        values["rollout"] = {"reward": reward, "group": 2, "max_new_tokens": 6, "batch": 5}
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
    step_seconds: float = 0.0,
    own_folder: Path | None = None,
    among: Sequence[Host] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """torchrun on each of these hosts, which meet at the first one of `among`, all hosts of the run."""
    among = among or hosts
    (folder / "runs.json").write_text(json.dumps(runs))
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(among))),
        *("--nproc-per-node", str(processes), "--max-restarts", str(restarts), "--rdzv-id", folder.name),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{among[0].name}:29500"),
        *("-m", "tests.hosts.worker", str(folder / "runs.json")),
    ]
    env = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "PADFREE_CACHE": str(folder / "cache"),
        "STEP_SECONDS": str(step_seconds),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a host that comes back is told no address
    }
    return [host.start(launch, output=folder / f"{host.name}.log", env=env, own_folder=own_folder) for host in hosts]


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("host-*.log")))


def finish(processes: Sequence[subprocess.Popen[bytes]], folder: Path, *, code: int = 0) -> str:
    """Wait for them; what they and their workers printed."""
    deadline = time.monotonic() + LIMIT
    try:
        for process in processes:
            found = process.wait(timeout=max(deadline - time.monotonic(), 1.0))
            assert (found == 0) == (code == 0), said(folder)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"did not end within {LIMIT} s\n{said(folder)}") from None
    return said(folder)


def assert_same_run(folder: Path, expected: Path, tolerance: float = 1e-5) -> None:
    found = lines(folder)
    assert len(found) == len(lines(expected))
    for line, other in zip(found, lines(expected), strict=True):
        assert line == pytest.approx(other, rel=10 * tolerance, abs=tolerance)
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (folder, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "context inside a host": {"context": 2},
    "context over hosts": {"context": 4},
    "weights on each host": {"replicate": 2},
    "both": {"replicate": 2, "context": 2},
    "context by the row": {"context": "auto"},
}


def test_two_hosts_train_as_one_process_does(hosts: list[Host], model_folder: Path, tmp_path: Path) -> None:
    """And checkpoints that both have written are gone on with by one and by three hosts."""
    runs = []
    for kind in ("sft", "rl"):
        train(config_from_dict(settings(tmp_path / f"{kind} alone", model_folder, kind, run={"steps": 5})))
        for name, parallel in LAYOUTS.items():
            batch = {"max_tokens": 8} if parallel.get("context") == "auto" else {}
            runs.append(settings(tmp_path / f"{kind} {name}", model_folder, kind, parallel=parallel, batch=batch))
    more = {"steps": 5}
    finish(start(hosts[:2], runs, tmp_path), tmp_path)
    for kind in ("sft", "rl"):
        for name in LAYOUTS:
            assert [line["loss"] for line in lines(tmp_path / f"{kind} {name}")] == pytest.approx(
                [line["loss"] for line in lines(tmp_path / f"{kind} alone")][:3], rel=1e-5, abs=1e-6
            ), (kind, name)
    elsewhere = {"one": "data", "three": "both"}
    resumed = [
        settings(tmp_path / f"{kind} {elsewhere['one']}", model_folder, kind, run=more) for kind in ("sft", "rl")
    ]
    for run in resumed:
        train(config_from_dict(run))
    third = [settings(tmp_path / f"{kind} both", model_folder, kind, run=more) for kind in ("sft", "rl")]
    finish(start(hosts, third, tmp_path, processes=1), tmp_path)
    for kind in ("sft", "rl"):
        for name in elsewhere.values():
            assert_same_run(tmp_path / f"{kind} {name}", tmp_path / f"{kind} alone")


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


def test_hosts_send_what_a_dry_run_says(hosts: list[Host], tmp_path: Path) -> None:
    """Counted on the links and inside the hosts, frames' headers taken off. What is left over is what gloo writes
    before each message, and messages of a few bytes: numbers of the step, signs of life."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
    model = save_with_tokenizer(tmp_path / "model", max_position_embeddings=2048, **sizes)
    rows = [{"prompt": "1" * (150 + 29 * number), "response": "2"} for number in range(8)]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = {"compile": "none", "reshard": False, "checkpointing": "none"}
    runs = [
        settings(
            tmp_path / name, model, "sft", data={"path": [str(data)]}, run={"steps": 2}, parallel={**fixed, **parallel},
            batch={"max_tokens": 120 if parallel.get("context") == "auto" else 600},
        )
        for name, parallel in TRAFFIC.items()
    ]  # fmt: skip
    finish(start(hosts[:2], runs, tmp_path, step_seconds=0.5), tmp_path)
    headers: list[float] = []
    for run in runs:
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
    assert max(headers) < 0.03


def planned_traffic(config: Config) -> list[Traffic]:
    """Of the steps of a run of two hosts of two processes, as `--dry-run` counts it."""
    decided = decide(config, processes=4, device_type="cpu", dry=True, planned=True)
    by_row = config.parallel.context == "auto"
    context = 1 if by_row else config.parallel.context
    placement = Placement(ranks=4, hosts=2, context=context, replicate=config.parallel.replicate)
    batches = islice(make_batcher(config, decided.source.samples), config.run.steps)
    plans = [
        plan_step(
            [len(sample) for group in groups for sample in group],
            ranks=4 // context,
            max_tokens=config.batch.max_tokens * context,
            cost=CostModel.from_config(decided.model.config),
            contexts=context_sizes(4) if by_row else (1,),
        )
        for groups in batches
    ]
    return [step_traffic(config, decided.model, plan, placement, "gloo") for plan in plans]


def test_a_folder_that_hosts_do_not_share_is_refused(hosts: list[Host], model_folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    run = settings(tmp_path / "own" / "run", model_folder, "sft")
    data = tmp_path / "rows.jsonl"
    (own / "rows.jsonl").rename(data)
    run["data"]["path"] = [str(data)]
    output = finish(start(hosts[:2], [run], tmp_path, processes=1, own_folder=own), tmp_path, code=1)
    line = f"run.folder: {own / 'run'} on host-2 is not the folder of rank 0"
    assert output.count(f"rank 0 ended: {line}") == 1, output
    assert output.count(f"rank 1 ended: {line}") == 1, output


def wait_for_steps(folder: Path, count: int, processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    deadline, metrics = time.monotonic() + LIMIT, folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert time.monotonic() < deadline, said(logs)
        assert all(process.poll() is None for process in processes), said(logs)
        time.sleep(0.1)


def test_short_outages_do_no_harm_and_a_lost_host_may_come_back(
    hosts: list[Host], model_folder: Path, tmp_path: Path
) -> None:
    """A link that is down and a host that is stopped for 5 s; then a host whose processes are all killed."""
    first, second = hosts[:2]
    run = settings(tmp_path / "run", model_folder, "sft", checkpoint={"every": 2}, run={"steps": 14, "timeout": 60.0})
    alone = settings(tmp_path / "alone", model_folder, "sft", run={"steps": 14})
    train(config_from_dict(alone))
    started = start([first, second], [run], tmp_path, processes=1, restarts=2, step_seconds=0.5)
    wait_for_steps(tmp_path / "run", 2, started, tmp_path)
    second.cut_off()
    time.sleep(5)
    second.connect()
    wait_for_steps(tmp_path / "run", 4, started, tmp_path)
    second.signal(signal.SIGSTOP)
    time.sleep(5)
    second.signal(signal.SIGCONT)
    wait_for_steps(tmp_path / "run", 7, started, tmp_path)
    assert "ended" not in said(tmp_path)
    second.signal(signal.SIGKILL)
    started[1].wait()
    again = start([second], [run], tmp_path, processes=1, restarts=2, step_seconds=0.5, among=[first, second])
    output = finish([started[0], *again], tmp_path)
    assert "rank 0 ended: rank 0 on host-1: rank 1 on host-2 is gone, stuck or cut off" in output, output
    assert_same_run(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("how", ["cut off", "stopped", "first host killed"])
def test_a_host_that_stays_away_is_named(how: str, hosts: list[Host], model_folder: Path, tmp_path: Path) -> None:
    first, second = hosts[:2]
    run = settings(tmp_path / "run", model_folder, "sft", run={"steps": 1000, "timeout": 8.0})
    started = start([first, second], [run], tmp_path, processes=1, step_seconds=0.2)
    wait_for_steps(tmp_path / "run", 2, started, tmp_path)
    if how == "cut off":
        second.cut_off()
    elif how == "stopped":
        second.signal(signal.SIGSTOP)
    else:
        first.signal(signal.SIGKILL)
    expected = []
    if how != "first host killed":
        expected.append("rank 0 ended: rank 0 on host-1: rank 1 on host-2 is gone, stuck or cut off")
    if how != "stopped":
        expected.append(
            "rank 1 ended: rank 1 on host-2: rank 0 on host-1, where the store of the run is, cannot be reached"
        )
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not all(line in said(tmp_path) for line in expected):
        time.sleep(0.2)
    output = said(tmp_path)
    for host in hosts[:2]:
        host.connect()
        host.signal(signal.SIGKILL)
    for line in expected:
        assert line in output, output
