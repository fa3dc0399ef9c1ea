"""How large the pieces are: pure arithmetic, no tensors.

M rows with a label, D hidden, V vocabulary. The gradient of `score` is computed for `width` columns of all rows at a
time: gradients of logits [M, width], so that the weight gradient of these columns is one matmul over all rows.

`fused_loss` goes by chunks of C rows and keeps their logits. What it wants to hold beside the gradients it returns:

    logits of a chunk [C, V]    16 bits each in bfloat16 training
    weight gradient   [V, D]    float32 sums over the chunks, rounded to the weight's type once, at the end

The more rows a chunk has, the less often the sums are rewritten. Half of the sums fit into the memory of the bfloat16
gradient that is returned anyway; others need memory of their own. Where the budget is too small for all, columns
[kept, V) are left to `score`'s way once all rows are done: their logits are computed a second time and their weight
gradient is one matmul. For (M, D, V) = (16384, 4096, 151936):

    4 GiB    C = 8192    kept = 151936    2 chunks, no logits twice
    1 GiB    C = 4096    kept =  86016    4 chunks, 43% of the logits twice
"""

from __future__ import annotations

from dataclasses import dataclass

from padfree.arrays import need_whole
from padfree.config.choices import HeadMemory
from padfree.errors import UserError

Memory = HeadMemory | int

GIBIBYTE = 1 << 30
BUDGETS = {"speed": 4 * GIBIBYTE, "low": GIBIBYTE}

# Tiles: on a GPU large enough to fill it several times over, on a CPU small enough for its caches.
TILE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
MAX_BLOCK = 4096

# A matmul works on this many rows at a time, be they there or not.
TILE_ROWS = 128
# How many operations of a matmul take as long as a byte of memory traffic; an H200's 790e12 / 4.3e12.
OPERATIONS_PER_BYTE = 180
# The memory traffic that a logit causes beside the matmul if it is computed twice: it is written and read, and its
# gradient is written. Where the matmul ends in the elementwise work only the gradient is written, which is less than
# a logit causes that is kept: it is written, read, and overwritten by its gradient.
TWICE_BYTES = 10
FUSED_TWICE_BYTES = -4


def budget_bytes(memory: Memory) -> int:
    """The bytes a setting stands for."""
    if isinstance(memory, str):
        if memory not in BUDGETS:
            raise UserError("memory", "", "give 'speed' (4 GiB), 'low' (1 GiB) or a number of bytes", value=memory)
        return BUDGETS[memory]
    need_whole("memory", memory, 1, "give 'speed' (4 GiB), 'low' (1 GiB) or a number of bytes above 0")
    return memory


def usable_budget(budget: int, num_rows: int, hidden: int, *, sum_bytes: int) -> int:
    """No less than the sums of the gradient of hidden [M, D]: with less, the pieces would be too small to be fast."""
    return max(budget, num_rows * hidden * sum_bytes)


def block_columns(vocabulary: int) -> int:
    """Columns per block: a power of two, at most 4096, so many that a row has about eight of them or more."""
    return min(MAX_BLOCK, max(64, _power_of_two(-(-vocabulary // 8))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The largest tile of logits held in full precision; `columns` is a multiple of the block size."""

    rows: int
    columns: int


def choose_tile(num_rows: int, vocabulary: int, *, itemsize: int, device_type: str, budget: int) -> Tile:
    """As square as blocks and rows allow, in at most an eighth of the budget (but never less than one block)."""
    elements = max(1, min(TILE_BYTES.get(device_type, TILE_BYTES["cuda"]), budget // 8) // itemsize)
    block = block_columns(vocabulary)
    columns = elements / min(max(1, num_rows), elements**0.5)
    blocks = max(1, min(-(-vocabulary // block), round(columns / block), elements // block))
    return Tile(rows=max(1, min(num_rows, elements // (blocks * block))), columns=blocks * block)


def choose_width(num_rows: int, vocabulary: int, *, itemsize: int, budget: int) -> int:
    """How many columns of all rows are worked on at a time. Below one block the budget is exceeded."""
    block = block_columns(vocabulary)
    widest = max(block, budget // max(1, num_rows * itemsize))
    return min(vocabulary, even_part(vocabulary, widest, multiple=64))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedPlan:
    """How `fused_loss` spends its budget."""

    chunk_rows: int  # C
    kept: int  # the logits of columns [0, kept) are kept; those of [kept, V) are computed a second time
    shared: int  # the sums of columns [0, shared) are in the memory of the returned gradient; the others have their own


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
    """The cheapest plan within the budget; if none is, a row at a time.

    `logit_bytes`: of a kept logit. `row_bytes`: what else a row of a chunk takes. `sum_bytes`, `gradient_bytes`: of one
    number of a gradient while it is summed, and when it is returned. Where they are equal, the sums are the gradient.
    `twice_bytes`: how much more memory traffic, beside the matmul, a logit causes if it is computed twice.
    `keep_all`: no logit is computed twice; chunks are smaller instead.
    """
    own_sums = weight_gradient and sum_bytes != gradient_bytes
    fitting = vocabulary * gradient_bytes // sum_bytes // 64 * 64

    def plan(kept: int) -> tuple[float, FusedPlan]:
        shared = min(kept, fitting) if own_sums else kept
        again = vocabulary - kept
        # The gradient of hidden is a sum over both ways then.
        held = num_rows * hidden * (sum_bytes - gradient_bytes) if again else 0
        chunk_rows = max(1, (budget - held) // (kept * logit_bytes + row_bytes))
        if chunk_rows < num_rows:
            held += (kept - shared) * hidden * sum_bytes
            chunk_rows = max(1, (budget - held) // (kept * logit_bytes + row_bytes))
        chunk_rows = min(num_rows, even_part(num_rows, chunk_rows, multiple=TILE_ROWS))
        num_chunks = -(-num_rows // chunk_rows)
        # The sums are written by the first chunk, read and written by the others, and read to be rounded.
        rewritten = kept * hidden * sum_bytes * 2 * num_chunks if num_chunks > 1 and weight_gradient else 0
        multiplied = 2 * hidden / OPERATIONS_PER_BYTE  # what a logit's matmul costs
        idle = num_chunks * rounded_up(chunk_rows, TILE_ROWS) - num_rows
        cost = rewritten + again * num_rows * (multiplied + twice_bytes) + idle * vocabulary * multiplied
        return cost, FusedPlan(chunk_rows=chunk_rows, kept=kept, shared=shared)

    if keep_all or not own_sums:
        return plan(vocabulary)[1]
    block = block_columns(vocabulary)
    return min((plan(kept) for kept in (*range(block, vocabulary, block), vocabulary)), key=lambda pair: pair[0])[1]


def even_part(whole: int, largest: int, *, multiple: int) -> int:
    """The size of equal parts of `whole`, at most `largest`, rounded up to `multiple` if that stays within it."""
    number = -(-whole // largest)
    part = -(-whole // number)
    rounded = rounded_up(part, multiple)
    return rounded if rounded <= largest else part


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    """The least power of two that is `number` or more."""
    return 1 << (number - 1).bit_length()
