"""Stock Hugging Face models on packed rows.

adapter     attach: padfree's attention in a stock model, or a refusal
interface   the attention function that the model then calls
probe       whether an architecture can be packed, tried on a small copy
shrink      the config of that copy
outputs     hidden states, and the head that scores them
scalar      heads that give one number: reward models, critics
structure   a model without weights, and the list of its layers
files       which files hold which tensors
load        weights into a model, each rank reading what it holds
lora        adapters
export      back to a Hugging Face folder
"""

from padfree.batch import LmHead
from padfree.model.adapter import TESTED, attach, lm_head_of
from padfree.model.outputs import hidden_states

__all__ = ["TESTED", "LmHead", "attach", "hidden_states", "lm_head_of"]
