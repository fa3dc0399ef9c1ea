"""Runs that are killed, stopped, out of resources, or given unusable data."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import padfree.distributed.peers as peers
from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import latest_in, step_of
from padfree.cli.main import main
from padfree.config import Config
from padfree.distributed import Mesh, failing_together, make_mesh
from padfree.errors import UserError
from padfree.record.metrics_file import MetricsFile
from padfree.sample import Sample
from padfree.stop_signals import SAME_REQUEST_SECONDS
from padfree.testing.models import save_with_tokenizer
from padfree.train.engine import Engine
from padfree.train.finite_checks import NonFiniteError
from padfree.train.step import PendingStep
from tests.ranks import as_started_by_torchrun, rank_server, run_ranks, torchrun
from tests.refused import refused
from tests.train.cases import alone as alone_mesh
from tests.train.cases import weights_of
from tests.train.processes import alone, ended, forked
from tests.train.trainer_cases import RL, SFT, lines, make_config, make_trainer, samples, save_config
from tests.waiting import wait_until

KILLS = 20


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return alone_mesh()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def slow_run(config: Config, pipe: int, *, most: int | None = None, die_at: int | None = None) -> int:
    """A run whose saves take long. It halts after `most` updates, and is killed at the `die_at`-th fsync."""
    made, waits, real = 0, 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal waits
        waits += 1
        if waits == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        real(descriptor)

    def on_step(_: Any) -> None:
        nonlocal made
        made += 1
        if made == most:
            if die_at is not None:
                trainer.checkpointer.wait()  # the thread may not have reached its kill point yet
            os.write(pipe, b"halted")
            time.sleep(300)

    os.fsync = fsync
    trainer = make_trainer(config, alone_mesh(), on_step=on_step)
    os.write(pipe, b"ready")
    trainer.run()
    save_file(weights_of(trainer.engine.model), Path(config.run.folder) / "final.safetensors")
    return 0


def killed_often(folder: Path) -> dict[str, Any]:
    """A run that is killed repeatedly, at random or within a save, and then finishes; and an uninterrupted run.

    kills   0      1     2      3     4    5      6    7      8      9     ...

            after  torn  after  torn  any  early  any  early  after  torn       saves of 2 3 6 7 ... are asynchronous

    after   at random after a save, so that the run advances on any machine
    torn    at an fsync before the folder of a save gets its final name
    any     at random
    early   at an fsync of a save
    """
    model, output = save_config(folder / "model"), folder / "output"
    rng = np.random.default_rng(0)
    num_steps = KILLS + 4  # each attempt saves at most one step

    def config(name: str, *, asynchronous: bool = False) -> Config:
        checkpoint = {"every": 1, "asynchronous": asynchronous}
        return make_config(folder / name, model, **RL, checkpoint=checkpoint, run={"steps": num_steps})

    def in_peace(name: str) -> float:
        begin = time.monotonic()
        child, read = forked(lambda pipe: slow_run(config(name), pipe), output)
        assert ended(child) == 0, output.read_text()
        os.close(read)
        return time.monotonic() - begin

    def latest_step() -> int:
        latest = latest_in(folder / "often" / "checkpoints")
        return 0 if latest is None else step_of(latest)

    def kill(number: int) -> None:
        settings = config("often", asynchronous=number % 4 >= 2)
        die_at = int(rng.integers(1, 4 if number % 8 < 4 else 8)) if number % 2 else None
        before = latest_step()
        child, read = forked(lambda pipe: slow_run(settings, pipe, most=2, die_at=die_at), output)
        assert os.read(read, 5) == b"ready", output.read_text()
        if die_at is None:
            if number % 8 < 4:
                wait_until(lambda: latest_step() > before)
            time.sleep(rng.uniform(0, 2 * a_step))
        else:
            os.read(read, 6)  # it has been killed or has halted
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL, output.read_text()
        os.close(read)

    a_step = in_peace("whole") / num_steps
    torn, steps = 0, set()
    for number in range(KILLS):
        kill(number)
        torn += any((folder / "often" / "checkpoints").glob("*.partial"))
        steps.add(latest_step())
    in_peace("often")
    weights = [(folder / name / "final.safetensors").read_bytes() for name in ("whole", "often")]
    return {
        "torn": torn,
        "steps": sorted(steps),
        "weights": weights[0] == weights[1],
        "lines": lines(folder / "whole") == lines(folder / "often"),
    }


@pytest.mark.slow
def test_killed_twenty_times_and_the_same_in_the_end(tmp_path: Path) -> None:
    found = alone(killed_often, tmp_path)
    assert found["torn"] >= 4, "some kills were in the middle of a save"
    assert len(found["steps"]) >= 5, "the run advanced between kills"
    assert found["weights"]
    assert found["lines"]


# Signals, through the command line


def write_recipe(folder: Path) -> Path:
    """Write a recipe of 8 steps with its model and data to this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_with_tokenizer(folder / "model", num_hidden_layers=1)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(f"""
        model.path = "{folder / "model"}"
        data = {{ path = ["{folder / "sft.jsonl"}"], epochs = 9 }}
        batch = {{ samples = 4, max_tokens = 32 }}
        optimizer = {{ lr = 1e-3, eps = 1e-4 }}
        checkpoint.every = 2
        run = {{ folder = "{folder / "run"}", steps = 8, device = "cpu", deterministic = true }}
    """)
    return folder / "recipe.toml"


def before_step(number: int, action: Callable[[], object]) -> None:
    """Call the function once, in this step."""
    real = Engine.begin

    def begin(self: Engine, *args: Any, **options: Any) -> PendingStep:
        if options["step"] == number:
            action()
        return real(self, *args, **options)

    Engine.begin = begin  # type: ignore[method-assign]


def stuck() -> None:
    """Block for many minutes in a call that does not run Python's signal handlers."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def until_signalled() -> None:
    """Stay in a step until the run has received a signal."""
    signals: Any = signal.getsignal(signal.SIGTERM)  # a bound method of the run's `StopSignals`
    wait_until(lambda: bool(signals.__self__.received), 240.0)


def signalled(folder: Path) -> list[Any]:
    """[exit code, newest checkpoint] of starts with a signal in steps 1 and 3, two in step 4, and none."""
    recipe, output = write_recipe(folder), folder / "output"

    def started(name: str, step: int, halt: Callable[[], object]) -> tuple[int, int]:
        def run(pipe: int) -> int:
            # A shell starts background jobs with SIGINT ignored, and a run keeps ignored signals ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before_step(step, lambda: (os.write(pipe, b"x"), halt()))
            return main(["sft", str(recipe), f"run.folder={folder / name}"])

        return forked(run, output)

    def newest() -> str:
        return (folder / "often" / "checkpoints" / "latest").read_text()

    found: list[Any] = []
    for step, number in ((1, signal.SIGTERM), (3, signal.SIGINT)):
        child, read = started("often", step, until_signalled)
        assert os.read(read, 1) == b"x", output.read_text()
        os.kill(child, number)
        found.append([ended(child), newest()])
    child, read = started("often", 4, stuck)
    assert os.read(read, 1) == b"x", output.read_text()
    os.kill(child, signal.SIGTERM)
    time.sleep(SAME_REQUEST_SECONDS + 1.0)
    begin = time.monotonic()
    os.kill(child, signal.SIGTERM)
    found.append([ended(child), newest()])
    assert time.monotonic() - begin < 60
    found += [[ended(started(name, -1, int)[0]), newest()] for name in ("often", "whole")]
    weights = [(folder / name / "model" / "model.safetensors").read_bytes() for name in ("often", "whole")]
    return [*found, weights[0] == weights[1], output.read_text()]


def test_a_signal_finishes_the_step_saves_and_exits_75_and_a_second_one_exits_at_once(tmp_path: Path) -> None:
    *found, same, output = alone(signalled, tmp_path)
    assert found == [
        [75, "step-00000002"],
        [75, "step-00000004"],
        [128 + signal.SIGTERM, "step-00000004"],
        [0, "step-00000008"],
        [0, "step-00000008"],
    ]
    assert same
    assert "stopped by a signal after 2 steps" in output
    assert "padfree sft: SIGTERM: the run finishes its current step or evaluation, saves" in output
    assert "padfree sft: SIGTERM: ended at once, nothing more is saved" in output, "although the main thread is blocked"
    assert "Traceback" not in output


# Several ranks


def worker(folder: Path, kill_at: int) -> int:
    """A torchrun worker: its second rank is killed once, and the run waits for a signal before it ends."""
    mark = folder / "killed"

    def die() -> None:
        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    before_step(kill_at, die)
    before_step(6, until_signalled)
    return main(["sft", str(folder / "recipe.toml")])


def launch(folder: Path, kill_at: int) -> None:
    """Run torchrun in a separate process."""
    with (folder / "output").open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update({"PADFREE_CACHE": str(folder / "cache"), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"})
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    torchrun(options, __file__, str(folder), str(kill_at))


def to_the_end(rank: int, world: int, folder: Path, *names: str) -> list[int]:
    os.environ["PADFREE_CACHE"] = str(folder / "cache")
    return [main(["sft", str(folder / "recipe.toml"), f"run.folder={folder / name}"]) for name in names]


@pytest.mark.slow
def test_torchrun_starts_again_after_a_kill_and_passes_a_signal_on(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    output_file = tmp_path / "output"
    launched = rank_server().Process(target=launch, args=(tmp_path, 3))
    launched.start()

    def goes_on() -> bool:
        assert launched.is_alive(), output_file.read_text()
        return metrics.exists() and metrics.read_text().count("\n") >= 4  # the second start writes the fourth line

    wait_until(goes_on, 240.0)
    launched.terminate()
    launched.join(120)
    output = output_file.read_text()
    assert not launched.is_alive(), output
    assert (tmp_path / "killed").exists()
    assert "(exitcode: -9) local_rank: 1" in output, output  # rank 0 may end before it can name the other
    assert "stopped by a signal after" in output, output
    step = int(output.split("stopped by a signal after ")[1].split()[0])
    assert 4 <= step < 8
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{step:08d}"
    assert not (tmp_path / "run" / "model").exists()

    assert run_ranks(2, to_the_end, tmp_path, "run", "whole") == [[0, 0]] * 2
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def one_fails(rank: int, world: int, how: str, config: Config, folder: Path) -> None:
    """Write this rank's error and its time to a file."""
    peers.PATIENCE = 1.0

    def make(groups: Any) -> list[Sample]:
        if rank == 1 and how == "reward":
            raise UserError("rollout.reward", "mine:score raised ZeroDivisionError", "mend it")
        if rank == 1 and how == "bug":
            raise KeyError("missing")
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return [sample for group in groups for sample in group]

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    if how == "disk":
        MetricsFile.write = write if rank == 0 else MetricsFile.write  # type: ignore[method-assign]
    if how == "stuck" and rank == 1:
        before_step(0, lambda: 1 / 0)
    if how == "stuck" and rank == 0:
        before_step(0, stuck)
    with (folder / f"error{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    begin = time.monotonic()
    try:
        with failing_together():
            make_trainer(config, make_mesh("cpu"), make_samples=make).run()
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)  # noqa: T201
    assert time.monotonic() - begin < 120, "long before a collective times out"
    os._exit(3)  # closes connections like a process that ends with an error


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        (
            "reward",
            ["because rank 1 failed: rollout.reward: mine:score raised", "UserError rollout.reward: mine:score"],
        ),
        ("bug", ["stopped, because rank 1 failed: KeyError: 'missing'", "KeyError 'missing'"]),
        ("disk", ["UserError run.folder: metrics.jsonl cannot be written", "because rank 0 failed: run.folder: "]),
        ("kill", ["PeerLostError rank 0: rank 1 is gone, stuck or cut off; read the logs there (", None]),
        ("stuck", ["stopped, because rank 1 failed: ZeroDivisionError: division by zero", "ZeroDivisionError"]),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_its_line(
    how: str, messages: list[str | None], model_folder: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", model_folder, **SFT)
    run_ranks(2, one_fails, how, config, tmp_path, dying={0, 1})
    for rank, message in enumerate(messages):
        said = (tmp_path / f"error{rank}").read_text()
        if message is None:
            assert said == ""
            continue
        assert message in said
        assert said.count("\n") == 1


# Data and disks


def quiet(mesh: Mesh, config: Config, found: list[Sample]) -> list[dict[str, Any]]:
    make_trainer(config, mesh, found).run()
    return lines(Path(config.run.folder))


def test_nothing_to_train_on(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **SFT)
    with refused("data.path", "in memory has no samples"):
        make_trainer(config, mesh, [])
    trainer = make_trainer(config, mesh)
    trainer.batches.batcher.load_state_dict({**trainer.batches.batcher.state_dict(), "position": 36})
    with refused("data.path", "gave no batch"):
        trainer.run()


def test_data_that_ends_before_the_steps_do(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **SFT, data={"epochs": 1}, run={"steps": 99})
    result = make_trainer(config, mesh).run()
    assert (result.step, result.stopped) == (3, False)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000003"
    assert make_trainer(config, mesh).run().step == 3, "nothing is left to do, which is not an error"


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_one_sample(tokens: int, mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    only = Sample(tokens=np.arange(tokens), uid="only")
    found = quiet(mesh, make_config(tmp_path, model_folder, **SFT, run={"steps": 2}), [only])
    assert [line["samples"] for line in found] == [1, 1]
    assert [line["scored_tokens"] for line in found] == [tokens - 1] * 2
    assert (found[0]["loss"] > 0) == (tokens > 1)


def test_masked_samples_change_nothing(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    masked = [Sample(tokens=np.arange(5), loss_mask=np.zeros(5), uid=i, reward=1.0 * i, group=0) for i in range(4)]
    for name, sections in (("sft", SFT), ("rl", {**RL, "loss": {"kind": "clip"}})):
        config = make_config(tmp_path / name, model_folder, **sections, run={"steps": 2})
        trainer = make_trainer(config, mesh, masked)
        before = weights_of(trainer.engine.model)
        trainer.run()
        for line in lines(tmp_path / name):
            assert (line["loss"], line["gradient_norm"], line["scored_tokens"]) == (0, 0, 0)
        for key, weight in weights_of(trainer.engine.model).items():
            assert torch.equal(weight, before[key]), key


def test_a_sample_above_the_caps(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    with refused("max_tokens"):
        make_trainer(make_config(tmp_path, model_folder, batch={"samples": 4, "max_tokens": 8}), mesh).run()
    budget = make_config(tmp_path, model_folder, batch={"tokens": 8, "max_tokens": 16})
    with refused("budget"):
        make_trainer(budget, mesh).run()
    for batch in ({"samples": 4, "max_tokens": 8}, {"tokens": 8, "max_tokens": 8}):
        folder = tmp_path / next(iter(batch))
        config = make_config(folder, model_folder, batch={**batch, "overlong": "alone"}, data={"epochs": 1})
        found = quiet(mesh, config, samples()[:4])
        assert sum(line["samples"] for line in found) == 4
        assert sum(line["tokens"] for line in found) == 30


def test_nan_stops_before_the_update_and_leaves_everything_behind(
    mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    """Token 39, which only the sixth sample has, is embedded as NaN: in the second batch."""
    clean = [Sample(tokens=np.minimum(sample.tokens, 38), uid=sample.uid) for sample in samples()]
    clean[5].tokens[2] = 39
    config = make_config(tmp_path, model_folder, **SFT, data={"shuffle": False}, checkpoint={"every": 1})
    trainer = make_trainer(config, mesh, clean)
    after_one: dict[str, torch.Tensor] = {}
    trainer.updates.on_step = lambda _: after_one.update(weights_of(trainer.engine.model))
    embeddings = trainer.engine.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, ids, rows: rows.masked_fill(ids[0][..., None] == 39, float("nan")))
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    path = tmp_path / "nonfinite-step-00000001.jsonl"
    assert str(caught.value) == (
        f"step 1: the loss is nan on rank 0 before the update; inspect sample {clean[5].uid}, or lower optimizer.lr; "
        f"the samples are in {path}"
    )
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["uid"], row["tokens"]) == (clean[5].uid, clean[5].tokens.tolist())
    for name, weight in weights_of(trainer.engine.model).items():
        assert torch.equal(weight, after_one[name]), name
    assert [line["step"] for line in lines(tmp_path)] == [0]
    again = make_trainer(config, mesh, clean)
    assert again.step == 1
    assert again.run().step == 6, "without the fault the run resumes"


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_what_was_saved_resumes(
    mesh: Mesh, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(make_config(tmp_path / "whole", model_folder, **RL), mesh)
    whole.run()
    config = make_config(tmp_path / "run", model_folder, **RL, checkpoint={"every": 1})
    for step, place in ((1, "checkpoint.checkpointer.write_safetensors"), (3, "record.metrics_file.MetricsFile.write")):
        trainer = make_trainer(config, mesh)

        def fill(_: Any, step: int = step, place: str = place, trainer: Any = trainer) -> None:
            if trainer.step == step:
                monkeypatch.setattr(f"padfree.{place}", refuse)

        trainer.updates.on_step = fill
        with pytest.raises(
            ValueError, match=r"^[a-z.]+: /.* cannot be written \(No space left on device\); free space"
        ):
            trainer.run()
        monkeypatch.undo()
    trainer = make_trainer(config, mesh)
    assert trainer.step == 3
    trainer.run()
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(trainer.engine.model)[name]), name


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(
    mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with refused("run.folder", r".*file/run cannot be written \(Not a directory\)"):
        make_trainer(make_config(tmp_path / "file" / "run", model_folder, **SFT), mesh)


def test_a_damaged_or_foreign_checkpoint_is_refused_and_the_one_before_resumes(
    mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", model_folder, **RL, checkpoint={"every": 1})
    whole = make_trainer(config, mesh)
    whole.run()
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    shard = newest / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged .*; remove step-00000006 to resume from .*step-00000005$"):
        make_trainer(config, mesh)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"is missing; remove step-00000006 to resume from .*step-00000005$"):
        make_trainer(config, mesh)
    shutil.rmtree(newest)
    trainer = make_trainer(config, mesh)
    assert trainer.step == 5
    trainer.run()
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(trainer.engine.model)[name]), name

    hidden = json.loads(model_folder.read_text()) | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(hidden))
    with refused("model.path", "hidden_size is 64 in the model's config, but .* with 32"):
        make_trainer(make_config(tmp_path / "run", tmp_path / "config.json", **RL), mesh)
    longer = {"batch": RL["batch"], "loss": {**RL["loss"], "epochs": 3}}
    with refused("loss.epochs"):
        make_trainer(make_config(tmp_path / "run", model_folder, **longer), mesh)


if __name__ == "__main__":
    as_started_by_torchrun()
    code = worker(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # a forked worker that returns would wait for torchrun, which after a signal waits for the worker
