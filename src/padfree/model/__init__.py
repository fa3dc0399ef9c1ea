"""Stock Hugging Face models on packed rows."""

from padfree.batch import LmHead
from padfree.model.adapter import TESTED, attach, lm_head_of
from padfree.model.outputs import hidden_states

__all__ = ["TESTED", "LmHead", "attach", "hidden_states", "lm_head_of"]
