"""The run folder: which folders a run may write to, and the lock of the process that writes.

    run.json           marks a folder of padfree: {"made_by": "padfree", "run": ..., "padfree": ..., "created": ...}
    run.lock           locked by the process that writes; the system releases the lock when the process ends
    run.holder.json    the process that holds the lock: {"pid": ..., "host": ..., "since": ...}

A run accepts a folder that is new, empty, or has a `run.json`. It refuses any other folder before it writes anything.

On a file system without locks, a run is refused if the process in `run.holder.json` is alive or on another host.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock, Timeout

from padfree.config import Config
from padfree.config.functions import model_of
from padfree.config.hub import shortened
from padfree.config.inputs import check_regular
from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.model.export import not_an_export
from padfree.record.file_names import CONFIG, CRITIC_MODEL, HOLDER, LOCK, MARKER, MODEL
from padfree.version import __version__

LOG_SUFFIXES = (".log", ".out", ".err")  # files that a launcher may have opened before the run begins
SECTIONS = ("model", "data", "batch", "run", "optimizer", "checkpoint")
"""Sections that `config.json` has in every version of padfree. A run folder of an early version, which has no
`run.json`, is recognised by these sections."""

SHOWN_SECONDS = 20.0
"""Maximum seconds until a host sees a file that another host has written to a shared folder."""

LOCK_SECONDS = 1.0
"""Seconds to wait for the lock: a process that has just been killed may take a moment to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The content of `run.json`: the id of the run, the padfree version that created the run, and the creation time."""

    run: str
    padfree: str
    created: str
    made_by: str = "padfree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The content of `run.holder.json`: the process that writes to the folder."""

    pid: int
    host: str
    since: str


def check_run_folder(config: Config) -> None:
    """Raise a `UserError` if a run must not write to `run.folder`. This function writes nothing."""
    folder = Path(config.run.folder)
    try:
        folder.stat()
        check_regular(folder, "run.folder")  # opening a FIFO would block
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # e.g. a long name, or a loop of links
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "run.folder", f"{shortened(str(folder))} cannot be used ({reason})", "give another folder"
        ) from None
    _check_inputs(config, folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError("run.folder", f"{folder} is a file", "give a new or an empty folder")
    if (folder / MARKER).exists():
        read_identity(folder)
    elif not _made_by_older_version(folder):
        own = {MARKER, LOCK, HOLDER}
        foreign = sorted(
            path.name
            for path in folder.iterdir()
            if path.name not in own and path.suffix not in (*LOG_SUFFIXES, ".writing")
        )
        if foreign:
            raise UserError(
                "run.folder",
                f"{folder} contains {foreign[0]} but no {MARKER}, so it is not a run folder of padfree",
                "give a new or an empty folder",
            )
    exported = {MODEL: "trained model"} if config.checkpoint.export else {}
    if exported and config.loss.advantage == "gae":
        exported[CRITIC_MODEL] = "critic"
    for name, what in exported.items():
        if reason := not_an_export(folder / name):
            raise UserError(
                "run.folder",
                f"the exported {what} would be written to {folder / name}, but this folder {reason}",
                "move this folder away, give another run.folder, or set checkpoint.export=false",
            )


def _check_inputs(config: Config, folder: Path) -> None:
    """Raise a `UserError` if the run folder contains an input of the run, or lies inside a data folder."""
    resolved = folder.resolve()
    inputs = [
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer),
        ("reference.path", config.reference.path),
        ("teacher.path", config.teacher.path),
        ("critic.path", config.critic.path),
        ("rollout.reward", model_of(config.rollout.reward)),
        ("batch.cost", config.batch.cost),
        *(("data.path", path) for path in config.data.paths),
    ]
    for setting, value in inputs:
        if value is None or not Path(value).exists():
            continue
        read = Path(value).resolve()
        if read == resolved or resolved in read.parents:
            raise UserError(
                "run.folder",
                f"{folder} contains an input of the run: {setting} ({value})",
                "give a new or an empty folder",
            )
        if setting == "data.path" and read in resolved.parents:
            raise UserError(
                "run.folder",
                f"{folder} is inside data.path ({value}), whose files are all read as data",
                "give a folder outside data.path",
            )


def mark_run_folder(config: Config) -> Identity:
    """Create the run folder and its `run.json` if they do not exist. Return the identity of the run, the content of
    `run.json`.
    """
    check_run_folder(config)
    folder = Path(config.run.folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MARKER).exists():
            identity = Identity(run=uuid.uuid4().hex, padfree=__version__, created=_now())
            write_json(folder / MARKER, asdict(identity))
            return identity
    return read_identity(folder)


def read_identity(folder: Path) -> Identity:
    path = folder / MARKER
    found = read_json(path)
    names = Identity.__slots__
    if (
        found is None
        or found.get("made_by") != "padfree"
        or not all(isinstance(found.get(name), str) for name in names)
    ):
        raise UserError("run.folder", f"{path} was not written by padfree", "give a new or an empty folder")
    return Identity(**{name: found[name] for name in names})


@contextmanager
def held_run_folder(config: Config) -> Iterator[Identity]:
    """Context manager that holds the lock of the run folder, and yields the run's identity (the content of `run.json`).

    Every rank must enter it, but only rank 0 takes the lock.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    identity, lock, error = None, None, None
    if first:
        try:
            identity, lock = _lock(config)
        except UserError as caught:
            error = caught
    raise_together(error)
    identity = _identity_of_rank_0(identity)
    try:
        raise_together(_not_shared(Path(config.run.folder), identity))
        yield identity
    finally:
        if lock is not None:
            with suppress(OSError):
                (Path(config.run.folder) / HOLDER).unlink(missing_ok=True)
            lock.release()


def _lock(config: Config) -> tuple[Identity, FileLock]:
    check_run_folder(config)  # before anything is written, even the lock
    folder = Path(config.run.folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.1)
        except Timeout:
            raise _in_use(folder, _read_holder(folder)) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            holder = _read_holder(folder)
            if holder is not None and _may_be_alive(holder):
                raise _in_use(folder, holder, f", or remove {folder / HOLDER} if that process is gone") from None
        try:
            identity = mark_run_folder(config)
            write_json(folder / HOLDER, asdict(Holder(pid=os.getpid(), host=socket.gethostname(), since=_now())))
        except BaseException:
            lock.release()
            raise
    return identity, lock


def check_not_in_use(folder: Path) -> None:
    """Raise a `UserError` if another run is writing to the folder."""
    if not (folder / LOCK).exists():
        return
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.1)
    except Timeout:
        raise _in_use(folder, _read_holder(folder)) from None
    except (OSError, NotImplementedError):
        return
    lock.release()


def _in_use(folder: Path, holder: Holder | None, otherwise: str = "") -> UserError:
    who = "another process" if holder is None else f"process {holder.pid} on {holder.host} since {holder.since}"
    return UserError(
        "run.folder",
        f"{folder} is in use by {who}",
        "wait until that run ends, or give another folder "
        f"(start several processes of one run with torchrun){otherwise}",
    )


def _may_be_alive(holder: Holder) -> bool:
    if holder.host != socket.gethostname():
        return True  # unknown
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return holder.pid != os.getpid()


def _read_holder(folder: Path) -> Holder | None:
    found = read_json(folder / HOLDER)
    try:
        return Holder(pid=int(found["pid"]), host=str(found["host"]), since=str(found["since"])) if found else None
    except (KeyError, TypeError, ValueError):
        return None


def _made_by_older_version(folder: Path) -> bool:
    """Return whether an early version of padfree, which did not write `run.json`, has made this folder."""
    settings = read_json(folder / CONFIG) or {}
    if not all(isinstance(settings.get(section), dict) for section in SECTIONS):
        return False
    return "folder" in settings["run"] and "path" in settings["data"] and "max_tokens" in settings["batch"]


def _identity_of_rank_0(identity: Identity | None) -> Identity:
    """Broadcast the run's identity from rank 0 to every rank. Other ranks pass None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert identity is not None
        return identity
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, identity)
    found: Identity = gathered[0]
    return found


def _not_shared(folder: Path, identity: Identity) -> str | None:
    """Return an error message if `folder` is another folder on this rank's host than on rank 0's host; otherwise
    None.
    """
    deadline = time.monotonic() + SHOWN_SECONDS
    while (read_json(folder / MARKER) or {}).get("run") != identity.run:
        if time.monotonic() > deadline:
            return (
                f"run.folder: {folder} on {socket.gethostname()} is not the folder of rank 0 (it lacks rank 0's "
                f"{MARKER}); give a folder that all hosts share"
            )
        time.sleep(0.1)
    return None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context manager that turns an `OSError` while writing to the folder into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "run.folder",
            f"{error.filename or folder} cannot be written ({error.strerror or error})",
            "free space or give another folder",
        ) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file does not exist or holds no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write to a temporary file and rename it, so that the file is never incomplete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
