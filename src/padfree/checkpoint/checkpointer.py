"""Checkpoints that are complete or not there.

    <folder>/latest                             the name of the last one saved
    <folder>/step-00000010/
        manifest.json                           step, host state, checksums, and where each piece of each tensor is
        rank-00000.safetensors                  the pieces that rank 0 held, and its random state
        rank-00001.safetensors

    weight [5, 2] on 2 ranks       rank-00000 has rows 0:3, rank-00001 rows 3:5
    the same, read by 3 ranks      rows 0:2 | 2:4 (one row of each file) | 4:5

Every rank writes the pieces it holds, as safetensors with their offsets in the whole tensor, and reads the pieces that
overlap what it holds; so any number of ranks can resume. A copy that several ranks hold is written once. Of a model
with adapters only the adapters are saved. A reference model that has been refreshed exists nowhere else, so it is saved
as well.

Why not the files of torch.distributed.checkpoint: reading them unpickles their `.metadata`, which can run code, and its
safetensors storage has no place for what is not a tensor. This format is JSON and safetensors, and a checksum of every
file is compared before anything is loaded.

A checkpoint is written into `step-….partial`, synced, renamed, and then `latest` is replaced by a rename: whenever the
process dies, `latest` names a complete one. A name that is taken is not written again (`step-00000010.1`). Removal also
begins with a rename. Whatever fails on one rank fails on all with the same line, and the checkpoints before stay.

With `asynchronous`, `save` copies this rank's pieces to host memory and returns; a thread writes, using a process group
of its own. The next `save`, or `wait`, waits for it and raises what it raised.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from padfree.checkpoint.checkpoint_files import (
    DTYPES,
    CheckpointError,
    Reader,
    check_file,
    check_json,
    hash_of,
    write_safetensors,
    write_text,
)
from padfree.checkpoint.manifest import (
    CRITIC,
    FORMAT,
    MANIFEST,
    Trained,
    base_tensors,
    bits_of,
    check_critic,
    check_model,
    check_reference,
    class_name,
    critic_tensors,
    describe_adapters,
    join_manifest,
    read_manifest,
    saved_tensors,
    state_tensors,
)
from padfree.checkpoint.optimizer_state import describe_optimizer, load_optimizer
from padfree.distributed.peers import watching
from padfree.errors import UserError
from padfree.model.export import sync
from padfree.model.load import local_part, local_region

LATEST = "latest"
NAME = re.compile(r"step-\d{8,}(\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What one rank contributes to one checkpoint."""

    name: str
    tensors: dict[str, Tensor]  # what goes into this rank's file
    offsets: dict[str, list[int]]  # where those that are pieces begin
    content: dict[str, Any]  # the manifest without what the ranks tell each other
    rank_state: dict[str, Any]  # what of it is no tensor


class Checkpointer:
    """Saves to and resumes from one folder. Every rank makes one and calls it alike."""

    def __init__(self, folder: str | Path, *, keep_last: int = 2, asynchronous: bool = False) -> None:
        if keep_last < 1:
            raise UserError("keep_last", "", "give 1 or more", value=keep_last)
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if several else 0
        self._world = dist.get_world_size() if several else 1
        # Its own group: the thread's messages must not mix with those of a training step.
        self._group: ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self.kept: Path | None = None  # a checkpoint that stays, however old it becomes
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._fingerprints: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()

    # Saving

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        reference: Mapping[str, Tensor] | None = None,
        critic: Trained | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder, which with `asynchronous` is complete after `wait`.

        `extra` (the same on every rank) and `rank_state` hold what JSON can hold, and tensors at their top level.
        Lists come back as lists, also where they were tuples. `reference` holds the tensors of a model besides, and
        `critic` is another one that is trained.
        """
        self.wait()
        host_state = {key: value for key, value in rank_state.items() if not isinstance(value, Tensor)}
        shared = {key: value for key, value in extra.items() if not isinstance(value, Tensor)}
        check_json(shared, "extra")
        check_json(host_state, "rank_state")
        content = {
            "format": FORMAT,
            "step": step,
            "world": self._world,
            "model": class_name(model),
            "adapters": describe_adapters(model, self._fingerprint(model)),
            "optimizer": None if optimizer is None else describe_optimizer(model, optimizer),
            "critic": None if critic is None else describe_optimizer(*critic),
            "extra": copy.deepcopy(shared),  # the thread may still write what the run has gone on to change
        }
        whole = state_tensors(model, optimizer)
        whole |= {f"reference/{name}": tensor for name, tensor in (reference or {}).items()}
        whole |= {} if critic is None else critic_tensors(critic)
        whole |= {f"extra/{key}": value for key, value in extra.items() if isinstance(value, Tensor)}
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, list[int]] = {}
        for key, tensor in whole.items():
            local = local_part(tensor)
            if self._writes(tensor) and local.numel():
                tensors[key] = local
                offsets[key] = [part.start for part in local_region(tensor)]
        tensors |= {f"rank/{key}": value for key, value in rank_state.items() if isinstance(value, Tensor)}
        content["tensors"] = {
            key: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)} for key, tensor in whole.items()
        }
        job = _Job(
            name=self._begin(step),
            tensors=tensors,
            offsets=offsets,
            content=content,
            rank_state=copy.deepcopy(host_state),
        )
        if not self.asynchronous:
            self._finish(job)
            return self.folder / job.name
        for key, tensor in tensors.items():
            tensors[key] = tensor.detach().to("cpu", copy=True)
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()
        return self.folder / job.name

    def wait(self) -> None:
        """Until an asynchronous save is complete. Raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def keep(self, path: Path | None) -> None:
        """From now on this checkpoint stays, however old it becomes, and no other."""
        self.kept = path

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """A block after which no save is under way. An error of the block goes before one of the save."""
        try:
            yield
        except BaseException:
            if self._thread is not None:
                self._thread.join()  # the checkpoint may still become complete: the other ranks' threads write as well
            raise
        self.wait()

    def _run(self, job: _Job) -> None:
        try:
            self._finish(job)
        except BaseException as failure:
            self._failure = failure

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank is the one that writes the part it holds."""
        if not isinstance(tensor, DTensor):
            return self._rank == 0
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        copies = zip(tensor.placements, coordinate, strict=True)
        return all(index == 0 for placement, index in copies if placement.is_replicate())

    def _begin(self, step: int) -> str:
        """Make the folder to write into; the checkpoint's name."""
        name = ""
        with self._together() as errors:
            if self._rank == 0:
                with _reported(errors, self.folder, self._unwritten()):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    for path in self.folder.iterdir():
                        if path.suffix in (".partial", ".removing") and NAME.fullmatch(path.stem):
                            shutil.rmtree(path)
                    name = stem = f"step-{step:08d}"
                    number = 0
                    while (self.folder / name).exists():
                        number += 1
                        name = f"{stem}.{number}"
                    (self.folder / f"{name}.partial").mkdir()
        return str(self._exchange(name)[0])

    def _finish(self, job: _Job) -> None:
        partial = self.folder / f"{job.name}.partial"
        file = f"rank-{self._rank:05d}.safetensors"
        size, digest = 0, ""
        try:
            with self._together() as errors, _reported(errors, partial / file, self._unwritten()):
                size, digest = write_safetensors(partial / file, job.tensors)
            shapes = {key: list(job.tensors[key].shape) for key in job.offsets}
            gathered = self._exchange((file, size, digest, job.offsets, shapes, job.rank_state))
            with self._together() as errors:
                if self._rank == 0:
                    with _reported(errors, self.folder, self._unwritten()):
                        self._commit(partial, join_manifest(job.content, gathered))
        except CheckpointError:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _commit(self, partial: Path, content: dict[str, Any]) -> None:
        for file, about in content["files"].items():
            if not (partial / file).exists():
                raise CheckpointError(
                    "checkpoint", f"{partial / file} was written and is not there", "give a folder that all ranks share"
                )
            assert (partial / file).stat().st_size == about["bytes"]
        write_text(partial / MANIFEST, json.dumps({"sha256": hash_of(content), "content": content}))
        sync(partial)
        final = partial.with_suffix("")
        partial.rename(final)
        sync(self.folder)
        write_text(self.folder / f"{LATEST}.new", final.name)
        (self.folder / f"{LATEST}.new").replace(self.folder / LATEST)
        sync(self.folder)
        kept = self.kept
        for path in [path for path in self._complete() if path != kept][: -self.keep_last]:
            if path not in (final, kept):
                removing = path.with_name(f"{path.name}.removing")
                path.rename(removing)
                shutil.rmtree(removing)

    # Resuming

    def latest(self) -> Path | None:
        """The last complete checkpoint; None: there is none."""
        return latest_in(self.folder)

    def agreed_latest(self) -> Path | None:
        """The `latest` of the first rank, on every rank: a shared file system may show them different moments."""
        path: Path | None = self._exchange(self.latest() if self._rank == 0 else None)[0]
        return path

    def extra(self, path: str | Path) -> dict[str, Any]:
        """A checkpoint's `extra` without its tensors, to look at before anything is loaded."""
        path, content = Path(path), {}
        cure = self._cure(path)
        with self._together() as errors, _reported(errors, path, f"cannot be read; {cure}"):
            content = read_manifest(path, cure)
        found: dict[str, Any] = content["extra"]
        return found

    def load(
        self,
        path: str | Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        reference: Mapping[str, Tensor] | None = None,
        critic: Trained | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill model and optimizer; `extra`, and this rank's `rank_state`, which is None on another number of ranks.

        `reference` is filled if the checkpoint holds one, and left as it is if not. A `critic` must be there.
        The checkpoint is checked as a whole before anything is changed.
        """
        path = Path(path)
        cure = self._cure(path)
        content: dict[str, Any] = {}
        base, refreshed = self._fingerprint(model), False
        with self._together() as errors, _reported(errors, path, f"cannot be read; {cure}"):
            content = read_manifest(path, cure)
            check_model(content, path, model, optimizer, base)
            refreshed = reference is not None and check_reference(content, path, reference)
            if critic is not None:
                check_critic(content, path, critic)
        with self._together() as errors, _reported(errors, path, f"cannot be read; {cure}"):
            files = sorted(content["files"])
            for file in files[self._rank :: self._world]:
                check_file(path / file, content["files"][file], cure)
        reader = Reader(path, content["tensors"])
        with torch.no_grad():
            for name, tensor in saved_tensors(model).items():
                reader.fill(f"model/{name}", local_part(tensor), local_region(tensor))
            for name, tensor in (reference or {}).items() if refreshed else ():
                reader.fill(f"reference/{name}", local_part(tensor), local_region(tensor))
            if optimizer is not None:
                load_optimizer(model, optimizer, content["optimizer"], reader)
            if critic is not None:
                for name, tensor in saved_tensors(critic.model).items():
                    reader.fill(f"{CRITIC}model/{name}", local_part(tensor), local_region(tensor))
                load_optimizer(*critic, content["critic"], reader.below(CRITIC))
        rank_state: dict[str, Any] | None = None
        if content["world"] == self._world:
            rank_state = content["rank_state"][self._rank]
            with safe_open(path / f"rank-{self._rank:05d}.safetensors", framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  a file, not a mapping
                    if key.startswith("rank/"):
                        rank_state[key.removeprefix("rank/")] = file.get_tensor(key)
        return {**content["extra"], **reader.whole("extra/")}, rank_state

    def _complete(self) -> list[Path]:
        return complete_in(self.folder)

    def _cure(self, path: Path) -> str:
        others = [other for other in self._complete() if other.resolve() != path.resolve()]
        return f"remove {path.name} to {f'resume from {others[-1]}' if others else 'start anew'}"

    def _unwritten(self) -> str:
        latest = self.latest()
        stays = f", {latest} is still there to resume from" if latest else ""
        return f"cannot be written; free space or give another folder{stays}"

    # Ranks

    def _fingerprint(self, model: nn.Module) -> str | None:
        """A fingerprint of the weights below adapters, which do not change; None for a model without adapters."""
        if model not in self._fingerprints:
            base = base_tensors(model)
            self._fingerprints[model] = self.fingerprint(base) if base else None
        return self._fingerprints[model]

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """A hash of the numbers in these tensors, the same however ranks share them. Every rank calls it."""
        bits = {name: bits_of(tensor) for name, tensor in tensors.items() if self._writes(tensor)}
        total: Counter[str] = Counter()
        for gathered in self._exchange(bits):
            total.update(gathered)
        return hash_of(total)

    def _exchange(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world
        with watching("checkpoint", self._group):
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _together(self) -> Iterator[list[CheckpointError]]:
        """A block that collects errors in a list: after it every rank raises if any rank has one."""
        errors: list[CheckpointError] = []
        yield errors
        for gathered in self._exchange(errors):
            if gathered:
                raise gathered[0]


def complete_in(folder: Path) -> list[Path]:
    """All complete checkpoints of a folder, the last saved one last."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved after."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def latest_in(folder: Path) -> Path | None:
    """The last complete checkpoint of a folder; None: there is none."""
    pointer = folder / LATEST
    if pointer.exists():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        if NAME.fullmatch(name) and (folder / name / MANIFEST).exists():
            return folder / name
    complete = complete_in(folder)
    return complete[-1] if complete else None


@contextmanager
def _reported(errors: list[CheckpointError], path: Path, what: str) -> Iterator[None]:
    """Put what goes wrong in the block into the list; `what` is "problem; cure"."""
    try:
        yield
    except CheckpointError as error:
        errors.append(error)
    except OSError as error:
        problem, _, cure = what.partition("; ")
        fact = f"{error.filename or path} {problem} ({error.strerror or error})"
        errors.append(CheckpointError("checkpoint", fact, cure))
