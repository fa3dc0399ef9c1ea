"""Prefill and decode steps on the device. The host need not wait for the device between two decode steps.

A decode step reads and writes only device memory:

    tokens [L] -> hidden states [L, D] -> logits [L, V] -> sampled tokens [L], the input of the next step

L is the number of slots. A slot is the place of one response in the decode batch. `slots` [F, L] holds F fields of each
slot, such as its next input token.

CUDA graphs of decode steps are captured for a few batch sizes. They need buffers at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.attention.backend import PAGE_SIZE
from padfree.batch import LmHead
from padfree.cp import shard
from padfree.data.image_loader import ImageLoader, PacksAhead
from padfree.errors import UserError
from padfree.head import score
from padfree.packing.collate import collate
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.in_process import sample_token
from padfree.rollout.engines.in_process.cached_model import CachedModel, can_be_captured
from padfree.rollout.engines.in_process.kept_buffers import KeptBuffers
from padfree.rollout.engines.in_process.kv_cache import KVCache, LayerShape
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, STORED, WRITTEN
from padfree.rollout.truncation import WHOLE, Truncation, truncated_logits
from padfree.sample import Sample

# KEY: the random key of the response. REQUEST: the index of the request.
TOKEN, KEY, MAX_NEW_TOKENS, REQUEST, SHIFT = range(5, 10)
NUM_SLOT_FIELDS = 10
"""Number of fields of a slot (the place of one response in the decode batch).

Attention reads the first five fields. TOKEN is the next input token. SHIFT is the position id of this token minus its
index in the sequence. It is 0 except after images.
"""

MIN_SLOTS = 16
"""CUDA graphs of decode steps are captured for all slots (one slot per response in the batch), for half of the slots, a
quarter of them and so on, down to this number of slots."""

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens in one prefill pass, unless one prompt is longer."""

PREFILL_ROWS = (1024, 2048, 4096, 8192)
"""With `rollout.exact`, a prefill pass is padded to one of these numbers of tokens, because matmuls of fewer than 1024
tokens may give other bits.
"""

GROWTH = 1.1
"""The KV cache is allocated larger than needed by this factor, so that longer prompts of later batches fit."""


KEYS_STEP = 512
"""CUDA graphs are captured for a maximum number of keys per response, which is a multiple of KEYS_STEP."""


@dataclass(slots=True, eq=False)
class Buffers:
    """Tensors that decode steps read and write, at fixed addresses. N: the maximum number of requests in a call."""

    cache: KVCache
    slots: Tensor  # [F, L] int64
    tokens: Tensor  # [N + 1, longest] int64; inactive slots write to index N
    logprobs: Tensor  # [N + 1, longest] float32
    status: Tensor  # [2, N + 1] int64: number of tokens, and whether the response has ended
    max_keys: int  # maximum number of keys before the new token of a slot
    routes: Tensor | None = None  # [N + 1, longest, R, k] of the input of each step, if routes are recorded
    kept: KeptBuffers | None = None  # None: the softmax is not truncated

    @property
    def num_requests(self) -> int:
        return len(self.tokens) - 1

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]


@dataclass(slots=True)
class DecodeStatistics:
    """Counts of decode steps, prefilled tokens and captured graphs in the last call of `Decoder.sample`."""

    steps: int = 0
    slot_steps: int = 0  # number of slots summed over all steps, occupied or not
    prefilled: int = 0  # prompt tokens
    captures: int = 0


@dataclass(slots=True, eq=False)
class StatusCopy:
    """A copy on the host of how many tokens each response has and whether it has ended; `read` waits for the copy."""

    status: Tensor
    event: Any

    def read(self) -> NDArray[np.int64]:
        if self.event is not None:
            self.event.synchronize()
        status: NDArray[np.int64] = self.status.numpy()
        return status


class PlacedPrompt(NamedTuple):
    """A prompt to prefill, and its place in the KV cache."""

    sample: Sample  # the prompt without its last token
    start: int  # the cache index of its first token


class DecodeSteps:
    """Runs the prefill passes and decode steps of a `CachedModel`, and owns the device memory that they use."""

    def __init__(
        self,
        model: CachedModel,
        *,
        num_slots: int,
        temperature: float,
        stops: Sequence[int],
        truncation: Truncation = WHOLE,
        cache_bytes: int | None = None,
        captured: bool | None = None,
        step_rows: Sequence[int] | None = None,
    ) -> None:
        """Set up the decode steps. Buffers and CUDA graphs are created when they are first needed.

        `num_slots`: maximum number of concurrent responses. `cache_bytes`: size limit of the KV cache. `captured`:
        whether decode steps are CUDA graphs. `step_rows`: possible batch sizes, descending from at least `num_slots`.
        """
        self.model, self.device = model, model.device
        self.num_slots, self.temperature, self.truncation = num_slots, temperature, truncation
        self.stops = torch.tensor(sorted(stops), device=self.device)
        self.cache_bytes = cache_bytes  # None: as much as `num_slots` responses need, at most half of the free memory
        cuda = self.device.type == "cuda"
        self.captured = cuda and can_be_captured(model.model) if captured is None else captured
        # Without CUDA graphs, an empty list allows every batch size.
        self.step_rows = list(slot_counts(num_slots) if step_rows is None and self.captured else step_rows or ())
        self.page = PAGE_SIZE if model.exact else 1  # prompts and responses begin at multiples of this in the cache
        self.shapes: list[LayerShape] | None = None
        self.route_shape: tuple[int, ...] | None = None  # (R, k) if routes are recorded
        self.statistics = DecodeStatistics()
        self._buffers: Buffers | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._image_loader = ImageLoader()

    def forget_graphs(self) -> None:
        """Drop the CUDA graphs of all steps, because the weights have moved to other addresses.

        The graphs' memory pool is dropped too, because PyTorch does not capture into a pool that no graph uses.
        """
        self._graphs.clear()
        self._pool = None

    def free(self) -> None:
        """Free the CUDA graphs and all buffers, including the KV cache."""
        self.forget_graphs()
        self._buffers = None

    @torch.no_grad()
    def prepare(self, requests: Sequence[SamplingRequest]) -> None:
        """Allocate the buffers for `requests`, and capture the decode steps as CUDA graphs."""
        self._buffers = self._fitting_buffers(requests)
        for count in self.step_rows if self.captured else ():
            if count not in self._graphs:
                self._capture(count)

    # Memory

    def _fitting_buffers(self, requests: Sequence[SamplingRequest]) -> Buffers:
        """Return the existing buffers of decode steps if they are large enough for all requests, else new ones."""
        if self.shapes is None:
            self.shapes = self.model.layer_shapes()
            if self.model.recorder is not None:
                self.route_shape = tuple(self.model.recorder.take().shape[1:])
        longest = max(request.max_new_tokens for request in requests)
        prompts = {request.prompt_key: self.prompt_size(len(request.tokens) - 1) for request in requests}
        own = max(self.own_size(len(request.tokens) - 1, request.max_new_tokens) for request in requests)
        unused = self.page if self.model.exact else 0  # the last page, to which inactive slots write
        wanted = min(self.num_slots, len(requests)) * own + sum(prompts.values()) + unused
        keys = max(len(request.tokens) - 1 + request.max_new_tokens for request in requests)
        needed = max(
            prompts[request.prompt_key] + self.own_size(len(request.tokens) - 1, request.max_new_tokens) + unused
            for request in requests
        )
        num_requests, max_keys, old_capacity = len(requests), rounded_up(keys, KEYS_STEP), 0
        old = self._buffers
        if old is not None:
            fits = num_requests <= old.num_requests and longest <= old.longest and max_keys <= old.max_keys
            if fits and wanted <= old.cache.capacity:
                return old
            num_requests, longest = max(num_requests, old.num_requests), max(longest, old.longest)
            max_keys, old_capacity = max(max_keys, old.max_keys), old.cache.capacity
            del old
            self.free()
        limit = self._max_capacity()
        if needed > limit:
            token_bytes = sum(shape.token_bytes for shape in self.shapes)
            raise UserError(
                "rollout.kv_cache_memory",
                f"{limit * token_bytes / 2**30:.3g} GiB, but the keys and values of one prompt with its response "
                f"take {needed * token_bytes / 2**30:.3g} GiB",
                f"set rollout.kv_cache_memory={np.ceil(needed * token_bytes / 2**30 * 100) / 100:g} or more",
            )
        num_rows = max([self.num_slots, *self.step_rows[:1]])
        capacity = min(limit, max(old_capacity, int(wanted * GROWTH))) // self.page * self.page
        return Buffers(
            cache=KVCache.allocated(self.shapes, capacity, self.device),
            slots=torch.zeros(NUM_SLOT_FIELDS, num_rows, dtype=torch.int64, device=self.device),
            tokens=torch.zeros(num_requests + 1, longest, dtype=torch.int64, device=self.device),
            logprobs=torch.zeros(num_requests + 1, longest, dtype=torch.float32, device=self.device),
            status=torch.zeros(2, num_requests + 1, dtype=torch.int64, device=self.device),
            max_keys=max_keys,
            routes=self._route_buffer(num_requests + 1, longest),
            kept=self._kept_buffers(),
        )

    def _kept_buffers(self) -> KeptBuffers | None:
        if not self.truncation.is_active:
            return None
        return KeptBuffers.allocated(self.num_slots, len(self.model.head().weight), self.device)

    def _route_buffer(self, num_requests: int, longest: int) -> Tensor | None:
        if self.route_shape is None:
            return None
        assert self.model.recorder is not None
        dtype = torch.uint8 if self.model.recorder.dtype == np.uint8 else torch.int16
        return torch.zeros(num_requests, longest, *self.route_shape, dtype=dtype, device=self.device)

    def prompt_size(self, stored: int) -> int:
        """Return the number of cache entries that a prompt with `stored` keys takes.

        If the cache has pages, a prompt takes whole pages.
        """
        return rounded_up(stored, self.page)

    def own_size(self, stored: int, max_new_tokens: int) -> int:
        """Return the number of cache entries (one per token) of a response to a prompt with `stored` entries.

        If the cache has pages, the response gets whole pages. They include a copy of the prompt's last page if that
        page is not full.
        """
        return rounded_up(stored % self.page + max_new_tokens, self.page)

    def _max_capacity(self) -> int:
        """Return the maximum number of tokens in the KV cache that the memory allows."""
        assert self.shapes is not None
        limit = self.cache_bytes
        if limit is None:
            if self.device.type != "cuda":
                return 1 << 62
            free, _ = torch.cuda.mem_get_info(self.device)
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            limit = (free + held) // 2
        return limit // sum(shape.token_bytes for shape in self.shapes)

    # Steps

    def prefill(self, prompts: Sequence[PlacedPrompt]) -> list[Tensor | None]:
        """Store the keys and values of prompts in the cache, in passes of up to PREFILL_TOKENS tokens.

        Return the routes (the experts of each token) of each prompt, on the device; None if routes are not recorded.
        """
        assert self._buffers is not None
        routes: list[Tensor | None] = []
        passes = _divided(prompts)
        packs = PacksAhead(self._image_loader, [[prompt.sample for prompt in chosen] for chosen in passes])
        for chosen in passes:
            pack = collate(packs.take(), share_prefixes=False)
            total = pack.num_tokens
            if self.model.exact:
                pack = pack.padded_to(prefill_rows(total))
            indices = np.full(pack.num_tokens, self._buffers.cache.capacity - 1)  # padding is stored in the unused page
            indices[:total] = np.concatenate([prompt.start + np.arange(len(prompt.sample)) for prompt in chosen])
            if self.device.type == "cuda":
                pack = pack.pin_memory()
            self.model.prefill(shard(pack.to(self.device)), self.uploaded(indices), self._buffers.cache)
            self.statistics.prefilled += total
            if self.model.recorder is None:
                routes += [None] * len(chosen)
            else:
                lengths = [len(prompt.sample) for prompt in chosen]
                routes += torch.split(self.model.recorder.take()[:total], lengths)
        return routes

    def copy_keys(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values inside the cache.

        `ranges`: for each range of cache indices, its first index, the first index of its copy, and its length.
        """
        assert self._buffers is not None
        lengths = np.array([length for _, _, length in ranges], np.int64)
        if not lengths.sum():
            return
        offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts = np.array([(source, target) for source, target, _ in ranges], np.int64).T
        source, target = self.uploaded(np.repeat(starts, lengths, axis=1) + offset)
        for cached in (*self._buffers.cache.keys, *self._buffers.cache.values):
            cached.index_copy_(0, target, cached[source])

    def run_steps(self, steps: int, occupied: int) -> None:
        """Run `steps` decode steps: each samples one token in each of the first `occupied` slots."""
        if self.captured:
            count = next(size for size in reversed(self.step_rows) if size >= occupied)
            graph = self._graphs.get(count) or self._capture(count)
            self._begin_burst()
            for _ in range(steps):
                graph.replay()
        else:
            count = next((size for size in reversed(self.step_rows) if size >= occupied), occupied)
            self._begin_burst()
            for _ in range(steps):
                self._step(count)
        self.statistics.steps += steps
        self.statistics.slot_steps += steps * count

    def _begin_burst(self) -> None:
        assert self._buffers is not None
        if self._buffers.kept is not None:
            self._buffers.kept.step.zero_()

    def _capture(self, count: int) -> torch.cuda.CUDAGraph:
        """Capture one decode step of `count` slots as a CUDA graph.

        The warm-up steps before the capture store nothing, because all slots are inactive then.
        """
        assert self._buffers is not None
        slots = self._buffers.slots
        kept = slots.clone()
        slots.zero_()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # warm up: compile kernels, and let libraries allocate, before the capture
            for _ in range(2):
                self._step(count)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads of other libraries may use CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(count)
        slots.copy_(kept)
        self._graphs[count] = graph
        self.statistics.captures += 1
        return graph

    def _step(self, count: int) -> None:
        """Run one decode step, which samples one token in each of the first `count` slots."""
        buffers = self._buffers
        assert buffers is not None
        slots = buffers.slots[:, :count]
        positions = slots[STORED] + slots[WRITTEN] + slots[SHIFT]
        hidden = self.model.decode(slots[TOKEN], positions, slots, buffers.cache, buffers.max_keys)
        head = self.model.head()
        logits, temperature = sample_token.products(hidden, head), self.temperature
        active = slots[ACTIVE] != 0
        request = torch.where(active, slots[REQUEST], buffers.num_requests)
        written = torch.where(active, slots[WRITTEN], 0)
        if buffers.kept is not None:
            scaled = sample_token.scaled_logits(logits, head, temperature)
            logits, mask = truncated_logits(scaled, self.truncation, slots[KEY], slots[WRITTEN], self.stops)
            buffers.kept.write(mask, request, written)
            head, temperature = LmHead(weight=head.weight), 1.0  # the logits are already capped and scaled
        sampled = sample_token.sample_token(logits, head, slots[KEY], slots[WRITTEN], temperature)
        logprobs = sampled.logprobs
        if self.model.exact:
            logprobs = score(
                hidden, head, sampled.tokens, temperature=self.temperature, num_labels=len(hidden)
            ).logprobs
        buffers.tokens[request, written] = sampled.tokens
        buffers.logprobs[request, written] = logprobs.float()
        if buffers.routes is not None:
            assert self.model.recorder is not None
            buffers.routes[request, written] = self.model.recorder.take()
        written = written + 1
        ends = (sampled.tokens[:, None] == self.stops).any(1) | (written >= slots[MAX_NEW_TOKENS])
        buffers.status[0, request] = written
        buffers.status[1, request] = ends.long()
        slots[TOKEN] = torch.where(active, sampled.tokens, slots[TOKEN])
        slots[WRITTEN] += active
        slots[ACTIVE] = (active & ~ends).long()

    def uploaded(self, array: NDArray[np.int64]) -> Tensor:
        """Copy an array to the device without synchronising."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def copy_status(self) -> StatusCopy:
        """Start to copy to the host how many tokens each response has, and whether it has ended. Return at once."""
        assert self._buffers is not None
        status = self._buffers.status
        if self.device.type != "cuda":
            return StatusCopy(status.clone(), None)
        host = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        host.copy_(status, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return StatusCopy(host, event)


def _divided(prompts: Sequence[PlacedPrompt]) -> list[Sequence[PlacedPrompt]]:
    """Divide prompts into prefill passes of up to PREFILL_TOKENS tokens; a longer prompt gets a pass of its own."""
    passes: list[Sequence[PlacedPrompt]] = []
    while prompts:
        lengths = np.cumsum([len(prompt.sample) for prompt in prompts])
        count = max(1, int(np.searchsorted(lengths, PREFILL_TOKENS, side="right")))
        passes.append(prompts[:count])
        prompts = prompts[count:]
    return passes


def rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def prefill_rows(tokens: int) -> int:
    """Return the padded number of tokens of a prefill pass with `tokens` tokens, for `rollout.exact`.

    A pass has 1024, 2048, 4096 or a multiple of 8192 tokens, because `row_trial` compares the bits of matmuls at these
    sizes.
    """
    return next((size for size in PREFILL_ROWS if size >= tokens), rounded_up(tokens, PREFILL_TOKENS))


def slot_counts(num_slots: int) -> list[int]:
    """Return the batch sizes for which decode steps are captured as CUDA graphs.

    They are `num_slots`, half of it, a quarter of it and so on, but not below 16 (MIN_SLOTS): 40 gives 40 and 20.
    """
    counts = [num_slots]
    while counts[-1] // 2 >= MIN_SLOTS:
        counts.append(counts[-1] // 2)
    return counts
