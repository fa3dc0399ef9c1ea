"""Context parallelism: one packed row over several devices."""

from padfree.cp.attend import Communication, attend, communication_bytes
from padfree.cp.layout import keys_read, make_layout, modelled_cost, pieces, work
from padfree.cp.shard import gather_tokens, shard

__all__ = [
    "Communication",
    "attend",
    "communication_bytes",
    "gather_tokens",
    "keys_read",
    "make_layout",
    "modelled_cost",
    "pieces",
    "shard",
    "work",
]
