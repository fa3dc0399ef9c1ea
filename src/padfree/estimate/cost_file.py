"""Read cost models from files: `padfree plan --calibrate` writes such a file, and the setting `batch.cost` names it."""

from __future__ import annotations

from pathlib import Path

from padfree.config.inputs import check_regular
from padfree.errors import UserError
from padfree.packing import CostModel


def read_cost(path: str | Path) -> CostModel:
    """Read the cost model (seconds of a sample as a function of its length) that `padfree plan --calibrate` wrote."""
    check_regular(path, "batch.cost")
    try:
        cost = CostModel.from_json(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(
            "batch.cost", f"{path} cannot be read ({reason})", "create it with padfree plan --calibrate"
        ) from None
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            "batch.cost", f"{path} is not a cost model", "create it with padfree plan --calibrate"
        ) from None
    check_grows(cost, "batch.cost", path)
    return cost


def check_grows(cost: CostModel, setting: str, path: object = None) -> None:
    """Raise a `UserError` if the modelled cost of a sample does not grow with its length.

    Noisy measurements can cause this.
    """
    if not cost.linear and not cost.quadratic:
        subject = "the measured cost of a sample" if path is None else f"the cost of a sample in {path}"
        raise UserError(
            setting,
            f"{subject} does not grow with the number of tokens",
            "measure again with padfree plan --calibrate on an idle device",
        )
