"""What torchrun starts on the hosts of the tests.

python -m tests.hosts.worker FILE     trains with each of the settings in the file, one after the other
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padfree.config import config_from_dict
from padfree.distributed import PeerLostError, distributed
from padfree.train.run import train


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
        with distributed(device="cpu", timeout=runs[0]["run"]["timeout"]):
            for run in runs:
                run_one(run)
    except (ValueError, PeerLostError) as error:
        print(f"{socket.gethostname()} rank {os.environ['RANK']} ended: {error}", flush=True)  # noqa: T201
        return 1
    return 0


def run_one(run: dict[str, Any]) -> None:
    counts: list[dict[str, tuple[int, int]]] = []
    pause = float(os.environ.get("STEP_SECONDS", 0))

    def on_step(_: Any) -> None:
        time.sleep(pause / 2)  # all ranks are here, and nothing is on its way any more
        counts.append(sent())
        time.sleep(pause / 2)

    train(config_from_dict(run), on_step=on_step)
    if os.environ["LOCAL_RANK"] == "0":
        (Path(run["run"]["folder"]) / f"sent-{socket.gethostname()}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(run_all(Path(sys.argv[1])))
