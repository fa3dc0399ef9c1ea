"""Convert failures of a run that a user can fix into a `UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from padfree.distributed import PeerLostError
from padfree.errors import UserError, system_error
from padfree.train.finite_checks import NonFiniteError


@contextmanager
def one_line_failures(max_tokens: int) -> Iterator[None]:
    """Context manager that raises a `UserError` for failures that a user can fix.

    These failures are a lost peer process, a non-finite loss, exhausted GPU memory and a full disk. `max_tokens`: the
    value of `batch.max_tokens`.
    """
    try:
        yield
    except (NonFiniteError, PeerLostError) as error:
        raise UserError.of(str(error)) from error
    except OSError as error:
        raise (system_error(error) or error) from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            "batch.max_tokens",
            f"{max_tokens}, but the device ran out of memory ({first_sentence(error)})",
            "lower batch.max_tokens, or set parallel.checkpointing=full",
        ) from error


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an exception's message, on one line."""
    return " ".join(str(error).split()).partition(". ")[0]
