"""Continuous batching: decode many responses at a time in slots.

    slot_schedule   on the host      assigns a slot and a part of the cache to each request
    decode_steps    on the device    prefill, and one step of all slots

The last token of a prompt is not prefilled. Instead, it is the first input of each slot that samples a response to the
prompt, so that decode steps sample all tokens of a response. A prompt of n tokens therefore takes n - 1 entries of the
cache, for any number of responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from padfree.rollout.base import OnProgress, OnTokens, Response, SamplingRequest
from padfree.rollout.engines.in_process.decode_steps import DecodeStatistics, DecodeSteps
from padfree.rollout.engines.in_process.slot_schedule import SlotSchedule
from padfree.routes import Routes, joined_routes


class Decoder(DecodeSteps):
    """Samples responses from a `CachedModel`, many at a time: each in a slot of its own."""

    @torch.no_grad()
    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        version: int = 0,
        on_progress: OnProgress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Response]:
        """Return one response for each request, in order.

        `on_tokens`, if given, receives new tokens after every burst (a few decode steps that the host starts at once).
        The host then waits for the device after every burst.
        """
        self.statistics = DecodeStatistics()
        if not requests:
            return []
        buffers = self._buffers = self._fitting_buffers(requests)
        buffers.slots.zero_()
        buffers.status.zero_()
        schedule = SlotSchedule(self, buffers, requests, on_progress, on_tokens)
        schedule.run()
        kept = schedule.kept.sets(len(requests))
        status, tokens, logprobs = (
            tensor.cpu().numpy() for tensor in (buffers.status, buffers.tokens, buffers.logprobs)
        )
        routes = None if buffers.routes is None else buffers.routes.cpu().numpy()
        of_prompts = {id(tensor): tensor for tensor in schedule.prompt_routes.values()}  # requests share prompts
        prompt_routes = {key: tensor.cpu().numpy() for key, tensor in of_prompts.items()}
        stops = set(self.stops.tolist())
        responses = []
        for number in range(len(requests)):
            length = int(status[0, number])
            own = tokens[number, :length].astype(np.int64)
            responses.append(
                Response(
                    tokens=own,
                    logprobs=logprobs[number, :length].copy(),
                    ended=int(own[-1]) in stops,
                    version=version,
                    routes=None
                    if routes is None
                    else _joined(prompt_routes.get(id(schedule.prompt_routes.get(number))), routes[number, :length]),
                    kept=None if kept is None else kept[number],
                )
            )
        return responses


def _joined(prompt: Routes | None, steps: Routes) -> Routes | None:
    """Return the routes (the experts of each token) of a prompt and its response, whose last route is unknown.

    `prompt`: routes of the prompt without its last token, if any. `steps` [m, R, k]: routes of the inputs of m decode
    steps.
    """
    return joined_routes([prompt, steps, None], [0, len(steps), 1])
