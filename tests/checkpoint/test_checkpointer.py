"""A checkpoint resumes bit for bit on any number of ranks, and is complete or absent, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from padfree.checkpoint import checkpointer as checkpoint
from padfree.checkpoint.checkpoint_files import CheckpointError, write_safetensors
from padfree.checkpoint.checkpointer import Checkpointer
from padfree.distributed.peers import PeerLostError
from tests.ranks import rank_server, run_ranks
from tests.refused import refused


class Tiny(nn.Module):
    """Odd sizes, tied weights, a persistent and a non-persistent buffer."""

    counts: Tensor
    scratch: Tensor

    def __init__(self, width: int = 5, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.tensor([seed, 2, 3]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


class Other(Tiny):
    pass


Layout = Callable[[], DeviceMesh | None]


def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replicated() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "fsdp"))


def make(seed: int = 0, layout: Layout | None = None, **options: Any) -> tuple[Tiny, torch.optim.AdamW]:
    model = Tiny(seed=seed)
    if layout is not None:
        fully_shard(model, mesh=layout())
    decayed = [model.embed.weight]
    others = [parameter for name, parameter in model.named_parameters() if name != "embed.weight"]
    groups: list[Any] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, **{"lr": 1e-2, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        logits = model(torch.arange(7).roll(step))
        nn.functional.cross_entropy(logits, torch.arange(7)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that is saved, as whole tensors."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{kind}": value for kind, value in optimizer.state[parameter].items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def saved(folder: Path, *steps: int, **options: Any) -> tuple[Checkpointer, list[dict[str, Tensor]]]:
    """Save checkpoints after these steps; return their contents, too."""
    checkpointer = Checkpointer(folder, **options)
    model, optimizer = make()
    states, done = [], 0
    for step in steps:
        train(model, optimizer, done, step)
        done = step
        states.append(whole(model, optimizer))
        checkpointer.save(step, model=model, optimizer=optimizer, extra={"step": step}, rank_state={})
    checkpointer.wait()
    return checkpointer, states


def loaded(checkpointer: Checkpointer, path: Path | None = None) -> tuple[int, dict[str, Tensor]]:
    model, optimizer = make(seed=9)
    path = path or checkpointer.latest()
    assert path is not None
    extra, _ = checkpointer.load(path, model=model, optimizer=optimizer)
    return extra["step"], whole(model, optimizer)


# Resuming


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_training_is_bitwise_the_uninterrupted_one(asynchronous: bool, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    assert checkpointer.latest() is None
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    optimizer.param_groups[1]["lr"] = 0.0123456789012345678
    extra = {"cursor": {"epoch": 1, "order": [3, 1]}, "none": None, "loss": float("inf"), "name": "größe"}
    state = {"torch": torch.get_rng_state(), "python": 7, "flags": torch.tensor([True, False])}
    path = checkpointer.save(3, model=model, optimizer=optimizer, extra=extra, rank_state=state)
    extra["cursor"]["order"].append(5)  # type: ignore[index]  after the save
    train(model, optimizer, 3, 6)
    checkpointer.wait()

    other, other_optimizer = make(seed=9)
    assert Checkpointer(tmp_path).latest() == path == tmp_path / "step-00000003"
    got, rank_state = Checkpointer(tmp_path).load(path, model=other, optimizer=other_optimizer)
    assert got == {"cursor": {"epoch": 1, "order": [3, 1]}, "none": None, "loss": float("inf"), "name": "größe"}
    assert rank_state is not None
    assert torch.equal(rank_state["torch"], state["torch"])  # type: ignore[arg-type]
    assert torch.equal(rank_state["flags"], torch.tensor([True, False]))
    assert rank_state["python"] == 7
    assert other.head.weight is other.embed.weight
    train(other, other_optimizer, 3, 6)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))
    for group, expected in zip(other_optimizer.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}


def test_before_the_first_step_and_without_an_optimizer(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    model, optimizer = make()
    checkpointer.save(0, model=model, optimizer=optimizer, extra={}, rank_state={})
    other, other_optimizer = make(seed=9)
    assert checkpointer.load(tmp_path / "step-00000000", model=other, optimizer=other_optimizer) == ({}, {})
    for resumed, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(resumed, its_optimizer, 0, 2)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))
    path = checkpointer.save(1, model=model, optimizer=None, extra={}, rank_state={})
    checkpointer.load(path, model=other, optimizer=None)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        checkpointer.load(path, model=other, optimizer=other_optimizer)


def test_how_the_optimizer_computes_is_the_resuming_runs_choice(tmp_path: Path) -> None:
    model, optimizer = make(foreach=True)
    train(model, optimizer, 0, 2)
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    other, other_optimizer = make(seed=9, fused=True, lr=torch.tensor(0.5))
    checkpointer.load(path, model=other, optimizer=other_optimizer)
    for group in other_optimizer.param_groups:
        assert group["fused"]
        assert not group["foreach"]
        assert isinstance(group["lr"], Tensor)
        assert group["lr"].item() == pytest.approx(1e-2)
    train(model, optimizer, 2, 4)
    train(other, other_optimizer, 2, 4)
    for name, tensor in whole(model, optimizer).items():
        torch.testing.assert_close(whole(other, other_optimizer)[name], tensor)


def test_plain_values_in_an_optimizers_state(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    optimizer.state[model.embed.weight]["n_iter"] = 4
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, model=model, optimizer=optimizer, extra={}, rank_state={})
    other = torch.optim.LBFGS(model.parameters(), max_iter=1)
    checkpointer.load(path, model=model, optimizer=other)
    assert other.state[model.embed.weight]["n_iter"] == 4


def test_state_of_another_dtype_than_its_parameter_is_not_rounded(tmp_path: Path) -> None:
    model = Tiny().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exact = torch.full((7, 5), 1 / 3)
    optimizer.state[model.embed.weight]["momentum_buffer"] = exact
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, model=model, optimizer=optimizer, extra={}, rank_state={})
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer.load(path, model=model, optimizer=other)
    assert_same(dict(other.state[model.embed.weight]), {"momentum_buffer": exact})


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, states = saved(tmp_path, 2)
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["latest", "manifest.json", "rank-00000.safetensors"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert_same(loaded(checkpointer)[1], states[0])


# Several ranks


def save_on_ranks(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    return (
        save_and_load(rank, f"{folder}/flat", flat, False),
        save_and_load(rank, f"{folder}/replicated", replicated, True),
        fail_on_one_rank(rank, f"{folder}/failing"),
    )


def save_and_load(rank: int, folder: str, layout: Layout, asynchronous: bool) -> dict[str, Tensor]:
    model, optimizer = make(layout=layout)
    train(model, optimizer, 0, 3)
    state = whole(model, optimizer)
    checkpointer = Checkpointer(folder, asynchronous=asynchronous)
    rank_state = {"rank": rank, "random": torch.full((3,), rank)}
    for step in (2, 3):
        checkpointer.save(step, model=model, optimizer=optimizer, extra={"step": step}, rank_state=rank_state)
        train(model, optimizer, 3, 6)  # collectives of the run while the thread writes
        checkpointer.wait()
        model, optimizer = make(seed=9, layout=layout)
        with torch.no_grad():
            model(torch.arange(7))  # leaves the root's parameters gathered
        path = checkpointer.latest()
        assert path is not None
        assert path.name == f"step-{step:08d}"
        extra, own = checkpointer.load(path, model=model, optimizer=optimizer)
        assert extra == {"step": step}
        assert own is not None
        assert own["rank"] == rank
        assert own["random"].tolist() == [rank] * 3
        assert_same(whole(model, optimizer), state)
    return state


def load_on_ranks(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = make(seed=9, layout=flat)
    checkpointer = Checkpointer(folder)
    path = checkpointer.latest()
    assert path is not None
    extra, rank_state = checkpointer.load(path, model=model, optimizer=optimizer)
    assert extra == {"step": 3}
    assert rank_state is None
    state = whole(model, optimizer)
    train(model, optimizer, 3, 5)
    return state


def fail_on_one_rank(rank: int, folder: str) -> str:
    model, optimizer = make(layout=flat)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model=model, optimizer=optimizer, extra={}, rank_state={})
    if rank == 1:
        checkpoint.write_safetensors = full_disk
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    checkpoint.write_safetensors = write_safetensors
    dist.barrier()  # rank 0 deletes files after its last message to the others
    assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "step-00000001"]
    path = checkpointer.latest()
    assert path is not None
    checkpointer.load(path, model=model, optimizer=optimizer)
    checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    assert checkpointer.latest() == Path(folder) / "step-00000002"
    return str(caught.value)


def full_disk(*_: object) -> tuple[int, str]:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_any_number_of_ranks_resumes_and_a_failure_of_one_is_everyones(tmp_path: Path) -> None:
    (first, second, message), others = run_ranks(2, save_on_ranks, str(tmp_path))
    assert_same(others[0], first)
    assert_same(others[1], second)
    assert others[2] == message
    assert "rank-00001.safetensors cannot be written (No space left on device); free space" in message
    assert f"the run can still be resumed from {tmp_path / 'failing' / 'step-00000001'}" in message

    written = {
        "flat": [("rank-00000.safetensors", 0, 4), ("rank-00001.safetensors", 4, 3)],
        "replicated": [("rank-00000.safetensors", 0, 7)],  # both ranks hold everything, one writes
    }
    for (kind, rows), state in zip(written.items(), (first, second), strict=True):
        path = tmp_path / kind / "step-00000003"
        content = json.loads((path / "manifest.json").read_text())["content"]
        pieces = content["tensors"]["model/embed.weight"]["pieces"]
        assert [(file, offset[0], shape[0]) for file, offset, shape in pieces] == rows
        model, optimizer = make(seed=9)
        extra, rank_state = Checkpointer(tmp_path / kind).load(path, model=model, optimizer=optimizer)
        assert (extra, rank_state) == ({"step": 3}, None)
        assert_same(whole(model, optimizer), state)
    for state in run_ranks(3, load_on_ranks, str(tmp_path / "flat")):
        assert_same(state, first)


def killed_while_saving(rank: int, world: int, folder: str) -> str:
    model, optimizer = make(layout=flat)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model=model, optimizer=optimizer, extra={"step": 1}, rank_state={})
    if rank == 1:
        checkpoint.write_safetensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    with pytest.raises(PeerLostError) as caught:
        checkpointer.save(2, model=model, optimizer=optimizer, extra={"step": 2}, rank_state={})
    return str(caught.value)


def test_a_rank_killed_in_a_save_stops_the_others_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    message, _ = run_ranks(2, killed_while_saving, str(tmp_path), dying={1}, group_timeout=10.0)
    assert "checkpoint" in message
    assert loaded(Checkpointer(tmp_path))[0] == 1


def lost_while_writing(rank: int, world: int, folder: str) -> float:
    """Rank 1 stops answering while both ranks write; return how long rank 0 then waits for the checkpoint."""
    checkpoint.PATIENCE = 0.5  # type: ignore[attr-defined]
    model, optimizer = make(layout=flat)
    checkpointer = Checkpointer(folder, asynchronous=True)
    if rank == 1:
        checkpoint.write_safetensors = lambda *_: time.sleep(300)  # type: ignore[assignment, func-returns-value]
    begin = 0.0

    def run() -> None:
        nonlocal begin
        with checkpointer.finishing():
            checkpointer.save(2, model=model, optimizer=optimizer, extra={"step": 2}, rank_state={})
            if rank == 1:
                time.sleep(8)
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            raise PeerLostError("a collective of the training step timed out")

    with pytest.raises(PeerLostError):
        run()
    return time.monotonic() - begin


def test_a_lost_rank_does_not_hold_up_the_end_of_the_others(tmp_path: Path) -> None:
    seconds, _ = run_ranks(2, lost_while_writing, str(tmp_path), dying={1})
    assert seconds < 5
    assert Checkpointer(tmp_path).latest() is None


# Retention


def test_keeps_the_last_ones(tmp_path: Path) -> None:
    checkpointer, states = saved(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004"
    for path, state in zip(("step-00000003", "step-00000004"), states[2:], strict=True):
        assert_same(loaded(checkpointer, tmp_path / path)[1], state)
    with refused("keep_last"):
        Checkpointer(tmp_path, keep_last=0)


def test_a_step_saved_again_gets_a_new_name_and_goes_before_older_ones(tmp_path: Path) -> None:
    """A run that resumes an older checkpoint reaches the same steps again, with other weights."""
    saved(tmp_path, 4, 8, keep_last=3)
    checkpointer, states = saved(tmp_path, 4, keep_last=2)
    assert checkpointer.latest() == tmp_path / "step-00000004.1"
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-00000004.1", "step-00000008"]
    assert_same(loaded(checkpointer)[1], states[0])
    (tmp_path / "latest").unlink()
    assert checkpointer.latest() == tmp_path / "step-00000004.1"


@pytest.mark.parametrize("pointer", ["step-00000009", "", "../step-00000001", "step-00000001.partial"])
def test_a_pointer_that_names_nothing_complete_is_not_followed(pointer: str, tmp_path: Path) -> None:
    checkpointer, _ = saved(tmp_path, 1)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "latest").write_text(pointer)
    assert checkpointer.latest() == tmp_path / "step-00000001"


def test_what_is_left_of_a_died_save_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in ("step-00000001.partial", "step-00000001.1.removing", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    saved(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine.partial", "step-00000001"]


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)


def replace_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"lr": 0.01', '"lr": 0.02'))


@pytest.mark.parametrize(
    ("file", "damage", "what"),
    [
        ("rank-00000.safetensors", truncate, "is damaged"),
        ("rank-00000.safetensors", flip, "is damaged"),
        ("rank-00000.safetensors", flip_header, "is damaged"),
        ("rank-00000.safetensors", Path.unlink, "is missing"),
        ("manifest.json", truncate, "is damaged"),
        ("manifest.json", replace_number, "is damaged"),
    ],
)
def test_damage_is_found_and_the_previous_checkpoint_resumes(
    file: str, damage: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    checkpointer, states = saved(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / file)
    model, optimizer = make(seed=9)
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.load(tmp_path / "step-00000002", model=model, optimizer=optimizer)
    message = str(caught.value)
    assert message.startswith(f"checkpoint: {tmp_path / 'step-00000002' / file} {what}")
    assert message.endswith(f"; remove step-00000002 to resume from {tmp_path / 'step-00000001'}")
    assert "\n" not in message
    assert_same(whole(model, optimizer), before)
    assert_same(loaded(checkpointer, tmp_path / "step-00000001")[1], states[0])


def test_without_the_damaged_one_the_one_before_is_the_latest(tmp_path: Path) -> None:
    checkpointer, states = saved(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "step-00000002")
    assert_same(loaded(checkpointer)[1], states[0])


def test_tensors_that_all_ranks_share_are_in_extra(tmp_path: Path) -> None:
    model, optimizer = make()
    tensors = {"found/a": torch.arange(5), "found/b": torch.empty(0), "mask": torch.tensor([True, False])}
    for asynchronous in (False, True):
        checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
        extra = {"step": 1, **tensors}
        checkpointer.save(1, model=model, optimizer=optimizer, extra=extra, rank_state={})
        checkpointer.wait()
        path = checkpointer.latest()
        assert path is not None
        found, _ = checkpointer.load(path, model=model, optimizer=optimizer)
        assert found.keys() == extra.keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[key], tensor)
            assert found[key].dtype == tensor.dtype


def test_a_single_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    checkpointer, _ = saved(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="; remove step-00000001 to start over"):
        loaded(checkpointer)
    with pytest.raises(CheckpointError, match=r"step-00000007 does not exist or is incomplete"):
        loaded(checkpointer, tmp_path / "step-00000007")


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    checkpointer, _ = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has format 2, not 1"):
        loaded(checkpointer)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: Other(), "it is a Tiny, not a Other"),
        (lambda: Tiny(width=6), r"embed\.weight is \[7, 5\] F32 in the checkpoint and \[7, 6\] F32 in this run"),
        (lambda: Tiny().bfloat16(), r"embed\.weight is \[7, 5\] F32 in the checkpoint and \[7, 5\] BF16 in this run"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(
    other: Callable[[], nn.Module], difference: str, tmp_path: Path
) -> None:
    checkpointer, _ = saved(tmp_path, 1)
    path = checkpointer.latest()
    assert path is not None
    with pytest.raises(
        CheckpointError, match=rf"belongs to another model \({difference}\); give the folder of this run"
    ):
        checkpointer.load(path, model=other(), optimizer=None)


def test_other_groups_in_the_optimizer_are_refused(tmp_path: Path) -> None:
    checkpointer, _ = saved(tmp_path, 1)
    model = Tiny()
    with pytest.raises(
        CheckpointError, match="other parameter groups in the optimizer; restore the optimizer settings"
    ):
        checkpointer.load(
            tmp_path / "step-00000001", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)
        )


@pytest.mark.parametrize(
    ("extra", "rank_state", "message"),
    [
        ({"a": {1: 2}}, {}, r"extra\['a'\]: the key 1 is not a string"),
        ({"a": [torch.ones(1)]}, {}, r"extra\['a'\]\[0\]: JSON cannot store a Tensor; give numbers"),
        ({}, {"a": {2}}, r"rank_state\['a'\]: JSON cannot store a set; give numbers"),
    ],
)
def test_what_json_would_change_is_refused(
    extra: dict[str, Any], rank_state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path).save(1, model=model, optimizer=optimizer, extra=extra, rank_state=rank_state)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, _ = make()
    _, optimizer = make()
    with refused("optimizer"):
        Checkpointer(tmp_path).save(1, model=model, optimizer=optimizer, extra={}, rank_state={})


# Failed writes


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/run cannot be written \(Not a directory\)") as caught:
        saved(tmp_path / "file" / "run", 1)
    assert "\n" not in str(caught.value)


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, states = saved(tmp_path, 1)

    def forbid(path: Path, *_: object, **__: object) -> None:
        if path.suffix == ".partial":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", forbid)
    with pytest.raises(CheckpointError, match=r"partial cannot be written \(Permission denied\); free space or give"):
        saved(tmp_path, 2)
    assert_same(loaded(Checkpointer(tmp_path))[1], states[0])


@pytest.mark.parametrize("place", ["write_safetensors", "write_text", "sync"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_checkpoints_before(
    place: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, states = saved(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    model, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, place, full_disk)
        if asynchronous:
            checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
        with pytest.raises(
            CheckpointError, match=r"No space left on device\); free space .*; .*resumed from .*step-00000001"
        ):
            checkpointer.save(3, model=model, optimizer=optimizer, extra={}, rank_state={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert_same(loaded(checkpointer)[1], states[0])
    checkpointer.save(4, model=model, optimizer=optimizer, extra={}, rank_state={})
    checkpointer.wait()
    assert checkpointer.latest() == tmp_path / "step-00000004"


def test_an_asynchronous_save_holds_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(*args: Any) -> tuple[int, str]:
        assert may_write.wait(20)
        return write_safetensors(*args)

    monkeypatch.setattr(checkpoint, "write_safetensors", slow)
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    model, optimizer = make()
    train(model, optimizer, 0, 2)
    state = whole(model, optimizer)
    begin = time.monotonic()
    checkpointer.save(2, model=model, optimizer=optimizer, extra={"step": 2}, rank_state={})
    assert time.monotonic() - begin < 10
    assert checkpointer.latest() is None
    train(model, optimizer, 2, 4)
    may_write.set()
    checkpointer.save(4, model=model, optimizer=optimizer, extra={"step": 4}, rank_state={})
    assert (tmp_path / "step-00000002" / "manifest.json").exists()
    checkpointer.wait()
    step, got = loaded(checkpointer, tmp_path / "step-00000002")
    assert step == 2
    assert_same(got, state)
    assert loaded(checkpointer)[0] == 4


# kill -9


def in_a_fork(function: Callable[[], None]) -> int:
    """The status of a forked child that runs the function."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            print(repr(error), file=sys.stderr)  # noqa: T201
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def die_at(number: int, folder: Path) -> None:
    """Kill this process at its nth file-system change or fsync in the folder."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            path = args[0] if isinstance(args[0], str | Path) else ""
            if str(path).startswith(str(folder)) or event in ("os.remove", "os.rmdir"):
                count()

    real = os.fsync

    def fsync(descriptor: int) -> None:
        count()
        real(descriptor)
        count()

    sys.addaudithook(audit)
    os.fsync = fsync


def die_everywhere(folder: Path) -> int:
    """Save with a kill at the first, second, ... change until one save survives; return the number of kills."""
    base, trial = folder / "base", folder / "trial"
    _, states = saved(base, 1, 2)
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    third = whole(model, optimizer)
    expected = {1: states[0], 2: states[1], 3: third}

    def attempt() -> None:
        die_at(number, trial)
        Checkpointer(trial).save(3, model=model, optimizer=optimizer, extra={"step": 3}, rank_state={})

    number, reached = 0, set()
    while True:
        number += 1
        shutil.copytree(base, trial)
        ended = in_a_fork(attempt)
        assert ended in (0, signal.SIGKILL), ended
        pointed = trial / (trial / "latest").read_text()
        assert Checkpointer(trial).latest() == pointed, "`latest` is right, not only the search without it"
        step, state = loaded(Checkpointer(trial))
        assert_same(state, expected[step])
        reached.add(step)
        checkpointer = Checkpointer(trial)
        checkpointer.save(4, model=model, optimizer=optimizer, extra={"step": 4}, rank_state={})
        assert loaded(checkpointer)[0] == 4
        assert len(list(trial.iterdir())) - (trial / "latest.new").exists() == 3, list(trial.iterdir())
        shutil.rmtree(trial)
        if ended == 0:
            assert reached == {2, 3}
            return number - 1


def out_of_space(folder: Path) -> str:
    """Save with a limit on the file size of half a checkpoint."""
    checkpointer, _ = saved(folder, 1)
    size = (folder / "step-00000001" / "rank-00000.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    try:
        checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    except CheckpointError as error:
        assert loaded(checkpointer)[0] == 1
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
        return str(error)
    raise AssertionError("written beyond the limit")


def die_and_fill(folder: Path) -> None:
    torch.set_num_threads(1)
    with (folder / "output").open("w") as file:
        os.dup2(file.fileno(), 2)
    found = [die_everywhere(folder / "killed"), out_of_space(folder / "full")]
    (folder / "result.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_kills_in_a_save_and_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """In a separate process, which has one thread and can be forked.

    A kill at any moment of a save leaves a complete `latest`; a disk without space is reported.
    """
    process = rank_server().Process(target=die_and_fill, args=(tmp_path,))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 0, output
    died, message = json.loads((tmp_path / "result.json").read_text())
    assert died > 15
    assert "rank-00000.safetensors cannot be written (File too large); free space" in message
