"""Failures of a run that a user can do something about, each as a `UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from padfree.config import Config
from padfree.distributed import PeerLostError
from padfree.errors import UserError, system_error
from padfree.train.finite_checks import NonFiniteError


@contextmanager
def one_line_failures(config: Config) -> Iterator[None]:
    """Raise a `UserError` for a lost peer, a loss that is not finite, memory that ran out and a disk that is full."""
    try:
        yield
    except (NonFiniteError, PeerLostError) as error:
        raise UserError.of(str(error)) from error
    except OSError as error:
        raise (system_error(error) or error) from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            "batch.max_tokens",
            f"{config.batch.max_tokens}, but the device's memory ran out ({first_sentence(error)})",
            "give fewer, or set parallel.checkpointing=full",
        ) from error


def first_sentence(error: Exception) -> str:
    """The beginning of a long message."""
    return " ".join(str(error).split()).partition(". ")[0]
