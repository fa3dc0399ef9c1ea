"""What torchrun starts on the hosts of the tests.

tests/hosts/worker.py FILE            goes through the runs of a JSON file, one after the other

    settings    of the run, its timeout among them
    pause       seconds that each step takes longer
    counted     whether what hosts send is counted after each step
    refused     whether a ValueError is what it should end with; the next run follows then
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from padfree.config import config_from_dict
from padfree.distributed import PeerLostError, distributed
from padfree.record import run_folder
from padfree.train.run import train
from tests.ranks import as_started_by_torchrun


def share_of_digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter.isdigit() for letter in response) / 6 + len(row["prompt"]) / 100


def sent() -> dict[str, tuple[int, int]]:
    """Bytes and frames that this host has sent: over its link, and to itself."""
    folders = {name: Path("/sys/class/net") / name / "statistics" for name in ("eth0", "lo")}
    return {
        name: (int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text()))
        for name, folder in folders.items()
    }


def run_all(path: Path) -> int:
    runs = json.loads(path.read_text())
    try:
        with distributed(device="cpu", timeout=runs[0]["settings"]["run"]["timeout"]):
            for run in runs:
                # groups of a run have its timeout from the beginning, that of all processes lasts
                _set_pg_timeout(timedelta(seconds=run["settings"]["run"]["timeout"]))
                run_one(run)
    except (ValueError, PeerLostError) as error:
        say(f"ended: {error}")
        return 1
    return 0


def say(text: str) -> None:
    print(f"{socket.gethostname()} rank {os.environ['RANK']} {text}", flush=True)  # noqa: T201


def run_one(run: dict[str, Any]) -> None:
    counts: list[dict[str, tuple[int, int]]] = []

    def on_step(_: Any) -> None:
        if run.get("counted"):
            dist.barrier()  # all ranks are here, and nothing is on its way any more
            counts.append(sent())
            dist.barrier()
        time.sleep(run.get("pause", 0.0))

    if run.get("refused"):
        with mock.patch.object(run_folder, "SHOWN_SECONDS", 2.0):  # its folder is not going to be shared
            try:
                train(config_from_dict(run["settings"]))
            except ValueError as error:
                say(f"refused: {error}")
        return
    train(config_from_dict(run["settings"]), on_step=on_step)
    if run.get("counted") and os.environ["LOCAL_RANK"] == "0":
        folder = Path(run["settings"]["run"]["folder"])
        (folder / f"sent-{socket.gethostname()}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    as_started_by_torchrun()
    sys.exit(run_all(Path(sys.argv[1])))
