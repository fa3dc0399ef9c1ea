"""The API server for agent programs under load: a run with and a run without an attack, each in its own process.

    python bench/gateway_load.py                      2,000 idle connections, 50 slow peers, 10,000 malformed requests
    python bench/gateway_load.py --steps 5 --idle 300 --slow 10 --malformed 1000

The environment is a program that makes two HTTP calls per episode. The attack comes from another process on the
loopback address. Half of its requests use the secret key of an episode. The benchmark compares the number of steps, all
training metrics, seconds per step, and peak memory. In the run without an attack, the attacker's process keeps one core
busy but sends nothing, so that both runs have equally many cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from padfree.config import config_from_dict
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.testing.arithmetic import problems, train_tokenizer, write_model, write_rows
from padfree.train.run import train

ADDRESS = "PADFREE_BENCH_ADDRESS"
MOST_SECONDS = 300.0


# The run


def call(url: str, prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 8}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body), timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
    """Play an episode of a program with two calls. Also write the address of the server to a file."""
    url = await policy.base_url()
    path = Path(os.environ[ADDRESS])
    new = path.with_name(f"{path.name}.{id(policy)}")
    new.write_text(url)
    new.replace(path)
    said = ""
    for _ in range(2):
        said += await asyncio.to_thread(call, url, prompt.row["prompt"] + said)
    return policy.trajectory(float(len(said) % 7))


def run(folder: Path, name: str, steps: int) -> None:
    config = config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": 16, "max_tokens": 4096},
            "rollout": {"environment": "gateway_load:episode", "samples_per_prompt": 4, "max_new_tokens": 40},
            "loss": {"kind": "clip"},
            "checkpoint": {"export": False},
            "run": {"folder": str(folder / name), "steps": steps, "device": "cpu"},
        }
    )
    ended = [time.monotonic()]
    train(config, on_step=lambda metrics: ended.append(time.monotonic()))
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = {
        "steps": len(lines),
        "seconds": [later - sooner for sooner, later in pairwise(ended[1:])],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trained": [[line["loss"], line["reward"], line["gradient_norm"]] for line in lines],
    }
    (folder / f"{name}.json").write_text(json.dumps(found))


# The attack

HEADS = (
    b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"nonsense\r\n\r\n",
    b"POST /0123456789abcdef/v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000,
    b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 4000, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"A" * 50_000,
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip
BODIES = (
    b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": [1, 2, 999999]}', b'{"prompt": [-1]}', b'{"prompt": [true]}',
    b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 50_000, b'{"prompt": "a", "n": 100000}', b'{"messages": 5}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "min_p": 0.5}', b'{"prompt": "a", "what": 1}', b'{"prompt": [[1]]}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "' + b"a" * 100_000 + b'"}',
)  # fmt: skip


def attack(address: Path, idle: int, slow: int, malformed: int) -> dict[str, Any]:
    """Attack the server until all requests are sent or the run has ended."""
    begin = time.monotonic()
    while not address.exists() and time.monotonic() - begin < MOST_SECONDS:
        time.sleep(0.05)
    begin, outcomes, rng = time.monotonic(), Counter[str](), random.Random(0)
    held: list[socket.socket] = []
    sent = 0
    port = int(urlsplit(address.read_text()).port or 0)
    while sent < malformed and time.monotonic() - begin < MOST_SECONDS:
        try:
            if len(held) < idle + slow:
                made = socket.create_connection(("127.0.0.1", port), timeout=10)
                path = urlsplit(address.read_text()).path
                head = f"POST {path}/completions HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{{"
                made.sendall(b"" if len(held) < idle else rng.choice([head.encode(), b"POST / HT"]))
                held.append(made)
                if len(held) % 10:
                    continue
            with socket.create_connection(("127.0.0.1", port), timeout=30) as made:
                body, path = rng.choice(BODIES), urlsplit(address.read_text()).path
                head = f"POST {path}/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                sent += 1
                made.sendall(rng.choice(HEADS) if sent % 2 else head.encode() + body)
                made.shutdown(socket.SHUT_WR)
                answer = made.recv(1 << 12)[9:12].decode() or "closed"
                outcomes[answer] += 1
            if sent % 100 == 0 and held:  # close a connection; another one is opened instead
                held.pop(rng.randrange(len(held))).close()
        except TimeoutError:
            outcomes["hangs"] += 1
        except ConnectionRefusedError:
            outcomes["refused: the run has ended"] += 1
            break
        except OSError:
            outcomes["closed"] += 1
    for one in held:
        one.close()
    return {"sent": sent, "seconds": time.monotonic() - begin, "outcomes": dict(outcomes), "held": len(held)}


def spin(address: Path) -> dict[str, Any]:
    """Keep a core busy without sending anything, for the run without an attack."""
    while not address.with_name("ended").exists():
        sum(range(10_000))
    return {}


# Both


def compared(folder: Path, steps: int, idle: int, slow: int, malformed: int) -> dict[str, Any]:
    rows = write_rows(folder / "prompts.jsonl", problems(256, seed=1))
    write_model(folder / "model", train_tokenizer(rows), 64)
    found: dict[str, Any] = {}
    for name in ("peace", "attacked"):
        address = folder / f"{name}-address" / "url"
        address.parent.mkdir()
        script = [sys.executable, str(Path(__file__).resolve())]
        environment = {**os.environ, ADDRESS: str(address)}
        numbers = [f"--idle={idle}", f"--slow={slow}", f"--malformed={malformed}"]
        attacker = subprocess.Popen(
            [*script, f"--attack={address}", *numbers, *(["--spin"] if name == "peace" else [])],
            stdout=subprocess.PIPE,
            text=True,
        )
        trained = subprocess.run([*script, f"--run={folder}", f"--name={name}", f"--steps={steps}"], env=environment)
        (address.parent / "ended").touch()
        said, _ = attacker.communicate(timeout=MOST_SECONDS)
        assert trained.returncode == 0, f"the run in {name} has failed"
        found[name] = json.loads((folder / f"{name}.json").read_text())
        found["attack"] = json.loads(said)
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 60), ("idle", 2000), ("slow", 50), ("malformed", 10_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("run", "name", "attack"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--spin", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        run(Path(given.run), given.name, given.steps)
        return {}
    if given.attack:
        path = Path(given.attack)
        found = spin(path) if given.spin else attack(path, given.idle, given.slow, given.malformed)
        sys.stdout.write(json.dumps(found))
        return found
    with tempfile.TemporaryDirectory() as name:
        found = compared(Path(name), given.steps, given.idle, given.slow, given.malformed)
    peace, attacked = found["peace"], found["attacked"]
    for name, one in (("in peace", peace), ("attacked", attacked)):
        seconds = sorted(one["seconds"])
        print(
            f"{name}: {one['steps']} steps, {seconds[len(seconds) // 2]:.3f} s per step (median; {seconds[0]:.3f} to "
            f"{seconds[-1]:.3f}), {one['memory'] / 2**20:.0f} MiB at most"
        )
    same = peace["trained"] == attacked["trained"]
    print(f"the same losses, rewards and gradient norms: {same}; {json.dumps(found['attack'])}")
    return found


if __name__ == "__main__":
    import gateway_load  # the settings name this module, which differs from __main__

    gateway_load.main()
