"""The environment of a run: streams, signals, disks, clocks, and user functions that end the process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import padfree.train.disk as disk
from padfree.cli.main import STOPPED, main
from tests.train.processes import alone, ended, forked
from tests.train.test_faults import before_step, until_signalled, write_recipe

STEPS = 8


def finished(run: Path) -> bool:
    """Whether all steps, the last checkpoint and the exported model exist."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    newest = (run / "checkpoints" / "latest").read_text()
    exported = (run / "model" / "model.safetensors").exists()
    return [json.loads(line)["step"] for line in lines] == [*range(STEPS)] and newest == "step-00000008" and exported


# Streams


def without_reader(_: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def nobody_reads(_: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    for block in (1 << 16, 1):
        try:
            while True:
                os.write(write, b"x" * block)  # full to the last byte
        except BlockingIOError:
            pass
    os.set_blocking(write, True)
    os.set_inheritable(read, True)  # it stays open, and nobody reads it
    os.dup2(write, 1)


def full_disk(_: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def ascii_stream(folder: Path) -> None:
    sys.stdout = open(folder / "ascii", "w", encoding="ascii")  # noqa: SIM115


STREAMS: dict[str, Callable[[Path], None]] = {
    "reader": without_reader,
    "blocked": nobody_reads,
    "full": full_disk,
    "größe": ascii_stream,
}


def with_streams(folder: Path) -> dict[str, Any]:
    recipe = write_recipe(folder)
    found = {}
    for name, redirect in STREAMS.items():

        def run(_: int, name: str = name, redirect: Callable[[Path], None] = redirect) -> int:
            redirect(folder)
            return main(["sft", str(recipe), f"run.folder={folder / name}"])

        child, read = forked(run, folder / "output")
        code = ended(child)
        assert code == 0, (name, (folder / "output").read_text())
        found[name] = [code, finished(folder / name)]
        os.close(read)
    return {**found, "output": (folder / "output").read_text()}


def test_streams_that_fail_change_nothing(tmp_path: Path) -> None:
    found = alone(with_streams, tmp_path)
    output = found.pop("output")
    assert found == {name: [0, True] for name in STREAMS}, output
    assert "padfree sft: stdout cannot be written (Broken pipe); the run continues without it" in output
    assert "Traceback" not in output


# Signals


def with_signals(folder: Path) -> dict[str, Any]:
    """Each signal in step 3; also with a reader of stdout that the signal ends, as in `| tee` and Ctrl-C."""
    recipe, found = write_recipe(folder), {}
    cases = [(name, False) for name in ("SIGHUP", "SIGUSR1", "SIGXCPU")] + [("SIGINT", True)]
    for name, piped in cases:

        def run(pipe: int, name: str = name, piped: bool = piped) -> int:
            if piped:
                without_reader(folder)
            before_step(3, lambda: (os.write(pipe, b"x"), until_signalled()))
            return main(["sft", str(recipe), f"run.folder={folder / name}"])

        child, read = forked(run, folder / "output")
        assert os.read(read, 1) == b"x", (folder / "output").read_text()
        os.kill(child, signal.Signals[name])
        code = ended(child)
        events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
        newest = (folder / name / "checkpoints" / "latest").read_text()
        found[name] = [code, newest, events[-1]["kind"], events[-1].get("signal")]
        os.close(read)
    return {**found, "output": (folder / "output").read_text()}


def test_signals_save_and_end_the_run(tmp_path: Path) -> None:
    found = alone(with_signals, tmp_path)
    output = found.pop("output")
    for name, state in found.items():
        assert state == [STOPPED, "step-00000004", "stop", name], output
        assert f"padfree sft: {name}: the run finishes its current step or evaluation" in output
    assert "Traceback" not in output


# User functions

REWARDS = {
    "exits": "import sys\ndef reward(response, row): sys.exit(0)",
    "leaves": "import os\ndef reward(response, row): os._exit(0)",
    "interrupts": "def reward(response, row): raise KeyboardInterrupt",
    "generator": "def reward(response, row): raise GeneratorExit",
    "own": "class Own(BaseException): pass\ndef reward(response, row): raise Own('mine')",
    "module": "import sys\nsys.exit(0)\ndef reward(response, row): return 0.0",
    "import_leaves": "import os\nos._exit(0)\ndef reward(response, row): return 0.0",
}


def with_rewards(folder: Path) -> dict[str, Any]:
    write_recipe(folder)
    (folder / "rl.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    os.chdir(folder)
    found = {}
    for name, text in REWARDS.items():
        (folder / f"own_{name}.py").write_text(text)
        output = folder / f"output_{name}"
        (folder / f"{name}.toml").write_text(f"""
            model.path = "{folder / "model"}"
            data.path = ["{folder / "rl.jsonl"}"]
            batch = {{ samples = 4, max_tokens = 64 }}
            loss = {{ kind = "clip" }}
            rollout = {{ reward = "own_{name}:reward", samples_per_prompt = 2, max_new_tokens = 2 }}
            run = {{ folder = "{folder / name}", steps = 2, device = "cpu" }}
        """)
        child, read = forked(lambda _, name=name: main(["rl", str(folder / f"{name}.toml")]), output)  # type: ignore[misc]
        code = ended(child)
        said = [line for line in output.read_text().splitlines() if line.startswith("padfree rl: ")]
        found[name] = [code, len(said), said[-1] if said else output.read_text()]
        os.close(read)
    return found


def test_a_reward_cannot_end_a_run_in_silence(tmp_path: Path) -> None:
    for name, (code, lines, line) in alone(with_rewards, tmp_path).items():
        assert (code, lines) == (1, 1), (name, line)
        assert f"own_{name}" in line
        assert any(word in line for word in ("SystemExit", "os._exit(0)", "KeyboardInterrupt", "GeneratorExit", "Own"))


# Disks and clocks


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("free", "inodes", "changes", "message"),
    [
        (0.001, 10**6, [], "run.folder: {run} has 0.00 MiB free, but a checkpoint takes about "),
        (3.5, 10**6, [], "; free space, or give a folder on another disk, or set checkpoint.export=false"),
        (1e6, 3, [], "run.folder: the file system of {run} has space for only 3 more files"),
        (3.5, 10**6, ["checkpoint.export=false"], None),
        (1e6, None, [], None),
    ],
)
def test_a_disk_that_cannot_hold_a_checkpoint_is_refused(
    free: float,
    inodes: int | None,
    changes: list[str],
    message: str | None,
    dry: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size  # float32: a checkpoint takes three times this
    monkeypatch.setattr(disk, "free_space", lambda folder: (int(free * weights), inodes))
    capsys.readouterr()
    line = ["sft", str(recipe), "run.steps=1", *changes, *(["--dry-run"] if dry else [])]
    assert main(line) == (0 if message is None else 1)
    error = capsys.readouterr().err
    assert error.count("padfree sft: ") == (message is not None)
    assert message is None or message.format(run=run) in error
    assert run.exists() == (message is None and not dry), "a refused run writes nothing"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_space_is_counted_as_it_is_used(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path)
    seen: list[disk.DiskUse] = []
    counted = disk.disk_use
    monkeypatch.setattr(disk, "disk_use", lambda *args: seen.append(counted(*args)) or seen[-1])
    assert main(["sft", str(recipe), "run.steps=1", f"optimizer.name={optimizer}"]) == 0
    run = tmp_path / "run"
    saved = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.safetensors"))
    exported = (run / "model" / "model.safetensors").stat().st_size
    assert 0 <= saved - seen[0].checkpoint < 60_000, "headers and random states"
    assert 0 <= exported - seen[0].export < 20_000
    assert disk.free_space(run / "not" / "there")[0] > 0


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.time` jumps by years; durations use the monotonic clock."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    recipe, real = write_recipe(tmp_path), time.time
    jumps = iter([0, 10**8, -(10**8), 10**9, -(10**9)] * 100_000)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert main(["sft", str(recipe)]) == 0
    assert finished(tmp_path / "run")
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert 0 < json.loads(line)["seconds"] < 600
