"""Choose the sizes of tiles and chunks of logits for a memory budget.

`fused_loss` stores the logits of a chunk of tokens, and float32 sums of the weight gradient. Each chunk reads and
writes all sums, so fewer and larger chunks are faster.

With a small budget, logits and sums are stored only for the first vocabulary columns. The logits of the other columns
are computed twice. For 16,384 tokens, hidden size 4096 and vocabulary size 151,936, 1 GiB computes 43% of the logits
twice, and 4 GiB none.
"""

from __future__ import annotations

from dataclasses import dataclass

from padfree.arrays import need_whole
from padfree.choices import HeadMemory
from padfree.errors import UserError

Memory = HeadMemory | int

GIBIBYTE = 1 << 30
BUDGETS = {"speed": 4 * GIBIBYTE, "low": GIBIBYTE}

# The size of a tile of logits in bytes. It keeps a whole GPU busy, or fits into the caches of a CPU.
TILE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
MAX_BLOCK = 4096

# A matmul processes this many tokens at a time, so it pads the number of tokens to a multiple of TILE_ROWS.
TILE_ROWS = 128
# The number of matmul operations that take as long as one byte of memory traffic: on an H200, 790e12 operations/s
# divided by 4.3e12 bytes/s.
OPERATIONS_PER_BYTE = 180
# The extra memory traffic of a logit that is computed twice, in bytes, without the matmuls. A matmul that is fused with
# the elementwise work (FUSED_TWICE_BYTES) writes only the gradient, so its traffic is lower.
TWICE_BYTES = 10
FUSED_TWICE_BYTES = -4


def budget_bytes(memory: Memory) -> int:
    """Return the number of bytes for a `memory` setting: "low", "speed" or a number of bytes."""
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
    """Return the memory budget in bytes, or the size of the gradient of the hidden states if that is larger.

    This gradient has `num_rows` x `hidden` elements of `sum_bytes` each. With less memory, tiles would be too small to
    be fast.
    """
    return max(budget, num_rows * hidden * sum_bytes)


def block_columns(vocabulary: int) -> int:
    """Return the number of vocabulary columns in a block of the blockwise softmax.

    The number is a power of two from 64 to 4096. It gives about eight blocks, or more for a vocabulary above 32,768.
    """
    return min(MAX_BLOCK, max(64, _power_of_two(-(-vocabulary // 8))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The size of the largest tile of float32 logits, in tokens and vocabulary columns.

    `columns` is a multiple of the block size.
    """

    rows: int
    columns: int


def choose_tile(num_rows: int, vocabulary: int, *, itemsize: int, device_type: str, budget: int) -> Tile:
    """Return the size of a tile of logits: as square as possible, and at most an eighth of the memory budget."""
    elements = max(1, min(TILE_BYTES.get(device_type, TILE_BYTES["cuda"]), budget // 8) // itemsize)
    block = block_columns(vocabulary)
    columns = elements / min(max(1, num_rows), elements**0.5)
    blocks = max(1, min(-(-vocabulary // block), round(columns / block), elements // block))
    return Tile(rows=max(1, min(num_rows, elements // (blocks * block))), columns=blocks * block)


def choose_width(num_rows: int, vocabulary: int, *, itemsize: int, budget: int) -> int:
    """Return the number of vocabulary columns whose gradients `score` computes at a time, for `num_rows` labelled
    tokens.
    """
    block = block_columns(vocabulary)
    widest = max(block, budget // max(1, num_rows * itemsize))
    return min(vocabulary, even_part(vocabulary, widest, multiple=64))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedPlan:
    """How `fused_loss` uses its memory: the number of tokens in a chunk, and how many vocabulary columns have their
    logits stored.
    """

    chunk_rows: int  # C
    kept: int  # the logits of columns [0, kept) are kept, the logits of columns [kept, V) are computed twice
    shared: int  # the sums of columns [0, shared) use the memory of the returned gradient, other sums need their own


def plan_fused(
    num_rows: int,
    hidden: int,
    vocabulary: int,
    *,
    logit_bytes: int,  # of a logit that is stored until its gradient is computed
    row_bytes: int,  # of all other memory per token of a chunk
    sum_bytes: int,  # of an element of a gradient that is summed over chunks
    gradient_bytes: int,  # of an element of a gradient that is returned
    budget: int,  # in bytes
    weight_gradient: bool,
    twice_bytes: int = TWICE_BYTES,  # extra memory traffic of a logit that is computed twice
    keep_all: bool = False,  # store all logits of a chunk, so that no logit is computed twice
) -> FusedPlan:
    """Return the fastest plan of `fused_loss` within the memory budget. If no plan fits, the chunks have one token."""
    own_sums = weight_gradient and sum_bytes != gradient_bytes
    fitting = vocabulary * gradient_bytes // sum_bytes // 64 * 64

    def plan(kept: int) -> tuple[float, FusedPlan]:
        shared = min(kept, fitting) if own_sums else kept
        again = vocabulary - kept
        # If columns are recomputed, the gradient of hidden is also a sum, whose elements are larger than those of the
        # gradient.
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
    """Divide `whole` into equal parts of at most `largest`, and return the size of a part.

    The part's size is rounded up to a multiple of `multiple`, unless it would then exceed `largest`.
    """
    number = -(-whole // largest)
    part = -(-whole // number)
    rounded = rounded_up(part, multiple)
    return rounded if rounded <= largest else part


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
