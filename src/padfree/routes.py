"""Routes: the experts that the sampler's routers chose for each token, in each layer with experts.

Routes have the shape [n, R, k]: n tokens of a sample, R layers with experts, and k chosen experts. The dtype is uint8
for up to 255 experts, and 255 marks an unknown route. For more experts it is int16, and -1 marks an unknown route.

`routes[j]` are the experts that processed token j as an input of the model. The last token of a response was never an
input, so its route is unknown. If a route is unknown, the trainer's own routers choose the experts.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import host_array
from padfree.errors import UserError

Routes = NDArray[np.integer[Any]]

MOST_EXPERTS = 32767
"""The largest number of experts per layer for which routes can be stored (as int16)."""


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the dtype in which routes (the experts chosen for each token) are stored if a layer has `num_experts`
    experts.
    """
    assert num_experts <= MOST_EXPERTS
    return np.dtype(np.uint8 if num_experts <= 255 else np.int16)


def unknown_in(dtype: np.dtype[Any]) -> int:
    """Return the number that stands for unknown experts in arrays of routes with this dtype."""
    return 255 if dtype == np.uint8 else -1


def unknown_routes(length: int, like: Routes) -> Routes:
    """Return an array [length, R, k] that marks the experts of `length` tokens as unknown.

    `like`: an array of routes with the same dtype, R (layers with experts) and k (experts per token).
    """
    return np.full((length, *like.shape[1:]), unknown_in(like.dtype), like.dtype)


def is_unknown(routes: Routes) -> NDArray[np.bool_]:
    """Return bools [n] that say whether the route of each token (the experts chosen for it) is unknown."""
    found: NDArray[np.bool_] = (routes == unknown_in(routes.dtype)).reshape(len(routes), -1).any(1)
    return found


def checked_routes(values: Any, length: int, name: str) -> Routes:
    """Check the routes of a sample (the experts chosen for each token). Return them as an array [n, R, k], uint8 or
    int16.

    n is the number of tokens (`length`), R of layers with experts, and k of experts per token. `name`: the sample's
    name in messages.
    """
    array = host_array(values, f"routes of {name}")
    if array.ndim != 3 or array.dtype.kind not in "iu" or len(array) != length or not array[:1].size:
        raise UserError(
            f"routes of {name}",
            f"are a {array.dtype} array of shape {array.shape} for {length} tokens",
            "give integers of shape [tokens, layers with experts, experts per token]",
        )
    if array.dtype == np.uint8:
        return array
    if array.size and not -1 <= array.min() <= array.max() < MOST_EXPERTS:
        raise UserError(
            f"routes of {name}",
            f"contain expert indices from {array.min()} to {array.max()}",
            f"give indices from 0 to {MOST_EXPERTS - 1}, or -1 for an unknown route",
        )
    return array.astype(np.int16, copy=False)


def joined_routes(parts: Sequence[Routes | None], lengths: Sequence[int]) -> Routes | None:
    """Concatenate the routes of consecutive parts of a sample: arrays of the experts chosen for each token.

    If part i is None, its `lengths[i]` tokens get unknown routes. The result is None if all parts are None.
    """
    given = [part for part in parts if part is not None]
    if not given:
        return None
    shapes = {part.shape[1:] for part in given}
    if len(shapes) > 1:
        raise UserError(
            "routes",
            "arrays of chosen experts have different shapes [layers, experts per token]: "
            f"{', '.join(map(str, sorted(shapes)))}",
            "use samples whose routes come from one model",
        )
    if len({part.dtype for part in given}) > 1:
        given = [as_int16(part) for part in given]
    widened = iter(given)
    filled = [
        unknown_routes(length, given[0]) if part is None else next(widened)
        for part, length in zip(parts, lengths, strict=True)
    ]
    return np.concatenate(filled)


def as_int16(routes: Routes) -> Routes:
    if routes.dtype == np.int16:
        return routes
    return np.where(routes == unknown_in(routes.dtype), -1, routes.astype(np.int16))


def merged_routes(first: Routes | None, later: Routes | None, length: int) -> Routes | None:
    """Merge two arrays of routes (experts chosen for each token): use `later` where the route in `first` is unknown.

    The result has routes for `length` tokens. `first` and `later` may have fewer.
    """
    known, other = (
        None if part is None else joined_routes([part, None], [0, length - len(part)]) for part in (first, later)
    )
    if known is None or other is None:
        return other if known is None else known
    if known.dtype != other.dtype:
        known, other = as_int16(known), as_int16(other)
    return np.where(is_unknown(known)[:, None, None], other, known)


def route_keys(tokens: Sequence[NDArray[Any]], routes: Sequence[Routes | None]) -> list[NDArray[Any]]:
    """Number the tokens of all samples. Tokens get the same number if their ids and their routes (chosen experts) are
    equal.

    Samples can share a prefix only as far as these numbers are equal, because hidden states depend on the experts.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    keys: list[NDArray[Any]] = []
    for ids, own in zip(tokens, routes, strict=True):
        rows = [b""] * len(ids) if own is None else [row.tobytes() for row in own]
        pairs = zip(ids.tolist(), rows, strict=True)
        keys.append(np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in pairs), np.int64, count=len(ids)))
    return keys


def encoded_routes(routes: Routes) -> dict[str, Any]:
    """Return an array of routes (experts chosen for each token) as JSON, from which `decoded_routes` restores it."""
    content = b64encode(np.ascontiguousarray(routes, dtype=routes.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "base64": content}


def decoded_routes(value: Any) -> NDArray[Any]:
    """Return the array of routes (experts chosen for each token) that a JSON value contains.

    The value has nested lists, or is a result of `encoded_routes`. Any other value raises a `UserError`.
    """
    if not isinstance(value, dict):
        return np.array(value)
    try:
        dtypes: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}
        dtype = dtypes[value["dtype"]]
        flat: NDArray[Any] = np.frombuffer(b64decode(value["base64"], validate=True), dtype)
        return flat.reshape(value["shape"]).copy()
    except (KeyError, TypeError) as error:
        fix = "give nested lists, or the object that padfree writes"
        raise UserError("routes", f"cannot be read ({type(error).__name__}: {error})", fix) from None
