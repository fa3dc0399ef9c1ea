"""Estimate the memory that a device needs, and find the largest micro-batch that fits.

`padfree.estimate.memory` makes the estimates from a skeleton of the model, which has shapes but no weights.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from padfree.config import Config, LoraConfig
from padfree.estimate.memory import MemoryEstimate, estimate_memory
from padfree.model.lora import add_adapters
from padfree.tools.planner.epoch import PlanShape
from padfree.train.resolve_auto import USABLE_FRACTION

GIBIBYTE = 1 << 30

MOST_TOKENS = 1 << 22
"""The search for the largest micro-batch that fits in memory tries at most this number of tokens."""

TOKEN_STEP = 256
"""The number of tokens of the largest micro-batch that fits is rounded down to a multiple of this number, except that
smaller numbers stay as they are."""


class DeviceMemory:
    """Estimates the memory that a run needs on each device, for any number of devices and any size of micro-batches.

    `model`: the model without weights (a skeleton).
    """

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        if config.lora.rank:
            add_adapters(model, config.lora)
        # The model has its adapters now. If the config still asked for them, `estimate_memory` would add them again.
        self.config, self.model = replace(config, lora=LoraConfig()), model
        self.copied_keys = 0.0  # keys that attention copies per token; depends on the data, see `estimate_memory`

    @property
    def checkpointing(self) -> str:
        assert self.config.parallel.checkpointing != "auto", "must be resolved by the caller"
        return self.config.parallel.checkpointing

    def estimate(self, shape: PlanShape, *, checkpointing: str | None = None) -> MemoryEstimate:
        """Return the memory that each of `shape.ranks` GPUs needs.

        `checkpointing`, if given, replaces the run's value of `parallel.checkpointing`.
        """
        parallel = replace(
            self.config.parallel,
            context=shape.context,
            replicate=shape.replicate,
            checkpointing=checkpointing or self.checkpointing,
        )
        batch = replace(self.config.batch, max_tokens=shape.max_tokens)
        changed = replace(self.config, parallel=parallel, batch=batch)
        return estimate_memory(
            changed, self.model, processes=shape.ranks, device_type="cuda", copied_keys=self.copied_keys
        )

    def most_tokens(self, shape: PlanShape, memory: float, *, checkpointing: str | None = None) -> int:
        """Return the largest number of tokens of a micro-batch that fits in `memory` bytes; 0 if not even one fits.

        `checkpointing`, if given, replaces the run's value of `parallel.checkpointing`.
        """

        def fits(tokens: int) -> bool:
            found = self.estimate(replace(shape, max_tokens=tokens), checkpointing=checkpointing)
            return found.device <= memory * USABLE_FRACTION

        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low - low % TOKEN_STEP if low > TOKEN_STEP else low
