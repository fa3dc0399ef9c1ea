"""Save and load checkpoints. A checkpoint is either complete or absent.

    <folder>/latest                         the name of the newest checkpoint
    <folder>/step-00000010/
        manifest.json                       step, checksums, and which file holds each part of a tensor
        rank-00000.safetensors              the parts of tensors that rank 0 held, and its random state
        rank-00001.safetensors

Any number of ranks can load a checkpoint: each rank reads the parts that overlap its own shards. If one rank fails, all
ranks raise the same error.

torch.distributed.checkpoint is not used, because it reads its `.metadata` with pickle, which can run code.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import socket
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

from padfree.checkpoint.background import RankCopy, WriteChoice, choose_write
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
    TrainedModel,
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
from padfree.choices import Asynchronous
from padfree.distributed.peers import PATIENCE, is_loss, watching
from padfree.errors import UserError
from padfree.host_memory import free_host_memory
from padfree.model.export import sync
from padfree.model.named_tensors import local_part, local_region

LATEST = "latest"
NAME = re.compile(r"step-\d{8,}(\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """The data that one rank writes to one checkpoint."""

    name: str
    tensors: dict[str, Tensor]  # the contents of this rank's file
    offsets: dict[str, list[int]]  # offsets of pieces in their whole tensors
    content: dict[str, Any]  # the manifest, without the data gathered from the ranks
    rank_state: dict[str, Any]  # the values that only this rank has, without tensors
    kept: Path | None  # the checkpoint that was protected from deletion when `save` was called


class Checkpointer:
    """Saves checkpoints to one folder, and loads them. All methods are collective: every rank calls them."""

    def __init__(self, folder: str | Path, *, keep_last: int = 2, asynchronous: Asynchronous = False) -> None:
        if keep_last < 1:
            raise UserError("keep_last", "", "give 1 or more", value=keep_last)
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.choice: WriteChoice | None = None  # the last choice of `asynchronous="auto"`
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if several else 0
        self._world = dist.get_world_size() if several else 1
        # The saving thread uses its own process group, so that its messages do not mix with those of a training step.
        self._group: ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self.kept: Path | None = None  # a checkpoint that is never deleted, whatever its age
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
        critic: TrainedModel | None = None,
        last: bool = False,
    ) -> Path:
        """Write a checkpoint and return its folder. Unless `last` is True, an asynchronous checkpoint is complete only
        after `wait`.

        `extra` holds values that are equal on every rank, and `rank_state` values of this rank (tensors or JSON
        values). `reference` holds the tensors of a reference model.
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
            "extra": copy.deepcopy(shared),  # a copy, because the run may change it while the thread is still writing
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
            kept=self.kept,
        )
        if last or not self._in_background(tensors, model):
            self._finish(job)
            return self.folder / job.name
        for key, tensor in tensors.items():
            tensors[key] = tensor.detach().to("cpu", copy=True)
        # The process can end although the thread waits for a rank that is gone.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()
        return self.folder / job.name

    def wait(self) -> None:
        """Wait until an asynchronous save is complete, and raise its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def keep(self, path: Path | None) -> None:
        """Protect the checkpoint in folder `path` from deletion.

        Only one checkpoint is protected. A later call replaces it, and `keep(None)` ends the protection.
        """
        self.kept = path

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Context manager that waits for an asynchronous save when its block ends.

        If both the block and the save raise an error, the error of the block is raised.
        """
        try:
            yield
        except BaseException as error:
            if self._thread is not None:
                # Wait for the checkpoint, because the threads of other ranks may still complete it. If a rank is gone,
                # they cannot, and the thread may wait for it until the timeout of its group.
                self._thread.join(PATIENCE if is_loss(error) else None)
            raise
        self.wait()

    def _in_background(self, tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
        """Return whether to copy the checkpoint's `tensors` to host memory and write them in a thread. All ranks get
        the same answer.
        """
        if self.asynchronous != "auto":
            return self.asynchronous
        own = RankCopy(
            host=socket.gethostname(),
            size=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            free=free_host_memory(),
            on_cpu=next(model.parameters()).device.type == "cpu",
        )
        self.choice = choose_write(self._gather(own))
        return self.choice.background

    def _run(self, job: _Job) -> None:
        try:
            self._finish(job)
        except BaseException as failure:
            self._failure = failure

    def _writes(self, tensor: Tensor) -> bool:
        """Return whether this rank writes the part of the tensor that it holds.

        If several ranks hold the same part, one of them writes it.
        """
        if not isinstance(tensor, DTensor):
            return self._rank == 0
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        copies = zip(tensor.placements, coordinate, strict=True)
        return all(index == 0 for placement, index in copies if placement.is_replicate())

    def _begin(self, step: int) -> str:
        """Create the folder of a new checkpoint, and return the checkpoint's name."""
        name = ""
        with self._failing_together() as errors:
            if self._rank == 0:
                with _collecting_error(errors, self.folder, self._write_problem()):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    for path in self.folder.iterdir():
                        if path.suffix in (".partial", ".removing") and NAME.fullmatch(path.stem):
                            shutil.rmtree(path)
                    # A checkpoint is never overwritten: a second one of step 10 is named step-00000010.1.
                    name = stem = f"step-{step:08d}"
                    number = 0
                    while (self.folder / name).exists():
                        number += 1
                        name = f"{stem}.{number}"
                    (self.folder / f"{name}.partial").mkdir()
        return str(self._gather(name)[0])

    def _finish(self, job: _Job) -> None:
        partial = self.folder / f"{job.name}.partial"
        file = f"rank-{self._rank:05d}.safetensors"
        size, digest = 0, ""
        try:
            with self._failing_together() as errors, _collecting_error(errors, partial / file, self._write_problem()):
                size, digest = write_safetensors(partial / file, job.tensors)
            shapes = {key: list(job.tensors[key].shape) for key in job.offsets}
            gathered = self._gather((file, size, digest, job.offsets, shapes, job.rank_state))
            with self._failing_together() as errors:
                if self._rank == 0:
                    with _collecting_error(errors, self.folder, self._write_problem()):
                        self._commit(partial, join_manifest(job.content, gathered), job.kept)
        except CheckpointError:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _commit(self, partial: Path, content: dict[str, Any], kept: Path | None) -> None:
        for file, about in content["files"].items():
            if not (partial / file).exists():
                raise CheckpointError(
                    "checkpoint", f"rank 0 cannot see the file {partial / file}", "give a folder that all ranks share"
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
        for path in [path for path in self._complete() if path != kept][: -self.keep_last]:
            if path not in (final, kept):
                removing = path.with_name(f"{path.name}.removing")
                path.rename(removing)
                shutil.rmtree(removing)

    # Resuming

    def latest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint, or None."""
        return latest_in(self.folder)

    def agreed_latest(self) -> Path | None:
        """Return on every rank the newest complete checkpoint that rank 0 finds, because ranks may see different states
        of the folder.
        """
        path: Path | None = self._gather(self.latest() if self._rank == 0 else None)[0]
        return path

    def extra(self, path: str | Path) -> dict[str, Any]:
        """Return the values given to `save` as `extra`, without those that are tensors. No tensor is read."""
        path, content = Path(path), {}
        cure = self._fix(path)
        with self._failing_together() as errors, _collecting_error(errors, path, f"cannot be read; {cure}"):
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
        critic: TrainedModel | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Check the checkpoint in folder `path`, then load it. Return `extra` and `rank_state` as given to `save`.

        `rank_state` is None if another number of ranks saved the checkpoint. `reference` changes only if the checkpoint
        holds a reference model. A given `critic` must be in the checkpoint.
        """
        path = Path(path)
        cure = self._fix(path)
        content: dict[str, Any] = {}
        base, refreshed = self._fingerprint(model), False
        with self._failing_together() as errors, _collecting_error(errors, path, f"cannot be read; {cure}"):
            content = read_manifest(path, cure)
            check_model(content, path, model, optimizer, base)
            refreshed = reference is not None and check_reference(content, path, reference)
            if critic is not None:
                check_critic(content, path, critic)
        with self._failing_together() as errors, _collecting_error(errors, path, f"cannot be read; {cure}"):
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
                load_optimizer(*critic, content["critic"], reader.with_prefix(CRITIC))
        rank_state: dict[str, Any] | None = None
        if content["world"] == self._world:
            rank_state = content["rank_state"][self._rank]
            with safe_open(path / f"rank-{self._rank:05d}.safetensors", framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  a file, not a mapping
                    if key.startswith("rank/"):
                        rank_state[key.removeprefix("rank/")] = file.get_tensor(key)
        return {**content["extra"], **reader.read_all("extra/")}, rank_state

    def _complete(self) -> list[Path]:
        return complete_in(self.folder)

    def _fix(self, path: Path) -> str:
        others = [other for other in self._complete() if other.resolve() != path.resolve()]
        return f"remove {path.name} to {f'resume from {others[-1]}' if others else 'start over'}"

    def _write_problem(self) -> str:
        latest = self.latest()
        stays = f"; the run can still be resumed from {latest}" if latest else ""
        return f"cannot be written; free space or give another folder{stays}"

    # Ranks

    def _fingerprint(self, model: nn.Module) -> str | None:
        """Return a hash of the frozen weights of a model with adapters, or None if it has no adapters."""
        if model not in self._fingerprints:
            base = base_tensors(model)
            self._fingerprints[model] = self.fingerprint(base) if base else None
        return self._fingerprints[model]

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """Return a hash of all `tensors` that does not depend on their sharding. Every rank must call this."""
        bits = {name: bits_of(tensor) for name, tensor in tensors.items() if self._writes(tensor)}
        total: Counter[str] = Counter()
        for gathered in self._gather(bits):
            total.update(gathered)
        return hash_of(total)

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world
        with watching("checkpoint", self._group):
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _failing_together(self) -> Iterator[list[CheckpointError]]:
        """Context manager that yields a list for the errors of this rank.

        If any rank has added an error by the end of the block, all ranks raise the first error.
        """
        errors: list[CheckpointError] = []
        yield errors
        for gathered in self._gather(errors):
            if gathered:
                raise gathered[0]


def complete_in(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints in `folder`, the newest last."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def step_of(path: Path) -> int:
    """Return the training step at which the checkpoint in folder `path` was saved."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def latest_in(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None."""
    pointer = folder / LATEST
    if pointer.exists():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        if NAME.fullmatch(name) and (folder / name / MANIFEST).exists():
            return folder / name
    complete = complete_in(folder)
    return complete[-1] if complete else None


@contextmanager
def _collecting_error(errors: list[CheckpointError], path: Path, what: str) -> Iterator[None]:
    """Context manager that catches a `CheckpointError` or an `OSError` in its block and appends it to `errors`.

    An `OSError` becomes a `CheckpointError` about `path`, with the problem and the fix in `what`: "problem; fix".
    """
    try:
        yield
    except CheckpointError as error:
        errors.append(error)
    except OSError as error:
        problem, _, cure = what.partition("; ")
        fact = f"{error.filename or path} {problem} ({error.strerror or error})"
        errors.append(CheckpointError("checkpoint", fact, cure))
