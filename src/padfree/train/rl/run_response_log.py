"""The log of a run's sampled responses, so that a resumed run need not sample them again.

The log (`padfree.rollout.response_log`) consists of parts, and each checkpoint begins a new part. When the checkpoint
is complete, parts that are no longer needed are deleted.

A resumed run reuses responses only if weights and settings are unchanged. Each part therefore begins with a fingerprint
of the weights and a digest of the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from padfree.checkpoint.checkpoint_files import hash_of
from padfree.checkpoint.checkpointer import Checkpointer, step_of
from padfree.checkpoint.manifest import base_tensors, saved_tensors
from padfree.distributed import Axis, raise_together
from padfree.errors import UserError
from padfree.record.run_folder import writing
from padfree.rollout.response_log import Origin, ResponseLog
from padfree.version import __version__

WITHOUT_EFFECT = (
    "rollout.servers",
    "rollout.launch.",
    "rollout.colocated",
    "rollout.server_memory",
    "rollout.sleeping_memory",
    "rollout.transfer",
    "rollout.weight_sync",
    "rollout.timeout",
    "rollout.canary",
    "rollout.max_concurrent",
    "rollout.kv_cache_memory",
    "rollout.exact",
    "batch.max_tokens",
    "parallel.",
    "checkpoint.",
    "eval.",
    "track.",
    "run.timeout",
    "slurm.",
)
"""Prefixes of settings that may differ between a run that reuses logged responses and the run that sampled them. These
settings change results by rounding errors at most."""


def settings_digest(made_with: Mapping[str, Any]) -> str:
    """Return a digest of `made_with`, a checkpoint's record of settings, model and data.

    A resumed run reuses logged responses only if the digests are equal. The digest leaves out the settings in
    `WITHOUT_EFFECT`.
    """
    settings = {name: value for name, value in made_with["settings"].items() if not name.startswith(WITHOUT_EFFECT)}
    return hash_of({**made_with, "settings": settings, "padfree": __version__})


class RunResponseLog:
    """The response log of a run: responses sampled since the last checkpoint, on disk.

    All ranks must call each method.
    """

    def __init__(
        self,
        response_log: ResponseLog,
        checkpointer: Checkpointer,
        model: nn.Module,
        made_with: Mapping[str, Any],
        axis: Axis,
    ) -> None:
        self._response_log, self._checkpointer, self._model, self._axis = response_log, checkpointer, model, axis
        self._settings = settings_digest(made_with)

    def begin(self, step: int, *, after: int) -> str | None:
        """Start to log responses. Return a note for the user if the run can reuse logged responses.

        `step`: the number of steps so far. `after`: reuse only batches with a higher number.
        """
        origin = self._origin(step)
        error = None
        if self._axis.rank == 0:
            try:
                with writing(self._response_log.folder):
                    self._response_log.purge(origin)
            except UserError as wrong:
                error = wrong
        raise_together(error, self._axis.group)
        with writing(self._response_log.folder):
            found = self._response_log.begin(origin, after=after)
        return f"reusing {found} responses from the response log" if found else None

    def start_part(self, step: int, *, after: int, last_batch: int) -> None:
        """Start a new part of the log. Call this before the state for a checkpoint is collected.

        `after`: the last batch that a resumed run need not sample again. `last_batch`: the newest batch requested from
        the sampler.
        """
        origin = self._origin(step)
        with writing(self._response_log.folder):
            self._response_log.turn(origin, after=after, highest=last_batch)

    def drop(self) -> None:
        """Delete the parts of the log that the last complete checkpoint makes unnecessary."""
        latest = self._checkpointer.latest() if self._axis.rank == 0 else None
        if latest is not None:
            self._response_log.drop(step_of(latest))

    def close(self, *, is_needed: bool = True) -> None:
        """Close the log. `is_needed`: whether a resumed run may need the log. If not, the log is deleted."""
        self.drop()
        self._response_log.close()
        if not is_needed and self._axis.rank == 0:
            with writing(self._response_log.folder):
                self._response_log.remove()

    def _origin(self, step: int) -> Origin:
        weights = self._checkpointer.fingerprint({**base_tensors(self._model), **saved_tensors(self._model)})
        return Origin(step=step, weights=weights, settings=self._settings)
