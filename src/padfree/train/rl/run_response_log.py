"""The journal of sampled responses in step with the checkpoints of a run (`padfree.rollout.response_log`).

A response can be used again if the weights and the settings that the run goes on with are those that it was sampled
under. Weights are compared by their fingerprint where a part of the journal begins, which is at a checkpoint or at the
first step; settings by a digest of all that change what is sampled or trained.
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
    "rollout.transfer",
    "rollout.timeout",
    "rollout.canary",
    "rollout.max_concurrent",
    "rollout.kv_cache_memory",
    "batch.max_tokens",
    "parallel.",
    "checkpoint.",
    "eval.",
    "track.",
    "run.timeout",
)
"""Beginnings of the names of settings that change neither what is sampled nor what is learned, but for rounding."""


def settings_digest(made_with: Mapping[str, Any]) -> str:
    """Of the record that checkpoints hold, see `padfree.train.resume`."""
    settings = {name: value for name, value in made_with["settings"].items() if not name.startswith(WITHOUT_EFFECT)}
    return hash_of({**made_with, "settings": settings, "padfree": __version__})


class RunResponseLog:
    """Every rank calls all of it alike."""

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

    def begin(self, step: int, *, after: int, resume: bool) -> str | None:
        """Go on after this step and batch; a line about what is there already."""
        origin = self._origin(step)
        error = None
        if self._axis.rank == 0:
            try:
                with writing(self._response_log.folder):
                    self._response_log.purge(origin if resume else None)
            except UserError as wrong:
                error = wrong
        raise_together(error, self._axis.group)
        with writing(self._response_log.folder):
            found = self._response_log.begin(origin, after=after)
        return f"{found} responses of the journal are not sampled again" if found else None

    def turn(self, step: int, *, after: int, highest: int) -> None:
        """Before the state for a checkpoint is collected."""
        origin = self._origin(step)
        with writing(self._response_log.folder):
            self._response_log.turn(origin, after=after, highest=highest)

    def drop(self) -> None:
        """Remove what the last complete checkpoint covers."""
        latest = self._checkpointer.latest() if self._axis.rank == 0 else None
        if latest is not None:
            self._response_log.drop(step_of(latest))

    def close(self) -> None:
        self.drop()
        self._response_log.close()

    def _origin(self, step: int) -> Origin:
        weights = self._checkpointer.fingerprint({**base_tensors(self._model), **saved_tensors(self._model)})
        return Origin(step=step, weights=weights, settings=self._settings)
