"""Failures of a run that a user can do something about, each as a `ValueError` of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from padfree.config import Config
from padfree.distributed import PeerLostError
from padfree.train.finite import NonFiniteError


@contextmanager
def one_line_failures(config: Config) -> Iterator[None]:
    """Raise a `ValueError` in place of a lost peer, a loss that is not finite, and memory that ran out."""
    try:
        yield
    except (NonFiniteError, PeerLostError) as error:
        raise ValueError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"batch.max_tokens: {config.batch.max_tokens}, but the device's memory ran out ({first_sentence(error)}); "
            "give fewer, or set parallel.checkpointing=full"
        ) from error


def first_sentence(error: Exception) -> str:
    """The beginning of a long message."""
    return " ".join(str(error).split()).partition(". ")[0]
