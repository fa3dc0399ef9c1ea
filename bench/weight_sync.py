"""Weight sync without a server: full syncs and syncs by difference compared, for the tensors of Qwen3 models.

    full         tensors -> buckets of 256 MiB, each copied into one buffer
    difference   the trainer compares its weights with those that it sent last, in host memory, and encodes the changes;
                 the server applies them to its copy, in host memory, on its device, and verifies a checksum

The weights are random bfloat16 numbers. A share of the elements, 1% by default, gets other bits. Both sides run one
after the other on the same device, tensor by tensor, and the server's bits are compared with the trainer's. The bytes
do not travel, so the times are those of encoding, applying and verifying. A full sync also has the time in which its
bytes travel: the last column shows the bandwidth below which a sync by difference is faster.

    PYTHONPATH=src python bench/weight_sync.py
    PYTHONPATH=src python bench/weight_sync.py --shape 0.6b --share 0.001 --json weight_sync.json
    PYTHONPATH=src python bench/weight_sync.py --device cpu --shape tiny
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine
from step_ways import SHAPES as STEP_SHAPES
from timer import Stopwatch

from padfree.rollout.engines.servers.buckets import Receiver, host_copy
from padfree.rollout.engines.servers.differences import RegionDifference, bits_of, checksum, encode
from padfree.rollout.engines.servers.weight_stream import BUCKET, Bucket
from padfree.rollout.engines.servers.weight_sync import form_of, packed

SHAPES: dict[str, dict[str, int]] = {
    "tiny": STEP_SHAPES["tiny"],
    "0.6b": STEP_SHAPES["0.6b"],
    "4b": STEP_SHAPES["4b"],
    "8b": {**STEP_SHAPES["4b"], "hidden_size": 4096, "intermediate_size": 12_288},
}
UNTIED = {"8b"}
"""Shapes whose head has its own weight. In all other shapes, the head is tied to the embeddings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="run only this shape; default: 0.6b, 4b and 8b")
    parser.add_argument("--share", type=float, default=0.01, help="share of the elements that change")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    report = machine(device)
    print(
        "shape   parameters  |  full GB  pack s  |  difference GB  encode s  checksum s  apply and verify s  |  below"
    )
    for shape in [arguments.shape] if arguments.shape else ["0.6b", "4b", "8b"]:
        report[shape] = found = compare(shape, arguments.share, device)
        print(
            f"{shape:<6} {found['parameters'] / 1e9:9.3f} B  | {found['full_bytes'] / 1e9:8.3f} {found['pack']:7.3f}  |"
            f" {found['difference_bytes'] / 1e9:13.4f} {found['encode']:9.3f} {found['checksum']:11.3f}"
            f" {found['apply']:19.3f}  | {found['bandwidth'] / 1e9:.3f} GB/s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def tensors(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the weight matrices of a model of this shape."""
    sizes = SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    for name in ("embed", "head") if shape in UNTIED else ("embed",):
        yield name, (sizes["vocab_size"], hidden)
    matrices = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(sizes["num_hidden_layers"]):
        for name, size in matrices.items():
            yield f"{layer}.{name}", size


def compare(shape: str, share: float, device: torch.device) -> dict[str, Any]:
    """Return the bytes and seconds of a full sync and of a sync by difference."""
    generator = torch.Generator(device).manual_seed(0)
    watches = {name: Stopwatch(device) for name in ("pack", "encode", "checksum", "apply")}
    full_bytes = difference_bytes = parameters = 0
    bucket: list[tuple[str, torch.Tensor]] = []
    shapes = list(tensors(shape))
    for number, (name, size) in enumerate(shapes):
        weight = torch.randn(size, generator=generator, device=device).bfloat16()
        parameters += weight.numel()
        kept, receiver = host_copy(bits_of(weight)), Receiver(device)
        receiver.keep(name, weight)
        new = bits_of(weight)  # shares the memory
        for part in torch.split(new, 1 << 26):
            part ^= (torch.rand(part.shape, generator=generator, device=device) < share).to(torch.int16)
        with watches["encode"]:
            encoding, positions, values = encode(kept.to(device), new)
            kept.copy_(new)
            positions, values = positions.cpu(), values.cpu()
        with watches["checksum"]:
            expected = checksum(new)
        difference_bytes += positions.nbytes + values.nbytes
        region = RegionDifference(name=name, start=[0, 0], shape=size, encoding=encoding, checksum=expected)
        with watches["apply"]:
            ((_, found),) = receiver.changed([region], {"positions": positions, "values": values})
        if not torch.equal(bits_of(found), new):
            raise SystemExit(f"weight_sync.py: the server's bits of {name} differ from the trainer's")
        bucket.append((name, weight))
        if sum(tensor.nbytes for _, tensor in bucket) >= BUCKET or number == len(shapes) - 1:
            with watches["pack"]:
                full_bytes += packed(Bucket(bucket), form_of(Bucket(bucket)), device).nbytes
            bucket = []
    seconds = {name: watch.seconds for name, watch in watches.items()}
    longer = seconds["encode"] + seconds["checksum"] + seconds["apply"] - seconds["pack"]
    sizes = {"parameters": parameters, "full_bytes": full_bytes, "difference_bytes": difference_bytes}
    return {**sizes, **seconds, "bandwidth": (full_bytes - difference_bytes) / max(longer, 1e-9)}


if __name__ == "__main__":
    main()
