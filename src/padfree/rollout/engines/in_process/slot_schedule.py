"""Assign requests to slots (places of responses in the decode batch) and to space in the KV cache, on the host.

Decode steps run in bursts of up to BURST steps. Between two bursts, responses that have ended are removed, and waiting
requests get the free slots.

On a GPU, a response that ends with a stop token is removed one burst late. The host therefore need not wait for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from padfree.rollout.base import OnProgress, OnTokens, SamplingRequest
from padfree.rollout.engines.in_process.decode_steps import (
    KEY,
    MAX_NEW_TOKENS,
    NUM_SLOT_FIELDS,
    PREFILL_TOKENS,
    REQUEST,
    SHIFT,
    TOKEN,
    Buffers,
    DecodeSteps,
    PlacedPrompt,
    StatusCopy,
)
from padfree.rollout.engines.in_process.kept_buffers import BURST, KeptTokens
from padfree.rollout.engines.in_process.kv_cache import Extents
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """A prompt that is stored only once in the KV cache for all its requests."""

    request: SamplingRequest  # the first of the requests for this prompt
    unfinished: int = 0  # number of its requests that have not ended
    start: int | None = None  # cache index of its first token; None if the prompt is not in the cache
    routes: Tensor | None = None  # [n - 1, R, k] of its tokens without the last, if routes are recorded

    @property
    def stored(self) -> int:
        return len(self.request.tokens) - 1

    @property
    def placed(self) -> PlacedPrompt:
        """The tokens to prefill, and the cache index of the first of these tokens."""
        assert self.start is not None
        return PlacedPrompt(self.request.prompt.truncated(self.stored), self.start)

    @property
    def position_shift(self) -> int:
        """The rotary position of the prompt's last token, minus its index; 0 for a prompt without images."""
        positions = self.request.rotary_positions
        return 0 if positions is None else int(positions[0, -1]) - self.stored


@dataclass(slots=True, eq=False)
class DecodeSlot:
    """A slot of the decoder: a response that is being sampled, and its place in the KV cache."""

    request: int
    prompt: CachedPrompt
    start: int  # its first cache index
    size: int  # number of its cache entries
    own: int  # cache index of its first own token, after the copy of the prompt's partial page
    remaining: int  # steps until it reaches `max_new_tokens`
    index: int | None = None  # its slot on the device; None: not assigned yet

    @property
    def partial_page(self) -> tuple[int, int, int]:
        """The keys on the prompt's last, partial page, which are copied to the slot's own first page.

        The tuple holds the cache index of the first key, the cache index of its copy, and the number of keys.
        """
        assert self.prompt.start is not None
        length = self.own - self.start
        return self.prompt.start + self.prompt.stored - length, self.start, length


@dataclass(slots=True, eq=False)
class SlotSchedule:
    """The scheduler of one call of `Decoder.sample`. It assigns requests to slots, and runs on the host."""

    decoder: DecodeSteps
    buffers: Buffers
    requests: Sequence[SamplingRequest]
    on_progress: OnProgress | None
    on_tokens: OnTokens | None
    prompts: dict[object, CachedPrompt] = field(default_factory=dict)  # by `SamplingRequest.prompt_key`
    waiting: deque[int] = field(default_factory=deque)
    occupied: list[DecodeSlot] = field(default_factory=list)  # slot i is occupied[i] after `_arrange`
    extents: Extents = field(default_factory=lambda: Extents(0))
    prompt_routes: dict[int, Tensor] = field(default_factory=dict)  # by request: routes of its prompt, on the device
    num_reported: dict[int, int] = field(default_factory=dict)  # by request: number of tokens passed to `on_tokens`
    kept: KeptTokens = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptTokens(self.buffers.kept)

    def run(self) -> None:
        # In a cache with pages, the last page is left for inactive slots and padding.
        self.extents = Extents(self.buffers.cache.capacity - (self.decoder.page if self.decoder.page > 1 else 0))
        for number, request in enumerate(self.requests):
            self.prompts.setdefault(request.prompt_key, CachedPrompt(request)).unfinished += 1
            self.waiting.append(number)
        previous: StatusCopy | None = None
        while self.waiting or self.occupied:
            changed = self._admit()
            if changed or any(slot.index != index for index, slot in enumerate(self.occupied)):
                self._arrange()
            steps = min(BURST, max(slot.remaining for slot in self.occupied))
            self.decoder.run_steps(steps, len(self.occupied))
            self.kept.read_burst(steps, len(self.occupied), self.buffers.num_requests)
            for slot in self.occupied:
                slot.remaining -= steps
            status = self.decoder.copy_status()
            # On a GPU, read the status one burst late, so that the host does not wait. On the CPU this gains nothing.
            self._release(status if status.event is None else previous)
            previous = status
            if self.on_tokens is not None:
                self._report_tokens(self.on_tokens)

    def _report_tokens(self, on_tokens: OnTokens) -> None:
        """Call `on_tokens` with the tokens that are new since the last report. Synchronises with the device."""
        buffers = self.buffers
        lengths, tokens, logprobs = (
            tensor.cpu().numpy() for tensor in (buffers.status[0], buffers.tokens, buffers.logprobs)
        )
        for number in range(len(self.requests)):
            begin, end = self.num_reported.get(number, 0), int(lengths[number])
            if end > begin:
                self.num_reported[number] = end
                on_tokens(number, tokens[number, begin:end].copy(), logprobs[number, begin:end].copy())

    def _admit(self) -> bool:
        """Assign free slots and cache space to waiting requests. Return whether any request was admitted."""
        admitted: list[DecodeSlot] = []
        missing: list[CachedPrompt] = []
        while self.waiting and len(self.occupied) + len(admitted) < self.decoder.num_slots:
            slot = self._admitted(self.waiting[0], missing)
            if slot is None and not self.occupied and not admitted:
                self._evict_prompts()
                slot = self._admitted(self.waiting[0], missing)
                assert slot is not None, "the KV cache is empty, but has no space for one response"
            if slot is None:
                break
            self.waiting.popleft()
            admitted.append(slot)
        self.occupied += admitted
        if missing:
            self._add_next_prompts(missing)
            routes = self.decoder.prefill([prompt.placed for prompt in missing])
            for prompt, own in zip(missing, routes, strict=True):
                prompt.routes = own
        for slot in admitted:
            if slot.prompt.routes is not None:
                self.prompt_routes[slot.request] = slot.prompt.routes
        if self.decoder.page > 1 and admitted:
            self.decoder.copy_keys([slot.partial_page for slot in admitted])
        return bool(admitted)

    def _admitted(self, number: int, missing: list[CachedPrompt]) -> DecodeSlot | None:
        request = self.requests[number]
        prompt = self.prompts[request.prompt_key]
        size = self.decoder.own_size(prompt.stored, request.max_new_tokens)
        start = self.extents.allocate(size)
        if start is None:
            return None
        if prompt.start is None:
            prompt.start = self.extents.allocate(self.decoder.prompt_size(prompt.stored))
            if prompt.start is None:
                self.extents.free(start, size)
                return None
            if prompt.stored:
                missing.append(prompt)
        own = start + prompt.stored % self.decoder.page
        return DecodeSlot(
            request=number, prompt=prompt, start=start, size=size, own=own, remaining=request.max_new_tokens
        )

    def _add_next_prompts(self, missing: list[CachedPrompt]) -> None:
        """Append prompts of waiting requests to `missing`, the list of prompts for the next prefill pass.

        A prompt is added only if the cache then still has space for a response in every free slot.
        """
        tokens = sum(prompt.stored for prompt in missing)
        for number in self.waiting:
            request = self.requests[number]
            prompt = self.prompts[request.prompt_key]
            if prompt.start is not None or not prompt.stored:
                continue
            tokens += prompt.stored
            free_slots = self.decoder.num_slots - len(self.occupied)
            size = self.decoder.prompt_size(prompt.stored)
            own = self.decoder.own_size(prompt.stored, request.max_new_tokens)
            spare = self.extents.num_free - size - free_slots * own
            if tokens > PREFILL_TOKENS or spare < 0:
                return
            prompt.start = self.extents.allocate(size)
            if prompt.start is None:
                return
            missing.append(prompt)

    def _evict_prompts(self) -> None:
        """Free the cache space of all prefilled prompts. Call this only if no slot is occupied."""
        for prompt in self.prompts.values():
            if prompt.start is not None:
                self.extents.free(prompt.start, self.decoder.prompt_size(prompt.stored))
                prompt.start = None

    def _arrange(self) -> None:
        """Update the slots (places of responses in the decode batch) on the device.

        Move the slots of current responses to the front, and initialise the slots of new responses.
        """
        num_slots = self.buffers.slots.shape[1]
        # For each slot: its previous index, whether it is new, and the fields of a new slot.
        table = np.zeros((NUM_SLOT_FIELDS + 2, num_slots), np.int64)
        previous, is_new, fresh = table[0], table[1], table[2:]
        is_new[:] = 1
        for index, slot in enumerate(self.occupied):
            if slot.index is not None:
                previous[index], is_new[index] = slot.index, 0
            else:
                request = self.requests[slot.request]
                assert slot.prompt.start is not None
                fresh[[PROMPT, STORED, OWN, ACTIVE], index] = slot.prompt.start, slot.prompt.stored, slot.own, 1
                fresh[[TOKEN, KEY], index] = request.tokens[-1], request.key
                fresh[[MAX_NEW_TOKENS, REQUEST], index] = request.max_new_tokens, slot.request
                fresh[SHIFT, index] = slot.prompt.position_shift
            slot.index = index
        uploaded = self.decoder.uploaded(table)
        slots = self.buffers.slots
        slots.copy_(torch.where(uploaded[1] != 0, uploaded[2:], slots[:, uploaded[0]]))

    def _release(self, status_copy: StatusCopy | None) -> None:
        """Free the slots and the cache space of responses that have ended or have reached their token limit."""
        status = None if status_copy is None else status_copy.read()
        remaining: list[DecodeSlot] = []
        for slot in self.occupied:
            if slot.remaining > 0 and (status is None or not status[1, slot.request]):
                remaining.append(slot)
                continue
            self.extents.free(slot.start, slot.size)
            slot.prompt.unfinished -= 1
            if slot.prompt.unfinished == 0:
                assert slot.prompt.start is not None
                self.extents.free(slot.prompt.start, self.decoder.prompt_size(slot.prompt.stored))
                slot.prompt.start = None
        self.occupied = remaining
        if status is not None and self.on_progress is not None:
            self.on_progress(int(status[1, : len(self.requests)].sum()))
