"""About how much memory a device needs for a shape of devices and micro-batches, and the largest that fits.

The count is `padfree.estimate.memory`'s, from the skeleton of the model: shapes and no numbers.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from padfree.config import Config, LoraConfig
from padfree.config.choices import Checkpointing
from padfree.estimate.memory import MemoryEstimate, estimate_memory
from padfree.model.lora import add_adapters
from padfree.tools.planner.epoch import PlanShape
from padfree.train.resolve_auto import USABLE_FRACTION

GIBIBYTE = 1 << 30

MOST_TOKENS = 1 << 22
"""No more tokens of a micro-batch than this are considered."""

TOKEN_STEP = 256
"""Above it, tokens of a micro-batch are a multiple of it."""


class DeviceMemory:
    """The settings of a run and the skeleton of its model: what any shape would need."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        if config.lora.rank:
            add_adapters(model, config.lora)
        # the adapters are in the model now, and are not to be put in again
        self.config, self.model = replace(config, lora=LoraConfig()), model
        self.copied_keys = 0.0  # of the data: see `estimate_memory`

    @property
    def checkpointing(self) -> Checkpointing:
        assert self.config.parallel.checkpointing != "auto", "settings are settled before memory is estimated"
        return self.config.parallel.checkpointing

    def estimate(self, shape: PlanShape, *, checkpointing: Checkpointing | None = None) -> MemoryEstimate:
        """Of one of `shape.ranks` GPUs; with another checkpointing than the run's, if one is given."""
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

    def most_tokens(self, shape: PlanShape, memory: float, *, checkpointing: Checkpointing | None = None) -> int:
        """The most tokens of a micro-batch that fit in `memory` bytes of a device; 0: none do."""

        def fits(tokens: int) -> bool:
            found = self.estimate(replace(shape, max_tokens=tokens), checkpointing=checkpointing)
            return found.device <= memory * USABLE_FRACTION

        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low - low % TOKEN_STEP if low > TOKEN_STEP else low
