"""Decoding many responses at a time: lanes that are refilled, steps that never wait for the host.

    lanes   0   a a a a a a a d d d d …       a response has a lane from its first token to its last;
            1   b b b e e e e e e e e …       then the lane is given to the next request
            2   c c c c c c c c c . . …       and at the end the lanes that are left move together
    steps   | burst | burst | burst |

    a step    tokens [L] -> hidden [L, D] -> logits [L, V] -> drawn [L] -> the next tokens

All that a step reads and writes is on the device: `slots` [rows, L] says for each lane which keys it sees, what it
feeds next and whose response it writes (`outputs` has one row for each request). On CUDA a step is one CUDA graph, for
each of a few numbers of lanes. The host replays it in bursts, and looks at who has finished one burst later, while the
next one runs. Where a response must have ended because it has no more room, the host knows without looking.

The last token of a prompt is not prefilled: it is the first that its lanes feed. So all draws are made by the same
step, and a prompt of n tokens has n - 1 places in the cache, however many responses follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.errors import UserError
from padfree.rollout.base import OnProgress, OnTokens, Response, SamplingRequest
from padfree.rollout.engines.in_process import sample_token
from padfree.rollout.engines.in_process.cached_model import CachedModel, can_be_captured
from padfree.rollout.engines.in_process.kv_cache import Extents, KVCache, LayerShape
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN

TOKEN, KEY, MAX_NEW_TOKENS, REQUEST = range(5, 9)
NUM_ROWS = 9
"""Rows of `slots`: those that attention reads, what is fed next, the key of the noise, the room, and the request."""

BURST = 8
"""Steps between two looks at who has finished."""

FEWEST_LANES = 16
"""Steps are captured for the number of lanes, its half, and so on down to this."""

PREFILL_TOKENS = 8192
"""Of prompts in one pass, unless one is longer."""

GROWTH = 1.1
"""A cache is made larger by this than what is asked for: the next batch may have longer prompts."""


KEYS_STEP = 512
"""What the longest response with its prompt is rounded up to: steps are captured for that many keys."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt of one or more requests."""

    tokens: NDArray[np.integer[Any]]  # [n]
    waiting: int = 0  # requests that have not ended yet
    start: int | None = None  # its first place in the cache; None: it is not there

    @property
    def stored(self) -> int:
        return len(self.tokens) - 1


@dataclass(slots=True, eq=False)
class _Slot:
    """A response that is being written."""

    request: int
    prompt: _Prompt
    own: int  # its first place in the cache
    remaining: int  # steps after which it has no more room
    at: int | None = None  # the lane it is in; None: in none yet


@dataclass(slots=True, eq=False)
class _Buffers:
    """What steps read and write, at addresses that stay."""

    cache: KVCache
    slots: Tensor  # [rows, lanes] int64
    tokens: Tensor  # [N + 1, longest] int64; the last row is for lanes that are not active
    logprobs: Tensor  # [N + 1, longest] float32
    status: Tensor  # [2, N + 1] int64: tokens written, and whether that is all
    most_keys: int  # that a lane can have before its newest

    @property
    def num_requests(self) -> int:
        return len(self.tokens) - 1

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]


@dataclass(slots=True)
class DecodeStatistics:
    """What the last call of `sample` took."""

    steps: int = 0
    slot_steps: int = 0  # lanes over all steps, whether they had something to write or not
    prefilled: int = 0  # tokens of prompts
    captures: int = 0


@dataclass(slots=True, eq=False)
class _Look:
    """The status of all requests as it was behind a burst, on its way to the host."""

    status: Tensor
    event: Any

    def read(self) -> NDArray[np.int64]:
        if self.event is not None:
            self.event.synchronize()
        found: NDArray[np.int64] = self.status.numpy()
        return found


class Decoder:
    """Samples from a `CachedModel`."""

    def __init__(
        self,
        model: CachedModel,
        *,
        num_slots: int,
        temperature: float,
        stops: Sequence[int],
        cache_bytes: int | None = None,
        captured: bool | None = None,
    ) -> None:
        """`cache_bytes`: keys and values take no more; None: as much as `num_slots` responses need, but at most half
        of what the device has free. `captured`: whether steps are CUDA graphs; None: where that can be."""
        self.model, self.device = model, model.device
        self.num_slots, self.temperature = num_slots, temperature
        self.stops = torch.tensor(sorted(stops), device=self.device)
        self.cache_bytes = cache_bytes
        cuda = self.device.type == "cuda"
        self.captured = cuda and can_be_captured(model.model) if captured is None else captured
        self.shapes: list[LayerShape] | None = None
        self.statistics = DecodeStatistics()
        self._buffers: _Buffers | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def forget_graphs(self) -> None:
        """Steps will be captured anew: weights have moved to other addresses.

        Their memory pool goes with them. A library may hold a part of it for good, and PyTorch takes no capture into a
        pool that no graph uses any more.
        """
        self._graphs.clear()
        self._pool = None

    def free(self) -> None:
        """Give the memory back."""
        self.forget_graphs()
        self._buffers = None

    @torch.no_grad()
    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        version: int = 0,
        on_progress: OnProgress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Response]:
        """One response for each request, in their order. With `on_tokens` the host waits for every burst."""
        self.statistics = DecodeStatistics()
        if not requests:
            return []
        buffers = self._buffers = self._fitting_buffers(requests)
        buffers.slots.zero_()
        buffers.status.zero_()
        _Sampling(self, buffers, requests, on_progress, on_tokens).run()
        status, tokens, logprobs = (
            tensor.cpu().numpy() for tensor in (buffers.status, buffers.tokens, buffers.logprobs)
        )
        ends = set(self.stops.tolist())
        found = []
        for number in range(len(requests)):
            length = int(status[0, number])
            own = tokens[number, :length].astype(np.int64)
            found.append(
                Response(
                    tokens=own,
                    logprobs=logprobs[number, :length].copy(),
                    ended=int(own[-1]) in ends,
                    version=version,
                )
            )
        return found

    @torch.no_grad()
    def prepare(self, requests: Sequence[SamplingRequest]) -> None:
        """Take the memory for such requests, and capture all steps, so that `sample` does not have to."""
        self._buffers = self._fitting_buffers(requests)
        for count in slot_counts(self.num_slots) if self.captured else ():
            if count not in self._graphs:
                self._capture(count)

    # Memory

    def _fitting_buffers(self, requests: Sequence[SamplingRequest]) -> _Buffers:
        """Those that are there, if all requests fit, or new ones."""
        if self.shapes is None:
            self.shapes = self.model.layer_shapes()
        longest = max(request.max_new_tokens for request in requests)
        prompts = {id(request.tokens): len(request.tokens) - 1 for request in requests}
        wanted = min(self.num_slots, len(requests)) * longest + sum(prompts.values())
        needed = max(len(request.tokens) - 1 + request.max_new_tokens for request in requests)
        num_requests, most_keys, before = len(requests), rounded_up(needed, KEYS_STEP), 0
        old = self._buffers
        if old is not None:
            fits = num_requests <= old.num_requests and longest <= old.longest and most_keys <= old.most_keys
            if fits and wanted <= old.cache.num_places:
                return old
            num_requests, longest = max(num_requests, old.num_requests), max(longest, old.longest)
            most_keys, before = max(most_keys, old.most_keys), old.cache.num_places
            del old
            self.free()
        limit = self._most_places()
        if needed > limit:
            token_bytes = sum(shape.token_bytes for shape in self.shapes)
            raise UserError(
                "rollout.kv_cache_memory",
                f"{limit * token_bytes / 2**30:.3g} GiB, but the keys and values of one response with its prompt "
                f"take {needed * token_bytes / 2**30:.3g}",
                f"set rollout.kv_cache_memory={np.ceil(needed * token_bytes / 2**30 * 100) / 100:g} or more",
            )
        num_places = min(limit, max(before, int(wanted * GROWTH)))
        return _Buffers(
            cache=KVCache.allocated(self.shapes, num_places, self.device),
            slots=torch.zeros(NUM_ROWS, self.num_slots, dtype=torch.int64, device=self.device),
            tokens=torch.zeros(num_requests + 1, longest, dtype=torch.int64, device=self.device),
            logprobs=torch.zeros(num_requests + 1, longest, dtype=torch.float32, device=self.device),
            status=torch.zeros(2, num_requests + 1, dtype=torch.int64, device=self.device),
            most_keys=most_keys,
        )

    def _most_places(self) -> int:
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

    def prefill(self, prompts: Sequence[_Prompt]) -> None:
        """Put the keys and values of these prompts into the cache, as many at a time as a pass may have tokens."""
        assert self._buffers is not None
        while prompts:
            lengths = np.cumsum([prompt.stored for prompt in prompts])
            count = max(1, int(np.searchsorted(lengths, PREFILL_TOKENS, side="right")))
            chosen, prompts = prompts[:count], prompts[count:]
            row = np.zeros((3, int(lengths[count - 1])), np.int64)  # tokens, positions, places
            at = 0
            for prompt in chosen:
                assert prompt.start is not None
                number = np.arange(prompt.stored)
                row[:, at : at + prompt.stored] = prompt.tokens[:-1], number, prompt.start + number
                at += prompt.stored
            tokens, positions, places = self.uploaded(row)
            self.model.prefill(tokens, positions, places, [prompt.stored for prompt in chosen], self._buffers.cache)
            self.statistics.prefilled += at

    def run_steps(self, steps: int, occupied: int) -> None:
        """`steps` tokens in each of the first `occupied` lanes."""
        if self.captured:
            count = next(size for size in reversed(slot_counts(self.num_slots)) if size >= occupied)
            graph = self._graphs.get(count) or self._capture(count)
            for _ in range(steps):
                graph.replay()
        else:
            count = occupied
            for _ in range(steps):
                self._step(count)
        self.statistics.steps += steps
        self.statistics.slot_steps += steps * count

    def _capture(self, count: int) -> torch.cuda.CUDAGraph:
        """A graph of one step of `count` lanes. Nothing is written meanwhile: no lane is active."""
        assert self._buffers is not None
        slots = self._buffers.slots
        kept = slots.clone()
        slots.zero_()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # kernels are compiled, and libraries take their memory, before the capture
            for _ in range(2):
                self._step(count)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads of other libraries may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(count)
        slots.copy_(kept)
        self._graphs[count] = graph
        self.statistics.captures += 1
        return graph

    def _step(self, count: int) -> None:
        """One token in each of the first `count` lanes."""
        buffers = self._buffers
        assert buffers is not None
        slots = buffers.slots[:, :count]
        hidden = self.model.decode(
            slots[TOKEN], slots[STORED] + slots[WRITTEN], slots, buffers.cache, buffers.most_keys
        )
        head = self.model.head()
        drawn = sample_token.sample_token(
            sample_token.products(hidden, head), head, slots[KEY], slots[WRITTEN], self.temperature
        )
        active = slots[ACTIVE] != 0
        request = torch.where(active, slots[REQUEST], buffers.num_requests)
        written = torch.where(active, slots[WRITTEN], 0)
        buffers.tokens[request, written] = drawn.tokens
        buffers.logprobs[request, written] = drawn.logprobs
        written = written + 1
        ends = (drawn.tokens[:, None] == self.stops).any(1) | (written >= slots[MAX_NEW_TOKENS])
        buffers.status[0, request] = written
        buffers.status[1, request] = ends.long()
        slots[TOKEN] = torch.where(active, drawn.tokens, slots[TOKEN])
        slots[WRITTEN] += active
        slots[ACTIVE] = (active & ~ends).long()

    def uploaded(self, array: NDArray[np.int64]) -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def look(self) -> _Look:
        """The present status of all requests, to be read later."""
        assert self._buffers is not None
        status = self._buffers.status
        if self.device.type != "cuda":
            return _Look(status.clone(), None)
        host = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        host.copy_(status, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Look(host, event)


def rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def slot_counts(num_slots: int) -> list[int]:
    """256 -> 256 128 64 32 16; 20 -> 20; 40 -> 40 20."""
    found = [num_slots]
    while found[-1] // 2 >= FEWEST_LANES:
        found.append(found[-1] // 2)
    return found


@dataclass(slots=True, eq=False)
class _Sampling:
    """One call of `Decoder.sample`: which request is in which lane. Host only."""

    decoder: Decoder
    buffers: _Buffers
    requests: Sequence[SamplingRequest]
    on_progress: OnProgress | None
    on_tokens: OnTokens | None
    prompts: dict[int, _Prompt] = field(default_factory=dict)  # by the identity of their tokens
    waiting: deque[int] = field(default_factory=deque)
    occupied: list[_Slot] = field(default_factory=list)  # lane i is occupied[i], once they are arranged
    extents: Extents = field(default_factory=lambda: Extents(0))
    transfer_info: dict[int, int] = field(default_factory=dict)  # by request: tokens that `on_tokens` knows

    def run(self) -> None:
        self.extents = Extents(self.buffers.cache.num_places)
        for number, request in enumerate(self.requests):
            self.prompts.setdefault(id(request.tokens), _Prompt(request.tokens)).waiting += 1
            self.waiting.append(number)
        earlier: _Look | None = None
        while self.waiting or self.occupied:
            changed = self._admit()
            if changed or any(slot.at != index for index, slot in enumerate(self.occupied)):
                self._arrange()
            steps = min(BURST, max(slot.remaining for slot in self.occupied))
            self.decoder.run_steps(steps, len(self.occupied))
            for slot in self.occupied:
                slot.remaining -= steps
            look = self.decoder.look()
            # On the CPU nothing is gained by looking later.
            self._release(look if look.event is None else earlier)
            earlier = look
            if self.on_tokens is not None:
                self._tell(self.on_tokens)

    def _tell(self, on_tokens: OnTokens) -> None:
        """What was written since the last call. Reading it waits for the device."""
        buffers = self.buffers
        lengths, tokens, logprobs = (
            tensor.cpu().numpy() for tensor in (buffers.status[0], buffers.tokens, buffers.logprobs)
        )
        for number in range(len(self.requests)):
            begin, end = self.transfer_info.get(number, 0), int(lengths[number])
            if end > begin:
                self.transfer_info[number] = end
                on_tokens(number, tokens[number, begin:end].copy(), logprobs[number, begin:end].copy())

    def _admit(self) -> bool:
        """Give free lanes, and places in the cache, to requests that wait; whether there were any."""
        admitted: list[_Slot] = []
        missing: list[_Prompt] = []
        while self.waiting and len(self.occupied) + len(admitted) < self.decoder.num_slots:
            slot = self._admitted(self.waiting[0], missing)
            if slot is None and not self.occupied and not admitted:
                self._forget_unused_prompts()
                slot = self._admitted(self.waiting[0], missing)
                assert slot is not None, "one response fits into the whole cache"
            if slot is None:
                break
            self.waiting.popleft()
            admitted.append(slot)
        self.occupied += admitted
        if missing:
            self._look_ahead(missing)
            self.decoder.prefill(missing)
        return bool(admitted)

    def _admitted(self, number: int, missing: list[_Prompt]) -> _Slot | None:
        request = self.requests[number]
        prompt = self.prompts[id(request.tokens)]
        own = self.extents.take(request.max_new_tokens)
        if own is None:
            return None
        if prompt.start is None:
            prompt.start = self.extents.take(prompt.stored)
            if prompt.start is None:
                self.extents.give(own, request.max_new_tokens)
                return None
            if prompt.stored:
                missing.append(prompt)
        return _Slot(request=number, prompt=prompt, own=own, remaining=request.max_new_tokens)

    def _look_ahead(self, missing: list[_Prompt]) -> None:
        """Prompts that come next join a pass that is made anyway, where responses do not need their places."""
        tokens = sum(prompt.stored for prompt in missing)
        for number in self.waiting:
            request = self.requests[number]
            prompt = self.prompts[id(request.tokens)]
            if prompt.start is not None or not prompt.stored:
                continue
            tokens += prompt.stored
            free_slots = self.decoder.num_slots - len(self.occupied)
            spare = self.extents.num_free - prompt.stored - free_slots * request.max_new_tokens
            if tokens > PREFILL_TOKENS or spare < 0:
                return
            prompt.start = self.extents.take(prompt.stored)
            if prompt.start is None:
                return
            missing.append(prompt)

    def _forget_unused_prompts(self) -> None:
        """Nothing is being written: give back what prompts hold that were prefilled ahead."""
        for prompt in self.prompts.values():
            if prompt.start is not None:
                self.extents.give(prompt.start, prompt.stored)
                prompt.start = None

    def _arrange(self) -> None:
        """Move the occupied lanes together on the device, and fill in the new ones."""
        num_slots = self.decoder.num_slots
        table = np.zeros((NUM_ROWS + 2, num_slots), np.int64)  # where each lane was, whether it is new, and what is new
        kept_from, is_new, fresh = table[0], table[1], table[2:]
        is_new[:] = 1
        for index, slot in enumerate(self.occupied):
            if slot.at is not None:
                kept_from[index], is_new[index] = slot.at, 0
            else:
                request = self.requests[slot.request]
                assert slot.prompt.start is not None
                fresh[[PROMPT, STORED, OWN, ACTIVE], index] = slot.prompt.start, slot.prompt.stored, slot.own, 1
                fresh[[TOKEN, KEY], index] = request.tokens[-1], request.key
                fresh[[MAX_NEW_TOKENS, REQUEST], index] = request.max_new_tokens, slot.request
            slot.at = index
        given = self.decoder.uploaded(table)
        slots = self.buffers.slots
        slots.copy_(torch.where(given[1] != 0, given[2:], slots[:, given[0]]))

    def _release(self, look: _Look | None) -> None:
        """Take back the lanes of responses that have ended."""
        status = None if look is None else look.read()
        left: list[_Slot] = []
        for slot in self.occupied:
            if slot.remaining > 0 and (status is None or not status[1, slot.request]):
                left.append(slot)
                continue
            self.extents.give(slot.own, self.requests[slot.request].max_new_tokens)
            slot.prompt.waiting -= 1
            if slot.prompt.waiting == 0:
                assert slot.prompt.start is not None
                self.extents.give(slot.prompt.start, slot.prompt.stored)
                slot.prompt.start = None
        self.occupied = left
        if status is not None and self.on_progress is not None:
            self.on_progress(int(status[1, : len(self.requests)].sum()))
