"""Sizes of tiles and chunks of logits: pure arithmetic, no tensors.

Let M be the number of labelled tokens, D the hidden size and V the vocabulary size. `score` computes gradients for
`width` vocabulary columns at a time. The gradients of the logits of all tokens are then [M, width], and the weight
gradient of these columns is one matmul over all tokens.

`fused_loss` processes chunks of C tokens and keeps the logits of one chunk. Besides the returned gradients, it stores:

    logits of a chunk [C, V]    16 bits per logit in bfloat16 training
    weight gradient   [V, D]    float32 sums over the chunks, rounded to the weight's dtype once, at the end

Each chunk reads and rewrites the sums, so larger chunks mean less memory traffic. Half of the sums fit into the memory
of the bfloat16 gradient that is returned anyway; the other half needs extra memory. If the budget is too small for all
sums, only the columns [0, kept) of the vocabulary have sums. The gradients of columns [kept, V) are computed as in
`score` after all chunks: their logits are computed a second time, and their weight gradient is one matmul. The plans
for (M, D, V) = (16384, 4096, 151936) and two budgets are:

    4 GiB    C = 8192    kept = 151936    2 chunks, no logits computed twice
    1 GiB    C = 4096    kept =  86016    4 chunks, 43% of the logits computed twice
"""

from __future__ import annotations

from dataclasses import dataclass

from padfree.arrays import need_whole
from padfree.choices import HeadMemory
from padfree.errors import UserError

Memory = HeadMemory | int

GIBIBYTE = 1 << 30
BUDGETS = {"speed": 4 * GIBIBYTE, "low": GIBIBYTE}

# The size of a tile of logits in bytes. On a GPU, a tile is large enough to keep all multiprocessors busy. On a CPU, a
# tile fits into the caches.
TILE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
MAX_BLOCK = 4096

# A matmul processes this many tokens at a time, so it pads the number of tokens to a multiple of TILE_ROWS.
TILE_ROWS = 128
# The number of matmul operations that take as long as one byte of memory traffic. On an H200 this is 790e12 operations
# per second / 4.3e12 bytes per second.
OPERATIONS_PER_BYTE = 180
# The memory traffic of a logit that is computed twice, minus that of a kept logit, in bytes and without the matmuls.
# The second time, the logit is written and read, and its gradient is written. If the matmul is fused with the
# elementwise work (FUSED_TWICE_BYTES), only the gradient is written, which is less traffic than a kept logit causes.
TWICE_BYTES = 10
FUSED_TWICE_BYTES = -4


def budget_bytes(memory: Memory) -> int:
    """The number of bytes for a `memory` setting: "low", "speed" or a number of bytes."""
    if isinstance(memory, str):
        if memory not in BUDGETS:
            raise UserError(
                "memory",
                "is not a known choice",
                "give 'speed' (4 GiB), 'low' (1 GiB) or a number of bytes",
                value=memory,
            )
        return BUDGETS[memory]
    need_whole("memory", memory, 1, "give 'speed' (4 GiB), 'low' (1 GiB) or a number of bytes above 0")
    return memory


def usable_budget(budget: int, num_rows: int, hidden: int, *, sum_bytes: int) -> int:
    """The budget in bytes, increased if it cannot hold the sums of the gradient of the hidden states.

    These sums are `num_rows` x `hidden` elements of `sum_bytes` each. With a smaller budget, tiles and chunks would be
    too small to be fast.
    """
    return max(budget, num_rows * hidden * sum_bytes)


def block_columns(vocabulary: int) -> int:
    """The number of vocabulary columns per block: a power of two, at most 4096, that gives about eight blocks."""
    return min(MAX_BLOCK, max(64, _power_of_two(-(-vocabulary // 8))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The size of the largest tile of logits that is stored in full precision.

    `columns` is a multiple of the block size.
    """

    rows: int
    columns: int


def choose_tile(num_rows: int, vocabulary: int, *, itemsize: int, device_type: str, budget: int) -> Tile:
    """A tile [tokens, columns] that is as square as possible and takes at most an eighth of the budget.

    It has at least one block of columns, whatever the budget.
    """
    elements = max(1, min(TILE_BYTES.get(device_type, TILE_BYTES["cuda"]), budget // 8) // itemsize)
    block = block_columns(vocabulary)
    columns = elements / min(max(1, num_rows), elements**0.5)
    blocks = max(1, min(-(-vocabulary // block), round(columns / block), elements // block))
    return Tile(rows=max(1, min(num_rows, elements // (blocks * block))), columns=blocks * block)


def choose_width(num_rows: int, vocabulary: int, *, itemsize: int, budget: int) -> int:
    """The number of vocabulary columns that are processed at a time for all `num_rows` tokens.

    It is at least one block, whatever the budget.
    """
    block = block_columns(vocabulary)
    widest = max(block, budget // max(1, num_rows * itemsize))
    return min(vocabulary, even_part(vocabulary, widest, multiple=64))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedPlan:
    """How `fused_loss` uses its memory budget: the chunk size, and the vocabulary columns whose logits are kept."""

    chunk_rows: int  # C
    kept: int  # the logits of columns [0, kept) are kept, the logits of columns [kept, V) are computed twice
    shared: int  # the sums of columns [0, shared) use the memory of the returned gradient, other sums need their own


def plan_fused(
    num_rows: int,
    hidden: int,
    vocabulary: int,
    *,
    logit_bytes: int,
    row_bytes: int,
    sum_bytes: int,
    gradient_bytes: int,
    budget: int,
    weight_gradient: bool,
    twice_bytes: int = TWICE_BYTES,
    keep_all: bool = False,
) -> FusedPlan:
    """The cheapest plan for `fused_loss` within the memory budget. If no plan fits, chunks have one token.

    `num_rows` tokens with hidden size `hidden` are scored. `logit_bytes` is the size of a kept logit, and `row_bytes`
    all other bytes per token of a chunk. `sum_bytes` is the size of one element of a gradient while it is summed, and
    `gradient_bytes` its size in the returned gradient. If both sizes are equal, the sums are made in the returned
    gradient itself. `twice_bytes` is the extra memory traffic, besides the matmul, of a logit that is computed twice.
    If `keep_all` is True, no logit is computed twice, and chunks are made smaller instead.
    """
    own_sums = weight_gradient and sum_bytes != gradient_bytes
    fitting = vocabulary * gradient_bytes // sum_bytes // 64 * 64

    def plan(kept: int) -> tuple[float, FusedPlan]:
        shared = min(kept, fitting) if own_sums else kept
        again = vocabulary - kept
        # If columns are recomputed, the gradient of hidden is summed over chunks and recomputed columns. An element of
        # the sum has more bytes than one of the returned gradient.
        held = num_rows * hidden * (sum_bytes - gradient_bytes) if again else 0
        chunk_rows = max(1, (budget - held) // (kept * logit_bytes + row_bytes))
        if chunk_rows < num_rows:
            held += (kept - shared) * hidden * sum_bytes
            chunk_rows = max(1, (budget - held) // (kept * logit_bytes + row_bytes))
        chunk_rows = min(num_rows, even_part(num_rows, chunk_rows, multiple=TILE_ROWS))
        num_chunks = -(-num_rows // chunk_rows)
        # The first chunk writes the sums, every other chunk reads and writes them, and rounding at the end reads them.
        rewritten = kept * hidden * sum_bytes * 2 * num_chunks if num_chunks > 1 and weight_gradient else 0
        multiplied = 2 * hidden / OPERATIONS_PER_BYTE  # cost of one logit's matmul
        idle = num_chunks * rounded_up(chunk_rows, TILE_ROWS) - num_rows
        cost = rewritten + again * num_rows * (multiplied + twice_bytes) + idle * vocabulary * multiplied
        return cost, FusedPlan(chunk_rows=chunk_rows, kept=kept, shared=shared)

    if keep_all or not own_sums:
        return plan(vocabulary)[1]
    block = block_columns(vocabulary)
    return min((plan(kept) for kept in (*range(block, vocabulary, block), vocabulary)), key=lambda pair: pair[0])[1]


def even_part(whole: int, largest: int, *, multiple: int) -> int:
    """The part size if `whole` is divided into equal parts of at most `largest`.

    It is rounded up to a multiple of `multiple`, unless it would then exceed `largest`.
    """
    number = -(-whole // largest)
    part = -(-whole // number)
    rounded = rounded_up(part, multiple)
    return rounded if rounded <= largest else part


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
