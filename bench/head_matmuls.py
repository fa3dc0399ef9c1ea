"""The matmuls of the head: tile configurations compared with each other and with cuBLAS.

    PYTHONPATH=src python bench/head_matmuls.py

The script runs both shapes of `bench/head.py` on a Hopper GPU. It prints these lines:

    mm, bfloat16       hidden @ weight.T rounded to bfloat16, as in the floor
    mm, float32        the same in float32, as needed if the elementwise work is a separate kernel
    from stored        the gradient from stored logits, in place, for a few program sizes
    merge              merging the sums of all blocks

For each configuration of `padfree.head.matmuls`, it also prints:

    reduce, kept       sums with entropy, storing up to 2^31 logits as float16
    reduce             sums with entropy only
    gradient           the gradient of the same number of logits

If a configuration cannot be compiled or launched, the script prints the error and tries the next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from head import SIZES, Clock, make_inputs
from torch import Tensor

from padfree.head import matmuls, triton_elementwise
from padfree.head.elementwise import BlockedHead, BlockSums, LabelledRows, Softmax, Upstream
from padfree.head.matmuls import MatmulConfiguration

CONFIGURATIONS = [
    MatmulConfiguration(),
    MatmulConfiguration(band=8),
    MatmulConfiguration(band=12),
    MatmulConfiguration(band=24),
    MatmulConfiguration(band=32),
    MatmulConfiguration(stages=4, parts=2),
    MatmulConfiguration(stages=3, parts=2),
    MatmulConfiguration(columns=128, stages=3, warps=4, parts=2, resident=2),
]
STORED = [(4096, 8), (2048, 4), (4096, 4), (8192, 8), (8192, 16)]
MAX_LOGITS = 1 << 31


def time_one(clock: Clock, name: str, call: Callable[[], object], operations: float) -> None:
    def run() -> None:
        call()

    try:
        milliseconds = clock.median(run)
    except Exception as error:
        print(f"  {name:30} {type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
        return
    rate = f"{operations / milliseconds * 1e-9:8.0f} TFLOP/s" if operations else ""
    print(f"  {name:30}{milliseconds:9.2f} ms{rate}", flush=True)


def time_stored(
    clock: Clock, head: BlockedHead, rows: LabelledRows, softmax: Softmax, upstream: Upstream, store: Tensor
) -> None:
    peak = store.new_zeros(head.num_blocks, len(store), dtype=torch.float32).T
    for triton_elementwise.STORED_SPAN, triton_elementwise.STORED_WARPS in reversed(STORED):

        def call() -> None:
            triton_elementwise.gradient_from_stored(
                store, head, rows, peak, softmax, upstream, store.view(torch.bfloat16)
            )

        time_one(
            clock, f"from stored, {triton_elementwise.STORED_SPAN} by {triton_elementwise.STORED_WARPS} warps", call, 0
        )


def time_merge(clock: Clock, num_rows: int, num_blocks: int) -> None:
    sums = BlockSums.empty(num_rows, num_blocks, torch.empty(0, device="cuda"), entropy=True)
    for tensor in (sums.peak, sums.total, sums.moment):
        assert tensor is not None
        tensor.fill_(1.0)
    time_one(clock, "merge", lambda: triton_elementwise.merge(sums), 0)


def bench_shape(shape: tuple[int, int, int], clock: Clock) -> None:
    device = torch.device("cuda")
    hidden, weight, labels = (tensor.detach() for tensor in make_inputs(shape, torch.bfloat16, device))
    num_rows, width, vocabulary = shape
    part = min(num_rows, MAX_LOGITS // vocabulary)
    operations = 2.0 * part * width * vocabulary
    hidden, labels = hidden[:part], labels[:part]
    rows = LabelledRows(labels=labels, inverse_temperature=torch.ones(part, device=device))
    pull = torch.randn(part, device=device)
    upstream = Upstream(logprobs=pull, entropy=pull)
    softmax = Softmax(peak=pull + 12, log_total=pull + 5, logprobs=pull, entropy=pull + 9)
    print(f"{part} of {num_rows} tokens, D {width}, V {vocabulary}")

    store = torch.zeros(part, vocabulary, dtype=torch.float16, device=device)
    out = store.view(torch.bfloat16)
    time_one(clock, "mm, bfloat16", lambda: torch.mm(hidden, weight.T, out=out), operations)
    wide = torch.empty(part, vocabulary, device=device)
    time_one(clock, "mm, float32", lambda: torch.mm(hidden, weight.T, out_dtype=torch.float32, out=wide), operations)
    wide.resize_(0)
    store.zero_()
    head = BlockedHead(weight=weight, bias=None, softcap=None, logit_scale=1.0, block=256)
    time_stored(clock, head, rows, softmax, upstream, store)
    time_merge(clock, part, head.num_blocks)
    for by in CONFIGURATIONS:
        head = BlockedHead(weight=weight, bias=None, softcap=None, logit_scale=1.0, block=by.block)
        sums = BlockSums.empty(part, head.num_blocks, pull, entropy=True)
        print(f" {by}")

        def reduce(
            stored: Tensor | None, by: MatmulConfiguration = by, head: BlockedHead = head, sums: BlockSums = sums
        ) -> None:
            matmuls.reduce_rows(hidden, head, rows, sums, stored, by)

        def gradient(by: MatmulConfiguration = by, head: BlockedHead = head) -> None:
            matmuls.gradient_columns(hidden, weight, 0, head, rows, softmax, upstream, out, by)

        time_one(clock, "reduce, kept", lambda reduce=reduce: reduce(store), operations)  # type: ignore[misc]
        time_one(clock, "reduce", lambda reduce=reduce: reduce(None), operations)  # type: ignore[misc]
        time_one(clock, "gradient", gradient, operations)


def check(shape: tuple[int, int, int]) -> None:
    """Compare sums and gradients of every configuration with those of separate kernels, for a few tokens."""
    device = torch.device("cuda")
    hidden, weight, labels = (tensor.detach() for tensor in make_inputs(shape, torch.bfloat16, device))
    rows = LabelledRows(labels=labels, inverse_temperature=torch.ones(len(labels), device=device))
    logits = hidden.float() @ weight.float().T
    log_p = logits.log_softmax(1)
    exact = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    upstream = Upstream(logprobs=torch.ones_like(exact), entropy=torch.ones_like(exact))
    expected = torch.nn.functional.one_hot(labels, shape[2]) - log_p.exp() * (1 + log_p + entropy[:, None])
    for by in CONFIGURATIONS:
        head = BlockedHead(weight=weight, bias=None, softcap=None, logit_scale=1.0, block=by.block)
        try:
            sums = BlockSums.empty(shape[0], head.num_blocks, exact, entropy=True)
            store = torch.empty(shape[0], -(-shape[2] // 64) * 64, dtype=torch.float16, device=device)[:, : shape[2]]
            matmuls.reduce_rows(hidden, head, rows, sums, store, by)
            softmax = triton_elementwise.merge(sums)
            triton_elementwise.gradient_from_stored(
                store, head, rows, sums.peak, softmax, upstream, store.view(torch.bfloat16)
            )
            again = torch.empty_like(store, dtype=torch.bfloat16)
            matmuls.gradient_columns(hidden, weight, 0, head, rows, softmax, upstream, again, by)
        except Exception as error:
            print(f"  {by}\n    {type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
            continue
        assert softmax.entropy is not None
        distances = [
            float((actual.float() - right).norm() / right.norm())
            for actual, right in (
                (softmax.logprobs, exact),
                (softmax.entropy, entropy),
                (store.view(torch.bfloat16), expected),
                (again, expected),
            )
        ]
        right = all(d < limit for d, limit in zip(distances, (1e-4, 1e-4, 1e-2, 1e-2), strict=True))
        print(f"  {'right' if right else 'WRONG'} {' '.join(f'{d:.1e}' for d in distances)}  {by}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = SIZES["cuda"][0]
    print("distance from plain float32: log-probabilities, entropies, gradients from stored logits, gradients")
    check((1000, 512, 10_040))
    clock = Clock(torch.device("cuda"), 5)
    for shape in shapes:
        bench_shape(shape, clock)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
