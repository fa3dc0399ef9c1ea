"""Sample responses in batches with a plain HF model, its own attention and its own KV cache.

Prompts are left-padded to the same length. In this example, - is a padding token, and 0 ends a response:

    prompt    response    row of the batch    positions
    7 8       5 6 0       - 7 8 5 6 0         0 0 1 2 3 4
    3 4 9     2 0         3 4 9 2 0           0 1 2 3 4

Some models give wrong results with padding or with a cache. `cache_use` finds out what a model allows.

Up to rounding, a response does not depend on other responses in its batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.errors import UserError
from padfree.kept_sets import KeptSets
from padfree.model.mixers.own_forward import reference_functions
from padfree.model.probe import small_copy, undisturbed
from padfree.model.route_replay import RouteRecorder
from padfree.model.shrink import VOCABULARY
from padfree.rollout.base import OnFinished, OnProgress, OnTokens, Response, SamplingRequest
from padfree.rollout.sampling_rng import gumbel_argmax
from padfree.rollout.truncation import WHOLE, Truncation, sets_of, truncated_logits
from padfree.routes import Routes, merged_routes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that end a response: the eos tokens of the tokenizer and of the model's generation config.

    Ids of the generation config must be special tokens, because many configs contain a wrong default. Raise a
    `UserError` if the tokenizer has no eos token.
    """
    eos: Any = tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            "model.tokenizer", "has no eos token, so no response can end", "set eos_token in the tokenizer's files"
        )
    named: Any = getattr(model.generation_config, "eos_token_id", None)
    others = [] if named is None else [named] if isinstance(named, int) else list(named)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(sorted({int(eos), *(int(other) for other in others if other in special)}))


CacheUse = Literal["padded", "equal lengths", "none"]
"""How a model is sampled. "padded": with a KV cache, in batches of padded prompts of similar length. "equal lengths":
with a KV cache, in batches of prompts of equal length. "none": like "equal lengths", but without a KV cache.
"""

TRIED_LENGTHS = (6, 1, 14, 6)
TRIED_TOKENS = 5
TOLERANCE = 1e-4
"""Maximum accepted difference of a token's log-probability from its value without cache and padding.

Rounding in float32 causes differences below 1e-5, attention to padding tokens causes differences above 1e-3.
"""


def cache_use(model: PreTrainedModel) -> CacheUse:
    """Return the fastest `CacheUse` that gives the same results as sampling without cache and padding.

    Each value of `CacheUse` is tried on a small copy of the model on the CPU.
    """
    with undisturbed(), torch.no_grad():
        copy = small_copy(model)
        if copy is None:
            return "none"
        copy.set_attn_implementation("eager")
        with reference_functions(copy):
            return _tried_use(copy)


def _tried_use(copy: PreTrainedModel) -> CacheUse:
    """Return the fastest `CacheUse` that gives correct results for `copy`, a small copy of the model on the CPU."""
    rng = np.random.default_rng(0)
    requests = [
        SamplingRequest(tokens=rng.integers(0, VOCABULARY, length), max_new_tokens=TRIED_TOKENS, key=key)
        for key, length in enumerate(TRIED_LENGTHS)
    ]
    settings: dict[str, Any] = {"temperature": 1.0, "stops": (), "batch_size": len(requests)}
    try:
        exact = write_responses(copy, requests, **settings, use="none")
    except Exception:  # for example, the model's code does not run on a CPU
        return "none"
    for use in USES[:-1]:
        try:
            tried = write_responses(copy, requests, **settings, use=use)
        except Exception:  # the model has another cache interface
            continue
        if all(_same(*pair) for pair in zip(tried, exact, strict=True)):
            return use
    return "none"


USES: tuple[CacheUse, ...] = get_args(CacheUse)


def _same(found: Response, exact: Response) -> bool:
    return np.array_equal(found.tokens, exact.tokens) and np.allclose(found.logprobs, exact.logprobs, atol=TOLERANCE)


def write_responses(
    model: PreTrainedModel,
    requests: Sequence[SamplingRequest],
    *,
    temperature: float,
    stops: Iterable[int],
    batch_size: int,
    use: CacheUse = "padded",
    version: int = 0,
    recorder: RouteRecorder | None = None,
    truncation: Truncation = WHOLE,
    on_progress: OnProgress | None = None,
    on_finished: OnFinished | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Response]:
    """Return one response for each request, in order. The model must be in evaluation mode.

    `stops`: token ids that end a response. `use`: the result of `cache_use`. `recorder`: records the routes (the
    experts of each token). `on_tokens`: called for each new token.
    """
    assert not model.training
    ends = torch.tensor(sorted(stops), device=model.device)
    responses: dict[int, Response] = {}
    for chosen in _batches([len(request.tokens) for request in requests], batch_size, padded=use == "padded"):
        together = [requests[index] for index in chosen]
        on_batch = None if on_tokens is None else _with_request_index(on_tokens, chosen)
        written = _write(
            model,
            together,
            temperature,
            ends,
            version,
            cached=use != "none",
            recorder=recorder,
            truncation=truncation,
            on_tokens=on_batch,
        )
        responses.update(zip(chosen, written, strict=True))
        if on_finished is not None:
            on_finished(list(zip(chosen, written, strict=True)))
        if on_progress is not None:
            on_progress(len(responses))
    return [responses[index] for index in range(len(requests))]


def _batches(lengths: Sequence[int], size: int, *, padded: bool) -> list[list[int]]:
    """Divide prompts into batches of at most `size` prompts. Return the indices of the prompts of each batch.

    `lengths`: the number of tokens of each prompt. A batch has prompts of similar length if `padded`, and otherwise
    only prompts of equal length.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    runs = [order] if padded else [list(run) for _, run in groupby(order, key=lambda index: lengths[index])]
    return [run[first : first + size] for run in runs for first in range(0, len(run), size)]


@torch.no_grad()
def _write(
    model: PreTrainedModel,
    requests: Sequence[SamplingRequest],
    temperature: float,
    ends: Tensor,
    version: int,
    *,
    cached: bool,
    recorder: RouteRecorder | None,
    truncation: Truncation,
    on_tokens: OnTokens | None,
) -> list[Response]:
    device = model.device
    input_ids, mask = (tensor.to(device) for tensor in _left_padded([request.tokens for request in requests]))
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    keys = torch.tensor([request.key for request in requests], device=device)
    limits = torch.tensor([request.max_new_tokens for request in requests], device=device)
    writing = torch.ones(len(requests), dtype=torch.bool, device=device)
    # Compute only the logits of the last position. The logits of all prompt tokens can take more memory than the model.
    known = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    cache, tokens, logprobs = None, [], []
    routes: list[Tensor] = []  # [R, new tokens, routers, k] of each step
    kept: list[KeptSets] = []  # [R] for each token
    for position in range(max(request.max_new_tokens for request in requests)):
        if recorder is not None:
            recorder.clear()
        output: Any = model(
            input_ids=input_ids,
            attention_mask=mask,
            use_cache=cached,
            **({"position_ids": position_ids} if "position_ids" in known else {}),
            **({"past_key_values": cache} if cached else {}),
            **keep,
        )
        cache = output.past_key_values if cached else None
        if recorder is not None:
            found = recorder.take()
            found = found.view(*input_ids.shape, *found.shape[1:])
            routes.append(found if not routes else found[:, -1:])
        logits = output.logits[:, -1].float() / temperature  # [R, V]
        if truncation.is_active:
            logits, mask_of_sets = truncated_logits(logits, truncation, keys, position, ends)
            kept.append(sets_of(mask_of_sets))
        scores = torch.log_softmax(logits, dim=-1)
        sampled = gumbel_argmax(scores, keys, position)
        tokens.append(sampled)
        logprobs.append(scores.gather(1, sampled[:, None])[:, 0])
        if on_tokens is not None:
            for index in writing.nonzero()[:, 0].tolist():
                on_tokens(
                    index, sampled[index : index + 1].cpu().numpy(), logprobs[-1][index : index + 1].cpu().numpy()
                )
        writing &= ~torch.isin(sampled, ends) & (position + 1 < limits)
        if not writing.any():
            break
        input_ids, position_ids = _next(input_ids, position_ids, sampled, cached=cached)
        mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
    return _responses(
        requests,
        torch.stack(tokens, 1).cpu(),
        torch.stack(logprobs, 1).cpu(),
        ends.cpu(),
        version,
        KeptSets.joined(kept) if kept else None,
        torch.cat(routes, 1).cpu().numpy() if routes else None,
    )


def _with_request_index(on_tokens: OnTokens, requests: Sequence[int]) -> OnTokens:
    """Wrap the callback `on_tokens`, so that it gets the index of a request instead of the index in a batch.

    `requests[i]`: the index of the request that is at index i of the batch.
    """
    return lambda index, tokens, logprobs: on_tokens(requests[index], tokens, logprobs)


def _next(input_ids: Tensor, position_ids: Tensor, sampled: Tensor, *, cached: bool) -> tuple[Tensor, Tensor]:
    """Return the token ids and position ids of the next forward pass. `sampled` [R]: the new token of each sequence.

    With `cached`, the next forward pass gets only the new tokens. Otherwise, it gets the whole sequences.
    """
    tokens, positions = sampled[:, None], position_ids[:, -1:] + 1
    if cached:
        return tokens, positions
    return torch.cat([input_ids, tokens], 1), torch.cat([position_ids, positions], 1)


def _left_padded(prompts: Sequence[NDArray[np.integer[Any]]]) -> tuple[Tensor, Tensor]:
    """Return token ids [R, width] int64, left-padded with 0, and a mask [R, width] int64 that is 1 for real tokens."""
    width = max(len(prompt) for prompt in prompts)
    input_ids = np.zeros((len(prompts), width), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for index, prompt in enumerate(prompts):
        input_ids[index, width - len(prompt) :] = prompt
        mask[index, width - len(prompt) :] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def _responses(
    requests: Sequence[SamplingRequest],
    tokens: Tensor,
    logprobs: Tensor,
    ends: Tensor,
    version: int,
    kept: KeptSets | None,
    routes: Routes | None,
) -> list[Response]:
    """Make one response for each of R requests, cut after its first stop token or at its `max_new_tokens`.

    `tokens`, `logprobs` [R, n]: the results of n steps. `kept` [n · R]: the kept sets (ids from which a token was
    sampled), step after step. `routes`: the experts of each token, padding included.
    """
    responses = []
    is_end = torch.isin(tokens, ends).numpy()
    arrays = zip(requests, tokens.numpy(), logprobs.numpy(), is_end, strict=True)
    for row, (request, ids, values, stops) in enumerate(arrays):
        allowed = stops[: request.max_new_tokens]
        ended = bool(allowed.any())
        length = int(allowed.argmax()) + 1 if ended else len(allowed)
        responses.append(
            Response(
                tokens=ids[:length].copy(),
                logprobs=values[:length].copy(),
                ended=ended,
                version=version,
                kept=None if kept is None else kept.take(np.arange(length) * len(requests) + row),
                routes=None
                if routes is None
                else _routes_of(routes[row], tokens.shape[1], len(request.tokens), length),
            )
        )
    return responses


def _routes_of(routes: Routes, num_steps: int, prompt: int, length: int) -> Routes | None:
    """Return the routes (the experts of each token) of a prompt of `prompt` tokens and its response of `length` tokens.

    `routes` begin with the left padding, and lack the last of the `num_steps` sampled tokens.
    """
    begin = len(routes) - (num_steps - 1) - prompt
    # The routes of the response's last token are unknown.
    return merged_routes(routes[begin : begin + prompt + length - 1].copy(), None, prompt + length)
