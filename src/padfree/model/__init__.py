"""Run stock Hugging Face models on packs of samples.

adapter, interface           use padfree's attention in a stock model
probe, shrink                test on a small copy of a model whether it can be packed
outputs, scalar_head         hidden states, and the heads that score them
load, model_files, export    read and write Hugging Face folders; each rank reads only its part
lora, expert_adapters        low-rank adapters
routers, route_replay        the routers of a mixture of experts
mixers                       layers that mix tokens without attention
vision                       vision-language models
"""

from padfree.batch import LmHead
from padfree.model.adapter import TESTED, attach, lm_head_of
from padfree.model.outputs import hidden_states

__all__ = ["TESTED", "LmHead", "attach", "hidden_states", "lm_head_of"]
