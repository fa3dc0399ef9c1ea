"""Responses sampled from an ordinary HF model, many at a time, with its own attention and key/value cache.

    prompts      7 8          left-padded to one width       - 7 8 | 5 6 0      positions  0 0 1 2 3 4
                 3 4 9                                       3 4 9 | 2 0                   0 1 2 3 4
    responses    5 6 0        0 is eos: the response ends with it                          ^ pad, not attended to
                 2 0

Prompts of similar length are written together, so that pads are few. Layers that are not attention may see the pads:
their models get prompts of one length together. Models whose step with a cache is not what the whole row gives, or that
have no such cache, read the whole row again for every token. `cache_use` tries which of these a model needs.

What is drawn depends on the model, the prompt and
the key of the response (`noise`), up to the rounding of the logits, and not on what else is in the batch.

`logprobs` are those of the drawn tokens at the sampler's temperature, in float32: what the trainer compares its own
with.
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
from padfree.model.mixers.own_forward import reference_functions
from padfree.model.probe import small_copy, undisturbed
from padfree.model.shrink import VOCABULARY
from padfree.rollout.base import OnFinished, OnProgress, OnTokens, Response, SamplingRequest
from padfree.rollout.sampling_rng import gumbel_argmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """What ends a response: the tokenizer's eos, and what else the model's generation config names (end of turn).

    Of the latter only special tokens: the default of many configs is a number that means a word in another vocabulary.
    """
    eos: Any = tokenizer.eos_token_id
    if eos is None:
        raise UserError("model.tokenizer", "it has no eos token, so that no response can end", "set its eos_token")
    named: Any = getattr(model.generation_config, "eos_token_id", None)
    others = [] if named is None else [named] if isinstance(named, int) else list(named)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(sorted({int(eos), *(int(other) for other in others if other in special)}))


CacheUse = Literal["padded", "equal lengths", "none"]
"""Which prompts are written together, and whether their keys and values are kept; `none`: prompts of one length."""

TRIED_LENGTHS = (6, 1, 14, 6)
TRIED_TOKENS = 5
TOLERANCE = 1e-4
"""Of log-probabilities in float32: rounding stays below 1e-5, a pad that was seen is above 1e-3."""


def cache_use(model: PreTrainedModel) -> CacheUse:
    """The first that draws what the model gives without cache and pad, tried on a small copy on the CPU."""
    with undisturbed(), torch.no_grad():
        copy = small_copy(model)
        if copy is None:
            return "none"
        copy.set_attn_implementation("eager")
        with reference_functions(copy):
            return _tried_use(copy)


def _tried_use(copy: PreTrainedModel) -> CacheUse:
    """The first that draws what this model gives without cache and pad."""
    generator = np.random.default_rng(0)
    requests = [
        SamplingRequest(tokens=generator.integers(0, VOCABULARY, length), max_new_tokens=TRIED_TOKENS, key=key)
        for key, length in enumerate(TRIED_LENGTHS)
    ]
    settings: dict[str, Any] = {"temperature": 1.0, "stops": (), "batch_size": len(requests)}
    try:
        exact = write_responses(copy, requests, **settings, use="none")
    except Exception:  # code that does not run on a CPU, say
        return "none"
    for use in USES[:-1]:
        try:
            found = write_responses(copy, requests, **settings, use=use)
        except Exception:  # its cache is called otherwise
            continue
        if all(_same(*pair) for pair in zip(found, exact, strict=True)):
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
    on_progress: OnProgress | None = None,
    on_finished: OnFinished | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Response]:
    """One response for each request, in their order, `batch_size` at a time. The model must be in evaluation mode.

    `on_tokens` is called for every token as soon as it is drawn.
    """
    assert not model.training
    ends = torch.tensor(sorted(stops), device=model.device)
    found: dict[int, Response] = {}
    for chosen in _batches([len(request.tokens) for request in requests], batch_size, padded=use == "padded"):
        together = [requests[index] for index in chosen]
        tell = None if on_tokens is None else _numbered(on_tokens, chosen)
        written = _write(model, together, temperature, ends, version, cached=use != "none", on_tokens=tell)
        found.update(zip(chosen, written, strict=True))
        if on_finished is not None:
            on_finished(list(zip(chosen, written, strict=True)))
        if on_progress is not None:
            on_progress(len(found))
    return [found[index] for index in range(len(requests))]


def _batches(lengths: Sequence[int], size: int, *, padded: bool) -> list[list[int]]:
    """Which prompts are written together: neighbours in length, or only those of one length."""
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
    on_tokens: OnTokens | None,
) -> list[Response]:
    device = model.device
    input_ids, mask = (tensor.to(device) for tensor in _left_padded([request.tokens for request in requests]))
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    keys = torch.tensor([request.key for request in requests], device=device)
    max_new_tokens_each = torch.tensor([request.max_new_tokens for request in requests], device=device)
    writing = torch.ones(len(requests), dtype=torch.bool, device=device)
    # Logits of a whole prompt, for every token of the vocabulary, can be larger than the model.
    known = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    cache, tokens, logprobs = None, [], []
    for position in range(max(request.max_new_tokens for request in requests)):
        output: Any = model(
            input_ids=input_ids,
            attention_mask=mask,
            use_cache=cached,
            **({"position_ids": position_ids} if "position_ids" in known else {}),
            **({"past_key_values": cache} if cached else {}),
            **keep,
        )
        cache = output.past_key_values if cached else None
        scores = torch.log_softmax(output.logits[:, -1].float() / temperature, dim=-1)  # [R, V]
        drawn = gumbel_argmax(scores, keys, position)
        tokens.append(drawn)
        logprobs.append(scores.gather(1, drawn[:, None])[:, 0])
        if on_tokens is not None:
            for row in writing.nonzero()[:, 0].tolist():
                on_tokens(row, drawn[row : row + 1].cpu().numpy(), logprobs[-1][row : row + 1].cpu().numpy())
        writing &= ~torch.isin(drawn, ends) & (position + 1 < max_new_tokens_each)
        if not writing.any():
            break
        input_ids, position_ids = _next(input_ids, position_ids, drawn, cached=cached)
        mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
    return _responses(requests, torch.stack(tokens, 1).cpu(), torch.stack(logprobs, 1).cpu(), ends.cpu(), version)


def _numbered(on_tokens: OnTokens, numbers: Sequence[int]) -> OnTokens:
    """For a batch of these requests: called with the index in the batch, it calls `on_tokens` with the request's."""
    return lambda row, tokens, logprobs: on_tokens(numbers[row], tokens, logprobs)


def _next(input_ids: Tensor, position_ids: Tensor, drawn: Tensor, *, cached: bool) -> tuple[Tensor, Tensor]:
    """What the model reads next: the tokens that were drawn [R], with a cache nothing else."""
    tokens, positions = drawn[:, None], position_ids[:, -1:] + 1
    if cached:
        return tokens, positions
    return torch.cat([input_ids, tokens], 1), torch.cat([position_ids, positions], 1)


def _left_padded(prompts: Sequence[NDArray[np.integer[Any]]]) -> tuple[Tensor, Tensor]:
    """[R, width] token ids, 0 in front of the shorter ones, and which of them are real (int64)."""
    width = max(len(prompt) for prompt in prompts)
    input_ids = np.zeros((len(prompts), width), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def _responses(
    requests: Sequence[SamplingRequest], tokens: Tensor, logprobs: Tensor, ends: Tensor, version: int
) -> list[Response]:
    """Each row [L] up to its first token that ends it, or as far as it had room."""
    found = []
    is_end = torch.isin(tokens, ends).numpy()
    for request, row, values, stopped in zip(requests, tokens.numpy(), logprobs.numpy(), is_end, strict=True):
        cut = stopped[: request.max_new_tokens]
        ended = bool(cut.any())
        length = int(cut.argmax()) + 1 if ended else len(cut)
        found.append(
            Response(tokens=row[:length].copy(), logprobs=values[:length].copy(), ended=ended, version=version)
        )
    return found
