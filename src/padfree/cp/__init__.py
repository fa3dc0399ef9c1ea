"""Context parallelism: the tokens of one pack (a batch of concatenated samples) are divided over several devices."""

from padfree.cp.attend import Communication, attend, communication_bytes
from padfree.cp.layout import keys_read, make_layout, modelled_cost, pieces, work
from padfree.cp.shard import gather_tokens, shard
from padfree.cp.whole_segments import from_whole_segments, mixer_bytes, to_whole_segments

__all__ = [
    "Communication",
    "attend",
    "communication_bytes",
    "from_whole_segments",
    "gather_tokens",
    "keys_read",
    "make_layout",
    "mixer_bytes",
    "modelled_cost",
    "pieces",
    "shard",
    "to_whole_segments",
    "work",
]
